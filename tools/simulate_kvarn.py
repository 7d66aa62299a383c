"""What KVarN-4 would cost in place of a tier of ours: the same text, batches, sinks, window and reference logits.

    python tools/simulate_kvarn.py MODEL.gguf --text FILE [--ctx 2048] [--chunks 4] [--bits 4] [--float-weights]

There is no KVarN kernel here. Its README describes the method: rotate each head by a Hadamard matrix, bring tiles of
128 tokens to unit variance along both axes, then round to nearest, keys a channel and values a token. The script runs
a cache of F16 tiers, and as soon as 128 tokens have left the window it replaces them in the saved state by what KVarN
would give back: 4.375 bits an element at 4 bits, 2.375 at 2.
"""

from __future__ import annotations

import argparse
import hashlib
import struct
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pykvq import native
from pykvq.calibration.transforms import orthogonal
from pykvq.kv_config import parse_kv_config
from pykvq.quality.evaluate import REFERENCE, SKIPPED_SHARE, split_text
from pykvq.quality.float_weights import write_float_copy
from pykvq.quality.metrics import Divergence, log_softmax
from pykvq.runtime import Context, Model

TILE = 128
ITERATIONS = 6
# of a saved state: the header of native/api/pykvq-state.cpp, and where its fields are
HEADER_BYTES = 344
CHECKSUM_AT, CHECKSUM_BYTES = 280, 64

Array = npt.NDArray[np.float64]


def kvarn(x: Array, bits: int, axis: int) -> Array:
    """A tile [n_tokens, head_dim] quantized and back; axis 0 rounds channels over tokens (K), axis 1 tokens (V)."""
    rotation = orthogonal(x.shape[-1])
    tile = x @ rotation.T
    rows, columns = np.ones((len(tile), 1)), np.ones((1, tile.shape[1]))
    for _ in range(ITERATIONS):
        rows = rows * np.maximum(np.sqrt(((tile / (rows * columns)) ** 2).mean(1, keepdims=True)), 1e-6)
        columns = columns * np.maximum(np.sqrt(((tile / (rows * columns)) ** 2).mean(0, keepdims=True)), 1e-6)
    rows = rows.astype(np.float16).astype(np.float64)
    unit = tile / (rows * columns)
    low = unit.min(axis, keepdims=True)
    step = np.maximum((unit.max(axis, keepdims=True) - low) / (2**bits - 1), 1e-9)
    result: Array = ((np.round((unit - low) / step) * step + low) * rows * columns) @ rotation
    return result


class TieredState:
    """The rows of the second of two F16 tiers in a saved state of a whole context, which can be replaced."""

    def __init__(self, data: bytearray, dims: tuple[int, int, int]) -> None:
        self.data = data
        self.n_head, self.dim_k, self.dim_v = dims
        offset = HEADER_BYTES
        (n_arch,) = struct.unpack_from("<I", data, offset)
        offset += 4 + n_arch
        n_stream, n_tiers, self.n_layer = struct.unpack_from("<III", data, offset)
        assert (n_stream, n_tiers) == (1, 2)
        offset += 12 + 4 * 2 * n_tiers
        counts = struct.unpack_from("<2I", data, offset)
        offset += 8
        row_bytes = 2 * self.n_head * (self.dim_k + self.dim_v)
        self.positions: list[int] = []
        for tier, n_cells in enumerate(counts):
            for _ in range(n_cells):
                pos, n_seq = struct.unpack_from("<iI", data, offset)
                offset += 8 + 4 * n_seq
                if tier == 1:
                    self.positions.append(pos)
            self.rows_at = offset
            offset += n_cells * row_bytes * self.n_layer

    def tensors(self) -> list[npt.NDArray[np.float16]]:
        """K and V by turns of each layer, [n_rows, n_head, head_dim], as views into the state."""
        result = []
        offset = self.rows_at
        for _ in range(self.n_layer):
            for dim in (self.dim_k, self.dim_v):
                n = len(self.positions) * self.n_head * dim
                view = np.frombuffer(self.data, dtype=np.float16, count=n, offset=offset)
                result.append(view.reshape(len(self.positions), self.n_head, dim))
                offset += 2 * n
        return result


