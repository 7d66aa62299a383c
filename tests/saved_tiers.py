"""Reads the tiers out of a saved state of a whole context (the layout is told in native/llama/kvq-tiers-state.cpp)."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from native_api import block_size, decode, parse_tiers, row_bytes
from numpy.typing import NDArray
from reference_model import Rows
from tiny_models import TinyModel

HEADER_BYTES = 344  # pykvq's own header, see native/api/pykvq-state.cpp


@dataclass
class Cell:
    """A token in the cache: its tier, its row among the saved rows of that tier, the sequences it belongs to."""

    tier: int
    row: int
    sequences: list[int]


@dataclass
class SavedTiers:
    """One sequence in one stream of a saved cache."""

    tiny: TinyModel
    types: list[list[tuple[str, str]]]  # of K and V, [tier][layer]
    cells: dict[int, Cell] = field(default_factory=dict)  # by position
    # [tier][layer]: the rows of K and V as they lie in memory, [n, bytes of a row]
    data: list[list[tuple[NDArray[np.uint8], NDArray[np.uint8]]]] = field(default_factory=list)

    def tier_of(self, pos: int) -> int:
        return self.cells[pos].tier

    def positions(self, tier: int) -> list[int]:
        return sorted(pos for pos, cell in self.cells.items() if cell.tier == tier)

    def bytes_at(self, pos: int, layer: int) -> tuple[bytes, bytes]:
        """K and V of a token, all heads."""
        cell = self.cells[pos]
        k, v = self.data[cell.tier][layer]
        return k[cell.row].tobytes(), v[cell.row].tobytes()

    def decoded(self, tier: int, layer: int) -> list[NDArray[np.float32]]:
        """K and V of a tier's rows: [n, n_head_kv, head_dim], without the padding behind each head."""
        result = []
        for kv_type, dim, rows in zip(self.types[tier][layer], self._dims(), self.data[tier][layer], strict=True):
            n_head = self.tiny.n_head_kv
            padded = padded_dim(kv_type, dim)
            values = decode(kv_type, rows.tobytes(), len(rows) * n_head * padded)
            result.append(values.reshape(len(rows), n_head, padded)[:, :, :dim])
        return result

    def rows(self, positions: Iterable[int], rotations: tuple[int, int] = (1, 1)) -> list[Rows]:
        """K and V of the tokens at these positions, a pair a layer, whatever tier they are in.

        ``rotations`` are the sizes of the Hadamard matrices that K and V are stored rotated by.
        """
        cells = [self.cells[pos] for pos in positions]
        result = []
        for layer in range(self.tiny.n_layer):
            tiers = [self.decoded(tier, layer) for tier in range(len(self.data))]
            k, v = (np.array([tiers[c.tier][i][c.row] for c in cells], dtype=np.float64) for i in range(2))
            result.append((unrotate(k, rotations[0]), unrotate(v, rotations[1])))
        return result

    def _dims(self) -> tuple[int, int]:
        return self.tiny.head_dim_k, self.tiny.dim_v


def padded_dim(kv_type: str, dim: int) -> int:
    block = block_size(kv_type)
    return -(-dim // block) * block


def unrotate(rows: NDArray[np.float64], size: int) -> NDArray[np.float64]:
    """Multiplies each run of ``size`` values by the orthonormal Hadamard matrix, which is its own inverse."""
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return (rows.reshape(-1, size) @ (matrix / np.sqrt(size))).reshape(rows.shape)


def read_saved_tiers(state: bytes, tiny: TinyModel, tiers: str, seq: int = 0) -> list[SavedTiers]:
    """Returns what each stream holds of a sequence. What follows the tiers (sliding-window layers) is ignored."""
    specs = parse_tiers(tiers)
    types = [[s.layers.get(i, (s.type_k, s.type_v)) for i in range(tiny.n_layer)] for s in specs]
    offset = HEADER_BYTES

    def take(layout: str) -> tuple[int, ...]:
        nonlocal offset
        values = struct.unpack_from("<" + layout, state, offset)
        offset += struct.calcsize("<" + layout)
        return values

    (n_arch,) = take("I")
    offset += n_arch
    n_stream, n_tiers, n_layer = take("III")
    take(f"{2 * n_tiers}I")
    counts = iter(take(f"{n_stream * n_tiers}I"))
    streams = []
    for _ in range(n_stream):
        stream = SavedTiers(tiny, types)
        for tier in range(n_tiers):
            n_cells = next(counts)
            for row in range(n_cells):
                pos, n_seq = take("iI")
                sequences = list(take(f"{n_seq}i"))
                if seq in sequences:
                    assert pos not in stream.cells, f"position {pos} is there twice"
                    stream.cells[pos] = Cell(tier, row, sequences)
            layers = []
            for layer in range(n_layer):
                pair = []
                for kv_type, dim in zip(types[tier][layer], (tiny.head_dim_k, tiny.dim_v), strict=True):
                    row_size = row_bytes(kv_type, padded_dim(kv_type, dim) * tiny.n_head_kv)
                    rows = np.frombuffer(state, np.uint8, n_cells * row_size, offset).reshape(n_cells, row_size)
                    offset += n_cells * row_size
                    pair.append(rows)
                layers.append((pair[0], pair[1]))
            stream.data.append(layers)
        streams.append(stream)
    if tiny.window == 0:
        assert offset == len(state)
    return streams
