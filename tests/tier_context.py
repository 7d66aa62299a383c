"""The tiny model and the tiers that tests of the tiered cache use, and what they ask of a context."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from native_api import Context
from reference_model import ReferenceModel
from saved_tiers import SavedTiers, read_saved_tiers
from tiny_models import TinyModel

TINY = TinyModel()
TIERS = "f16:32+q4_ve:64+q2_t"
ALL_F16 = "f16:32+f16:64+f16"
N_CTX = 512
N_UBATCH = 16
N_SINK = 4
WINDOW = 32
# sequences with a stream each
MANY_STREAMS = {"n_seq_max": 8, "n_ctx": 8 * N_CTX, "kv_unified": False, "n_ubatch": N_UBATCH}
# rows of the first tier above
FIRST_ROWS = N_SINK + WINDOW + N_UBATCH + 64
LOGITS_LIMIT = 3e-4  # over the standard deviation of the logits, as in test_tiers_exact


def read(context: Context, seq: int = 0, tiers: str = TIERS, stream: int = 0) -> SavedTiers:
    return read_saved_tiers(context.save(), TINY, tiers, seq)[stream]


def error_of(
    reference: ReferenceModel, context: Context, token: int, pos: int, seq: int = 0, tiers: str = TIERS, stream: int = 0
) -> float:
    """Decodes a token; how far its logits are from a model that attends to what the cache holds of its sequence."""
    logits = context.decode([token], pos, seq)[-1]
    state = read(context, seq, tiers, stream)
    expected, _ = reference.forward(token, pos, state.rows(sorted(p for p in state.cells if p <= pos)))
    return float(np.abs(logits - expected).max() / expected.std())


def assert_unchanged(before: SavedTiers, after: SavedTiers, positions: Iterable[int]) -> None:
    for pos in positions:
        assert after.tier_of(pos) == before.tier_of(pos)
        for layer in range(TINY.n_layer):
            assert after.bytes_at(pos, layer) == before.bytes_at(pos, layer), pos
