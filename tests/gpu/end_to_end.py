"""Logits of a real model on the GPU against the CPU's, by KV format; prints a table, exits 1 if one is too far off.

Run by ``run.sh``. The CPU computes products of weights with activations of 8 bits, the GPU with more, so that two
correct results differ: F16, where our attention kernels have no part, is the measure for the other formats.
"""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np

from pykvq import catalog, native
from pykvq.kv_config import parse_kv_config
from pykvq.runtime import Context, Model

FORMATS = ("f16", "q4_ve", "q2_t", "ultra4", "ultra2", "f16:128+q8_0", "f16:64+q4_ve:128+q2_t")
N_CTX = 2048
N_BATCH = 64
N_PROMPT = 1536  # ageing moves most of them down
N_MORE = 32  # one at a time: decode
MAX_RATIO = 2.0  # of F16's KLD
FLOOR = 1e-4  # below which no ratio is asked for


class SplitCounter(logging.Handler):
    """The number of graph splits that llama.cpp logs last: those of a token."""

    def __init__(self) -> None:
        super().__init__()
        self.splits: str | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps the number."""
        if match := re.search(r"graph.*splits = ([^,]+),", record.getMessage()):
            self.splits = match.group(1)


def log_softmax(logits: Any) -> Any:
    """In double precision."""
    x = np.asarray(logits, dtype=np.float64)
    return x - x.max() - np.log(np.exp(x - x.max()).sum())


def run(model: Model, kv: str) -> tuple[Any, int, str | None]:
    """Log probabilities after the prompt and each further token, GPU layers that do attention, graph splits."""
    counter = SplitCounter()
    logger = logging.getLogger("pykvq")
    logger.addHandler(counter)
    tokens = np.random.default_rng(5).integers(1000, 20000, N_PROMPT + N_MORE).tolist()
    starts = [*range(0, N_PROMPT, N_BATCH), *range(N_PROMPT, len(tokens))]
    rows = []
    try:
        config = parse_kv_config(kv)
        params = {"n_batch": N_BATCH, "n_ubatch": config.micro_batch(N_CTX), "flash_attn": 1}
        context = Context(model, config, n_ctx=N_CTX, **params)
    finally:
        logger.removeHandler(counter)
    for start, end in zip(starts, [*starts[1:], len(tokens)], strict=True):
        n = end - start
        context.decode_batch(tokens[start:end], range(start, end), [0] * n, [False] * (n - 1) + [True])
        if end >= N_PROMPT:
            rows.append(log_softmax(context.logits()))
    n_device = context.info.n_attention_device
    context.close()
    return np.stack(rows), n_device, counter.splits


def main() -> int:
    """Compares every format; 1 if the GPU is further from the CPU than F16 allows, or does not do the attention."""
    native.set_verbose(True)
    path: Path = catalog.fetch(catalog.default_model())
    logging.getLogger("pykvq").propagate = False
    for handler in logging.getLogger("pykvq").handlers[:]:
        logging.getLogger("pykvq").removeHandler(handler)
    failed = False
    measure = 0.0
    f16_splits: str | None = None
    print(f"{'KV format':24} {'KLD cpu|gpu':>12} {'same top':>9} {'attention':>10}  graph splits")
    with Model(path, n_gpu_layers=0) as on_cpu, Model(path, n_gpu_layers=-1) as on_gpu:
        n_layers = on_gpu.info.n_layer
        for kv in FORMATS:
            (cpu, _, _), (gpu, n_device, splits) = run(on_cpu, kv), run(on_gpu, kv)
            kld = float((np.exp(cpu) * (cpu - gpu)).sum(axis=-1).mean())
            same = float((cpu.argmax(axis=-1) == gpu.argmax(axis=-1)).mean())
            if kv == "f16":
                measure, f16_splits = kld, splits
            problems = []
            if not np.isfinite(gpu).all() or kld > max(MAX_RATIO * measure, FLOOR):
                problems.append("too far from the CPU")
            if n_device != n_layers:
                problems.append(f"the GPU does attention for {n_device} of {n_layers} layers")
            if splits != f16_splits:
                problems.append(f"F16 has {f16_splits} graph splits")
            failed = failed or bool(problems)
            layers = f"{n_device}/{n_layers}"
            print(f"{kv:24} {kld:12.2e} {same:9.3f} {layers:>10}  {splits}  {'; '.join(problems)}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