def sha256_hex(data: bytes | bytearray) -> str:
    """SHA-256 in hex."""
    return hashlib.sha256(data).hexdigest()


def sign(data: bytearray) -> None:
    """Corrects the checksum of a state that was edited."""
    data[CHECKSUM_AT : CHECKSUM_AT + CHECKSUM_BYTES] = bytes(CHECKSUM_BYTES)
    text = bytes(data[:HEADER_BYTES]) + sha256_hex(bytes(data[HEADER_BYTES:])).encode()
    data[CHECKSUM_AT : CHECKSUM_AT + CHECKSUM_BYTES] = sha256_hex(text).encode()


def save(context: Context) -> bytearray:
    """The state of the whole context."""
    ffi, lib = native.load()
    size = ffi.new("size_t *")
    with context._use() as pointer:
        native.check(lib.pykvq_state_size(pointer, -1, size))
        data = bytearray(size[0])
        native.check(lib.pykvq_state_save(pointer, -1, ffi.from_buffer("uint8_t[]", data), len(data), size))
    return data[: size[0]]


def load(context: Context, data: bytearray) -> None:
    """Puts a state of the whole context back."""
    ffi, lib = native.load()
    with context._use() as pointer:
        native.check(lib.pykvq_state_load(pointer, -1, ffi.from_buffer("uint8_t[]", data), len(data)))


def compress(context: Context, n_done: int, bits: int, dims: tuple[int, int, int]) -> int:
    """Replaces whole tiles of tokens that left the window; n_done is how many were before. Returns how many are now."""
    n_arrived = context.read_tiers()[1].n_used
    if n_arrived - n_done < TILE:
        return n_done
    state = TieredState(save(context), dims)
    order = np.argsort(state.positions, kind="stable")
    while n_arrived - n_done >= TILE:
        rows = order[n_done : n_done + TILE]
        for i, tensor in enumerate(state.tensors()):
            for head in range(tensor.shape[1]):
                tensor[rows, head] = kvarn(tensor[rows, head].astype(np.float64), bits, axis=i % 2)
        n_done += TILE
    sign(state.data)
    load(context, state.data)
    return n_done


def main() -> None:
    """Prints one line in the form of pykvq-fidelity."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", required=True)
    parser.add_argument("--ctx", type=int, default=2048)
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--float-weights", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pykvq-") as folder:
        path = args.model
        if args.float_weights:
            path = str(Path(folder) / "float.gguf")
            write_float_copy(args.model, path)
        with Model(path) as model:
            summary = simulate(model, Path(args.text).read_text(errors="replace"), args)
    print(f"{Path(args.model).name} KVarN-{args.bits}:", ", ".join(f"{k} {v:.5g}" for k, v in summary.items()))


def simulate(model: Model, text: str, args: Any) -> dict[str, float]:
    """The divergence from the same cache in F16."""
    tokens = model.tokenize(text.encode(), add_special=True, parse_special=False)
    kv = parse_kv_config(REFERENCE)
    n_batch = kv.micro_batch(args.ctx)
    params = {"n_ctx": args.ctx, "n_batch": n_batch, "n_ubatch": n_batch, "n_threads": args.threads}
    dims = (model.info.n_head_kv, model.info.head_dim_k, model.info.head_dim_v)
    divergence = Divergence()
    base, context = (Context(model, kv, **params) for _ in range(2))
    for chunk in split_text(tokens, args.ctx, args.chunks):
        base.kv_clear()
        context.kv_clear()
        n_done = 0
        for start in range(0, args.ctx, n_batch):
            piece = chunk[start : start + n_batch].tolist()
            rows = []
            for each in (base, context):
                each.decode(piece, start, [True] * len(piece))
                rows.append(np.stack([each.logits(i) for i in range(len(piece))]))
            keep = [i for i in range(len(piece)) if args.ctx // SKIPPED_SHARE <= start + i < args.ctx - 1]
            if keep:
                divergence.add(log_softmax(rows[0][keep]), rows[1][keep], chunk[np.array(keep) + start + 1])
            n_done = compress(context, n_done, args.bits, dims)
    return divergence.summary()


if __name__ == "__main__":
    main()
