"""What decode attention on a GPU is bound by, on paper: bytes and instructions a token. docs/gpu.md explains the terms.

python tools/gpu_roofline.py
"""

from __future__ import annotations

from dataclasses import dataclass

LAYERS, KV_HEADS, GROUP, HEAD_DIM = 32, 8, 4, 128  # Llama-3-8B
DEPTHS = (32_768, 131_072)
WEIGHT_BYTES = 4.92e9  # Q4_K_M

# Bytes of a row of K and one of V of a head
ROW_BYTES = {
    "f16": 2 * 2 * HEAD_DIM,
    "q8_0": 2 * 34 * HEAD_DIM // 32,
    "ultra4": (36 + 34) * HEAD_DIM // 64,
    "ultra2": (20 + 18) * HEAD_DIM // 64,
}


@dataclass(frozen=True)
class Card:
    """Peak bytes a second; lanes times clock; and how many cycles an integer instruction takes of a lane."""

    name: str
    bandwidth: float
    lanes: float
    integer_cost: float


CARDS = (
    Card("RX 7900 XTX", 960e9, 96 * 64 * 2.5e9, 1.0),
    Card("H200 SXM", 4.8e12, 132 * 128 * 1.83e9, 2.0),
)


# Vector instructions a cell and KV head, counted in the ISA of attend_span<2, 1, 4> for gfx1100 (K q4_ves, V q4_ve):
# a part of 32 values takes 57 to look up its codes and some 23 for addresses, the mask, its stores and the loop
STAGE = 2 * HEAD_DIM // 32 * 80
SCORE = HEAD_DIM // 64 * 106  # of which 64 are dot products of four bytes
SOFTMAX = GROUP * 25
SUM_INTEGER = HEAD_DIM // 8 * 8  # bytes to floats
SUM_FLOAT = HEAD_DIM // 8 * 31  # pairs of products issue together

INTEGER = STAGE + SCORE + SUM_INTEGER
FLOAT = SOFTMAX + SUM_FLOAT


def main() -> None:
    """Prints the table."""
    print(f"{INTEGER + FLOAT} vector instructions a cell and KV head, {INTEGER} of them on integers")
    heads = f"{'GB':>6} {'memory ms':>9} {'issue ms':>9} {'bound ms':>9} {'F16 / this':>10}"
    print(f"{'card':12} {'depth':>7} {'cache':7} {heads}")
    for card in CARDS:
        print(f"{card.name:12} the weights, Q4_K_M: {1e3 * WEIGHT_BYTES / card.bandwidth:.1f} ms a token")
        for depth in DEPTHS:
            cells = depth * LAYERS * KV_HEADS
            f16 = cells * ROW_BYTES["f16"] / card.bandwidth
            for name, row_bytes in ROW_BYTES.items():
                memory = cells * row_bytes / card.bandwidth
                own = name.startswith("ultra")
                issue = cells * (INTEGER * card.integer_cost + FLOAT) / card.lanes if own else 0.0
                bound = max(memory, issue)
                print(
                    f"{card.name:12} {depth:7} {name:7} {cells * row_bytes / 1e9:6.2f} {1e3 * memory:9.2f} "
                    f"{f'{1e3 * issue:9.2f}' if own else '        -'} {1e3 * bound:9.2f} {f16 / bound:10.2f}"
                )


if __name__ == "__main__":
    main()
