"""The KV types decoded in NumPy from docs/formats.md alone, compared bit for bit with the C code."""

from collections.abc import Callable

import numpy as np
import pytest
from pykvq._cffi import ffi, lib

BLOCK = 64
CODEBOOK_Q4_VE = np.array([-127, -96, -75, -58, -44, -31, -18, -6, 6, 18, 31, 44, 58, 75, 96, 127], np.float32)
CODEBOOK_Q2_T = np.array([-127, -38, 38, 127], np.float32)


def codes_q4_ve(qs: np.ndarray) -> np.ndarray:
    """qs [blocks, 32] -> codes [blocks, 64]."""
    return np.concatenate([qs & 15, qs >> 4], axis=1)


def codes_q2_t(qs: np.ndarray) -> np.ndarray:
    """qs [blocks, 16] -> codes [blocks, 64]."""
    return np.concatenate([(qs >> shift) & 3 for shift in (0, 2, 4, 6)], axis=1)


def levels_of(codebook: np.ndarray, codes: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
    """A block without its scale -> what the scale is multiplied with."""
    return lambda block: codebook[codes(block)]


def extra_bits(qh: np.ndarray) -> np.ndarray:
    """qh [blocks, 2] -> two bits for each of the first 8 values, [blocks, 8]."""
    return np.stack([(qh[:, i // 4] >> 2 * (i % 4)) & 3 for i in range(8)], axis=1)


def levels_q4_ves(block: np.ndarray) -> np.ndarray:
    codes = codes_q4_ve(block[:, 2:]).astype(np.int32)
    levels = CODEBOOK_Q4_VE[codes]
    levels[:, :8] = 3 * (codes[:, :8] + 16 * extra_bits(block[:, :2])) - 94
    return levels


def levels_q2_ts(block: np.ndarray) -> np.ndarray:
    codes = codes_q2_t(block[:, 2:])
    levels = CODEBOOK_Q2_T[codes]
    levels[:, :8] = CODEBOOK_Q4_VE[codes[:, :8] + 4 * extra_bits(block[:, :2])]
    return levels


FORMATS: dict[str, tuple[int, Callable[[np.ndarray], np.ndarray]]] = {
    "q4_ve": (34, levels_of(CODEBOOK_Q4_VE, codes_q4_ve)),
    "q2_t": (18, levels_of(CODEBOOK_Q2_T, codes_q2_t)),
    "q4_ves": (36, levels_q4_ves),
    "q2_ts": (20, levels_q2_ts),
}


def decode_from_prose(name: str, data: bytes) -> np.ndarray:
    """Bytes of whole blocks -> float32 values, as docs/formats.md says."""
    block_bytes, levels = FORMATS[name]
    blocks = np.frombuffer(data, np.uint8).reshape(-1, block_bytes)
    d = blocks[:, :2].copy().view("<f2").astype(np.float32)
    return (d * levels(blocks[:, 2:])).ravel()


def encode_in_c(name: str, x: np.ndarray) -> bytes:
    x = np.ascontiguousarray(x, np.float32)
    data = bytearray(x.size // BLOCK * FORMATS[name][0])
    status = lib.pykvq_kv_type_encode(name.encode(), ffi.from_buffer("float[]", x), x.size, ffi.from_buffer(data))
    assert status == lib.PYKVQ_STATUS_OK
    return bytes(data)


def decode_in_c(name: str, data: bytes) -> np.ndarray:
    y = np.empty(len(data) // FORMATS[name][0] * BLOCK, np.float32)
    status = lib.pykvq_kv_type_decode(name.encode(), data, y.size, ffi.from_buffer("float[]", y))
    assert status == lib.PYKVQ_STATUS_OK
    return y


def random_blocks(name: str, rng: np.random.Generator) -> bytes:
    """Blocks of every code with scales from subnormal to the largest half."""
    block_bytes = FORMATS[name][0]
    blocks = rng.integers(0, 256, (4096, block_bytes), np.uint8)
    scales = np.abs(rng.standard_normal(4096) * 10.0 ** rng.uniform(-8, 4, 4096)).astype("<f2")
    blocks[:, :2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks.tobytes()


@pytest.mark.parametrize("name", FORMATS)
def test_block_size(name: str) -> None:
    assert lib.pykvq_kv_type_block_size(name.encode()) == BLOCK
    assert lib.pykvq_kv_type_block_bytes(name.encode()) == FORMATS[name][0]


@pytest.mark.parametrize("name", FORMATS)
def test_any_bytes_decode_alike(name: str) -> None:
    data = random_blocks(name, np.random.default_rng(1))
    expected = decode_from_prose(name, data)
    assert np.array_equal(decode_in_c(name, data).view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "draw",
    [
        lambda rng: rng.standard_normal(BLOCK * 256),
        lambda rng: rng.standard_cauchy(BLOCK * 256),
        lambda rng: np.zeros(BLOCK),
        lambda rng: np.full(BLOCK, 1e-42),
    ],
    ids=["normal", "cauchy", "zero", "denormal"],
)
def test_encoded_values_decode_alike(name: str, draw: Callable[[np.random.Generator], np.ndarray]) -> None:
    data = encode_in_c(name, draw(np.random.default_rng(2)))
    expected = decode_from_prose(name, data)
    assert np.isfinite(expected).all()
    assert np.array_equal(decode_in_c(name, data).view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_block_is_nan(name: str, bad: float) -> None:
    x = np.ones(2 * BLOCK)
    x[5] = bad
    for y in (decode_from_prose(name, encode_in_c(name, x)), decode_in_c(name, encode_in_c(name, x))):
        assert np.isnan(y[:BLOCK]).all()
        assert np.isfinite(y[BLOCK:]).all()


# what the first 8 values of a block and the others may be, over the scale
LEVELS = {
    "q4_ve": (CODEBOOK_Q4_VE, CODEBOOK_Q4_VE),
    "q2_t": (CODEBOOK_Q2_T, CODEBOOK_Q2_T),
    "q4_ves": (np.arange(-94, 96, 3, dtype=np.float32), CODEBOOK_Q4_VE),
    "q2_ts": (CODEBOOK_Q4_VE, CODEBOOK_Q2_T),
}


@pytest.mark.parametrize("name", FORMATS)
def test_codes_are_the_nearest_for_the_stored_scale(name: str) -> None:
    x = np.random.default_rng(3).standard_normal((64, BLOCK)).astype(np.float32)
    data = encode_in_c(name, x)
    d = np.frombuffer(data, np.uint8).reshape(-1, FORMATS[name][0])[:, :2].copy().view("<f2").astype(np.float64)
    error = np.abs(decode_from_prose(name, data).reshape(-1, BLOCK) - x)
    for part, codebook in zip((slice(0, 8), slice(8, BLOCK)), LEVELS[name], strict=True):
        levels = d[:, :, None] * codebook.astype(np.float64)  # [blocks, 1, levels]
        best = np.abs(levels - x[:, part, None]).min(axis=2)
        assert (error[:, part] <= best * (1 + 1e-5) + 1e-7).all()
