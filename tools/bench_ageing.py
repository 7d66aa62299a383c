"""What ageing costs: latencies of generated tokens with a tiered KV cache, and the share that moving tokens takes.

    python tools/bench_ageing.py MODEL.gguf --kv ultra4 --n-tokens 2000

A token whose decode moved older tokens to a lower tier is told apart by kv_info(). What it took above the median of its
neighbours is counted as ageing.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from pykvq import Llama

_NEIGHBOURS = 32  # tokens before and after one that are compared with it
_CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass(frozen=True)
class AgeingCost:
    """Token latencies in milliseconds; the share is of the time of all tokens."""

    p50: float
    p95: float
    p99: float
    p99_over_p50: float
    n_ageing: int  # tokens whose decode moved others
    ageing_median: float  # latency of those
    ageing_share: float


def ageing_cost(seconds: npt.NDArray[np.float64], n_moved: npt.NDArray[np.int64]) -> AgeingCost:
    """What n latencies say, given how many older tokens each decode moved."""
    aged = n_moved > 0
    excess = 0.0
    for i in np.flatnonzero(aged):
        near = slice(max(0, i - _NEIGHBOURS), i + _NEIGHBOURS + 1)
        excess += seconds[i] - float(np.median(seconds[near][~aged[near]]))
    p50, p95, p99 = (float(value) for value in 1e3 * np.percentile(seconds, [50, 95, 99]))
    return AgeingCost(
        p50=p50,
        p95=p95,
        p99=p99,
        p99_over_p50=p99 / p50,
        n_ageing=int(aged.sum()),
        ageing_median=1e3 * float(np.median(seconds[aged])) if aged.any() else 0.0,
        ageing_share=excess / float(seconds.sum()),
    )


def measure(llm: Llama, n_prompt: int, n_tokens: int, clock: Callable[[], float]) -> AgeingCost:
    """Generates n_tokens tokens after a prompt of n_prompt, one decode a token."""

    def n_requantized() -> int:
        return sum(tier["n_requantized"] for tier in llm.kv_info()["tiers"])

    words = llm.tokenize("The river flows east under the old stone bridge while the town sleeps. ")
    llm.reset()
    llm.eval([words[i % len(words)] for i in range(n_prompt)])
    seconds, n_moved = np.empty(n_tokens), np.empty(n_tokens, dtype=np.int64)
    for i in range(n_tokens):
        before = n_requantized()
        start = clock()
        llm.eval([llm.sample(temp=0.0)])
        seconds[i] = clock() - start
        n_moved[i] = n_requantized() - before
    return ageing_cost(seconds, n_moved)


def main() -> None:
    """Reads the command line, measures and prints."""
    parser = argparse.ArgumentParser(description="Token latencies with a tiered KV cache, and what ageing costs.")
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("--kv", default="ultra4", help="preset or tiers (default: %(default)s)")
    parser.add_argument("--n-prompt", type=int, default=512, metavar="N", help="default: %(default)s")
    parser.add_argument("--n-tokens", type=int, default=2000, metavar="N", help="default: %(default)s")
    parser.add_argument("--n-ctx", type=int, default=8192, metavar="N", help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=None, metavar="N", help="default: the physical cores")
    parser.add_argument("--clock", choices=_CLOCKS, default="wall", help="cpu is steadier on a busy machine")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    with Llama(args.model, kv_quant=args.kv, n_ctx=args.n_ctx, n_threads=args.threads) as llm:
        cost = measure(llm, args.n_prompt, args.n_tokens, _CLOCKS[args.clock])
    if args.json:
        print(json.dumps({**vars(args), **asdict(cost)}))
        return
    print(f"{args.n_tokens} tokens after {args.n_prompt}, {args.kv}, {args.clock} time")
    print(
        f"token latency ms  p50 {cost.p50:.2f}  p95 {cost.p95:.2f}  p99 {cost.p99:.2f}  p99/p50 {cost.p99_over_p50:.2f}"
    )
    print(f"{cost.n_ageing} tokens moved older ones: median {cost.ageing_median:.2f} ms")
    print(f"ageing share of decode time: {100 * cost.ageing_share:.2f} %")


if __name__ == "__main__":
    main()
