"""What a server is told at its start."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pykvq.batching.scheduler import DEFAULT_MAX_QUEUE
from pykvq.errors import InvalidArgumentError
from pykvq.kv_config import DEFAULT_PRESET
from pykvq.models import resolve

DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 1234


@dataclass(frozen=True)
class ModelSpec:
    """A model that may be asked for: its name, and the GGUF file."""

    name: str
    path: Path


@dataclass(frozen=True)
class LoadOptions:
    """How one model is loaded; ``force`` loads it even if the memory that is free does not suffice."""

    kv_quant: str = DEFAULT_PRESET
    n_slots: int = 4
    n_ctx: int = 4096
    n_threads: int | None = None
    n_gpu_layers: int = 0
    force: bool = False


@dataclass(frozen=True)
class ServerSettings:
    """How models are loaded and requests are served. Sizes are in tokens, bytes and seconds.

    Args:
        models: what there is; the first one is for requests that name none, and is loaded at once. Without any, models
            come by ``ModelRegistry.open``.
        n_slots, n_ctx: requests answered at once by each model, and the tokens that each may have.
        api_keys: one of these must come with each request; empty: none is asked for.
        max_queue: requests that may wait for a slot of a model.
        request_timeout: most seconds for an answer, None for no limit.
        load_wait: seconds that a request waits while its model is loaded, before 503.
        idle_unload: seconds after which an unused model is unloaded, None for never.
        memory_budget: most bytes of weights, KV caches and scratch of all loaded models, None for no limit.
        max_body: most bytes of a request.
        cors_origins: web origins whose scripts may use the server; empty: none.
    """

    models: tuple[ModelSpec, ...]
    kv_quant: str = DEFAULT_PRESET
    n_slots: int = 4
    n_ctx: int = 4096
    n_threads: int | None = None
    n_gpu_layers: int = 0
    api_keys: tuple[str, ...] = ()
    max_queue: int = DEFAULT_MAX_QUEUE
    request_timeout: float | None = None
    load_wait: float = 60.0
    idle_unload: float | None = None
    memory_budget: int | None = None
    max_body: int = 8 << 20
    cors_origins: tuple[str, ...] = ()
    verbose: bool = False

    @property
    def load_options(self) -> LoadOptions:
        """How each of the models is loaded."""
        return LoadOptions(self.kv_quant, self.n_slots, self.n_ctx, self.n_threads, self.n_gpu_layers)


def parse_models(arguments: list[str]) -> tuple[ModelSpec, ...]:
    """Models from command-line arguments MODEL or NAME=MODEL, where MODEL is what ``pykvq-run`` takes.

    The name is the file's, without its ending, if it is left out.

    Raises:
        InvalidArgumentError: a file is missing, or two models have one name. DownloadError: it cannot be fetched.
    """
    specs: list[ModelSpec] = []
    for argument in arguments:
        name, equals, model = argument.partition("=")
        if not equals or Path(argument).exists():
            name, model = "", argument
        path = resolve(model).expanduser()
        if not path.is_file():
            raise InvalidArgumentError(f"model file not found: {str(path)!r}")
        spec = ModelSpec(name or path.stem, path)
        if any(spec.name == other.name for other in specs):
            raise InvalidArgumentError(f"two models are called {spec.name!r}: give one another name, with NAME=MODEL")
        specs.append(spec)
    return tuple(specs)
