"""A tiered cache in lock step with what it must hold and compute.

After every decode the cache's saved state is read. The rows that moved to a lower tier must be what the reference
encoder makes of them, every token must be in the tier of its age, and the logits must be those of a float64 model that
attends to exactly the decoded rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from file_model import FileModel
from native_api import Context, Model, encode, parse_tiers
from reference_model import ReferenceModel
from saved_tiers import SavedTiers, padded_dim, read_saved_tiers
from tiny_models import TinyModel, random_tokens

N_SINK = 4
N_UBATCH = 16
N_CTX = 512

MODELS = {
    "64": TinyModel(head_dim_k=64),
    "80": TinyModel(head_dim_k=80),
    "96": TinyModel(head_dim_k=96),
    "112": TinyModel(head_dim_k=112, n_head=6, n_head_kv=2),
    "128": TinyModel(head_dim_k=128, n_head=4, n_head_kv=1),
    "256": TinyModel(head_dim_k=256, n_head=3, n_head_kv=3),
    "128/64": TinyModel(arch="plamo3", head_dim_k=128, head_dim_v=64),
    "64/128": TinyModel(arch="plamo3", head_dim_k=64, head_dim_v=128),
    "96/80": TinyModel(arch="plamo3", head_dim_k=96, head_dim_v=80),
    "64 f16": TinyModel(head_dim_k=64, f16=True),
}
TIERS = (
    "f16:64+q4_ve:128+q2_t",
    "f16:32+q8_0:64+q4_ve",
    "f16:40+q8_0/q4_ve:50+q4_ve/f16:70+q2_t",
    "f16:40+q4_ve@k1=q8_0,v0=q2_t:60+q2_t@v1=q4_ve",
    "f16:48+f16",
    "bf16:48+f16",
)
# Largest error of a logit over their standard deviation; measured at most 1.3e-4, of float32 sums.
LOGITS_LIMIT = 3e-4
# Matrices in F16 make ggml round activations to F16; measured at most 1.4e-3.
LOGITS_LIMIT_F16 = 5e-3
# K and V of a new token are rounded to the first tier's type: half a unit in the last place of values up to 16.
OWN_LIMIT = {"f16": 8e-3, "bf16": 6e-2}


@dataclass
class Step:
    """A decode: its tokens, the logits of all of them, and the cache behind it."""

    start: int
    tokens: list[int]
    logits: np.ndarray
    state: SavedTiers


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    loaded = {}

    def load(name):
        if name not in loaded:
            loaded[name] = Model(MODELS[name].write(folder / f"{len(loaded)}.gguf"))
        return loaded[name]

    return load


@pytest.fixture
def unrotated(monkeypatch):
    """K and V are stored as the model makes them."""
    monkeypatch.setenv("LLAMA_ATTN_ROT_DISABLE", "1")


def steps(model, tiny, tiers, tokens=None, n_sink=N_SINK):
    """Decodes tokens, 400 if none are given, in batches of 1 to N_UBATCH."""
    context = Context(model, tiers, n_ctx=N_CTX, n_ubatch=N_UBATCH, n_sink=n_sink)
    tokens = tokens or random_tokens(400)
    rng = np.random.default_rng(7)
    start = 0
    while start < len(tokens):
        batch = tokens[start : start + int(rng.integers(1, N_UBATCH + 1))]
        logits = context.decode(batch, start, want="all")
        (state,) = read_saved_tiers(context.save(), tiny, tiers)
        assert context.used() == [len(state.positions(t)) for t in range(len(state.types))]
        yield Step(start, batch, logits, state)
        start += len(batch)


def assert_same_row(kv_type: str, found: bytes, expected: bytes, where: str) -> None:
    if kv_type != "q8_0":
        assert found == expected, where
        return
    # ggml's SIMD encoder of q8_0 rounds halves to even, its reference encoder away from 0
    found_blocks, expected_blocks = (np.frombuffer(data, np.int8).reshape(-1, 34) for data in (found, expected))
    difference = np.abs(found_blocks.astype(int) - expected_blocks)
    assert not difference[:, :2].any(), where
    assert difference.max() <= 1, where
    assert np.mean(difference > 0) < 0.05, where


def requantized(before: SavedTiers, pos: int, tier: int, layer: int) -> list[bytes]:
    """K and V of a token as the reference encoder makes them for another tier.

    A head that is no multiple of the block is repeated up to one.
    """
    result = []
    cell = before.cells[pos]
    for kv_type, rows in zip(before.types[tier][layer], before.decoded(cell.tier, layer), strict=True):
        row = rows[cell.row]
        padded = np.arange(padded_dim(kv_type, row.shape[1])) % row.shape[1]
        result.append(encode(kv_type, row[:, padded]))
    return result


def assert_rows(before: SavedTiers, after: SavedTiers) -> int:
    """Every token of before is in after, the same or requantized one tier down. Returns how many moved."""
    n_moved = 0
    for pos, cell in before.cells.items():
        new_tier = after.tier_of(pos)
        n_moved += new_tier != cell.tier
        assert new_tier - cell.tier in (0, 1), f"position {pos} went from tier {cell.tier} to {new_tier}"
        for layer in range(before.tiny.n_layer):
            found = after.bytes_at(pos, layer)
            if new_tier == cell.tier:
                assert found == before.bytes_at(pos, layer), f"position {pos} changed in tier {new_tier}"
                continue
            expected = requantized(before, pos, new_tier, layer)
            for kv_type, *rows in zip(before.types[new_tier][layer], found, expected, strict=True):
                assert_same_row(kv_type, *rows, f"position {pos}, {kv_type}")
    return n_moved


def assert_places(state: SavedTiers, n_tokens: int, window: int, n_sink: int = N_SINK) -> None:
    assert sorted(state.cells) == list(range(n_tokens))
    for pos in [*range(min(n_sink, n_tokens)), *range(max(0, n_tokens - window), n_tokens)]:
        assert state.tier_of(pos) == 0, f"position {pos} of {n_tokens} is in tier {state.tier_of(pos)}"
    tiers = [state.tier_of(pos) for pos in range(n_sink, n_tokens)]
    assert tiers == sorted(tiers, reverse=True), "an older token is in a higher tier than a younger one"


def logits_error(reference: ReferenceModel, step: Step, i: int, rotations=(1, 1), swap=None) -> tuple[float, float]:
    """How far token i of the step is from the reference: its logits, and the K and V rows that it wrote."""
    pos = step.start + i
    rows = step.state.rows(range(pos + 1), rotations)
    if swap:
        rows[0][0][list(swap)] = rows[0][0][list(swap[::-1])]
    logits, own = reference.forward(step.tokens[i], pos, rows)
    own_error = max(float(np.abs(rows[il][j][pos] - own[il][j][0]).max()) for il in range(len(rows)) for j in range(2))
    return float(np.abs(step.logits[i] - logits).max() / logits.std()), own_error


def run_lock_step(
    model: Model,
    tiny: TinyModel | FileModel,
    tiers: str,
    n_sink: int = N_SINK,
    rotations: tuple[int, int] = (1, 1),
    tokens: list[int] | None = None,
    limit: float = LOGITS_LIMIT,
    every: int = 1,
) -> None:
    """Compares the rows of each step, and logits with those of the reference at one step in ``every``."""
    reference = ReferenceModel(tiny, np.float64 if isinstance(tiny, TinyModel) else np.float32)
    window = parse_tiers(tiers)[0].n_tokens
    before, n_moved, errors, own_errors = None, 0, [], []
    for i_step, step in enumerate(steps(model, tiny, tiers, tokens, n_sink)):
        assert_places(step.state, step.start + len(step.tokens), window, n_sink)
        n_moved += assert_rows(before, step.state) if before else 0
        before = step.state
        for i in {0, len(step.tokens) - 1} if i_step % every == 0 else ():
            error, own_error = logits_error(reference, step, i, rotations)
            errors.append(error)
            own_errors.append(own_error)
    print(f"largest errors: logits {max(errors):.1e}, rows written {max(own_errors):.1e}; {n_moved} moves")
    assert max(errors) < limit
    assert max(own_errors) < OWN_LIMIT[before.types[0][0][0]]
    # each token came down tier by tier
    assert n_moved == sum(tier * len(before.positions(tier)) for tier in range(len(before.types)))
    assert all(before.positions(tier) for tier in range(len(before.types))), "not every tier was used"


@pytest.mark.parametrize("tiers", TIERS)
@pytest.mark.parametrize("name", MODELS)
def test_lock_step(model_of, unrotated, name, tiers):
    run_lock_step(model_of(name), MODELS[name], tiers, limit=LOGITS_LIMIT_F16 if MODELS[name].f16 else LOGITS_LIMIT)


@pytest.mark.parametrize(("window", "n_sink"), [(0, 4), (64, 0), (0, 0), (1, 1), (64, 60)])
def test_lock_step_of_windows_and_sinks(model_of, unrotated, window, n_sink):
    run_lock_step(model_of("64"), MODELS["64"], f"f16:{window}+q4_ve:100+q2_t", n_sink)


@pytest.mark.parametrize(("name", "rotations"), [("64", (64, 64)), ("256", (256, 64)), ("128/64", (128, 64))])
def test_lock_step_of_rotated_rows(model_of, name, rotations):
    """By default llama.cpp stores K and V rotated by Hadamard matrices if a type is quantized."""
    run_lock_step(model_of(name), MODELS[name], TIERS[0], rotations=rotations)


def test_lock_step_of_smollm2(smollm2_f32):
    """30 layers with the keys and values of a trained model, stored rotated as by default."""
    tokens = np.random.default_rng(0).integers(300, 49000, 260).tolist()
    model = Model(smollm2_f32.path)
    run_lock_step(model, smollm2_f32, "f16:48+q4_ve:64+q2_t", rotations=(64, 64), tokens=tokens, every=12)


@pytest.mark.parametrize("swap", [(0, 399), (2, 3), (390, 391)])
def test_the_reference_sees_two_swapped_rows(model_of, unrotated, swap):
    """Two keys of one head and layer change places: sinks, neighbours in a low tier, neighbours in the window."""
    *_, last = steps(model_of("64"), MODELS["64"], TIERS[0])
    reference = ReferenceModel(MODELS["64"])
    i = len(last.tokens) - 1
    assert logits_error(reference, last, i)[0] < LOGITS_LIMIT
    assert logits_error(reference, last, i, swap=swap)[0] > 3 * LOGITS_LIMIT


def test_the_row_check_sees_a_flipped_bit(model_of, unrotated):
    before, after = None, None
    for step in steps(model_of("64"), MODELS["64"], TIERS[0], random_tokens(200)):
        before, after = after, step.state
    assert_rows(before, after)
    tier = max(cell.tier for cell in after.cells.values())
    after.data[tier][1] = (after.data[tier][1][0], after.data[tier][1][1] ^ np.uint8(1))
    with pytest.raises(AssertionError, match="position"):
        assert_rows(before, after)
