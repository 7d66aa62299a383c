"""Many requests on one context: slots, continuous batching, and the thread that owns the context."""
