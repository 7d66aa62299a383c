"""Whether tokens are a greedy answer, up to how sums are rounded."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pykvq import Llama

# A token that was drawn in a batch of another size may be this much less likely, in logits, than the best one: products
# round differently with the number of rows. A wrong position, a missing BOS or another chat's token cost several.
TIE_LOGITS = 0.5


def worst_gap(model: Llama, prompt: Sequence[int], answer: Sequence[int]) -> float:
    """By how many logits the worst token of an answer misses the best one, when the model computes it alone."""
    model.reset()
    model.eval(prompt)
    worst = 0.0
    for token in answer:
        logits = model._engine.context.logits()
        worst = max(worst, float(np.max(logits) - logits[token]))
        model.eval([token])
    return worst
