"""How fast a model runs with each KV cache format, against llama.cpp's own F16 attention, in one process.

Every format is measured in turn, several times, and medians are compared: what disturbs the machine disturbs all. The
tokens that fill a cache to a depth are computed in short sequences that do not see each other and are joined later, so
that 131,072 of them take minutes; they are real tokens that went through every tier.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pykvq.calibration.automatic import calibration_for
from pykvq.errors import InvalidArgumentError
from pykvq.files import sha256_of
from pykvq.kv_config import OWN_TYPES, KVConfig, parse_kv_config
from pykvq.kv_layers import with_calibration
from pykvq.runtime import Context, Model
from pykvq.sample_text import sample_text

BASELINE = "llama.cpp f16"
_MAX_BATCH = 512
_SEQUENCE, _HELPER_SEQUENCE = 0, 1
_BANDWIDTH_BYTES = 256 << 20
_WARM_UP_TOKENS = 4
_SETTLE_SECONDS = 0.02  # the threads of the context before poll some 5 ms for more work
_MIN_CTX = 4096  # as a model is loaded if nothing else is asked


@dataclass(frozen=True)
class BenchSettings:
    """What to measure; see ``bench``."""

    kv: tuple[str, ...] = ("f16", "q8_0", "ultra4", "ultra2")
    depths: tuple[int, ...] = (0, 4096)
    n_prefill: int = 512
    n_gen: int = 64
    n_repeat: int = 5
    n_threads: int | None = None
    calibrate: str | os.PathLike[str] | None = None
    n_gpu_layers: int = 0


@dataclass
class BenchRow:
    """One format at one depth. Rates are medians in tokens a second; ratios are to ``BASELINE`` at the same depth."""

    kv: str
    depth: int
    route: str
    calibrated: bool = False
    prefill_tps: float = 0.0
    decode_tps: float = 0.0
    prefill_ratio: float = 0.0
    decode_ratio: float = 0.0
    kv_bytes: int = 0
    kv_bytes_used: int = 0
    attention_gbps: float | None = None  # kv_bytes_used over what a token takes more than at depth 0
    prefill_seconds: list[float] = field(default_factory=list)
    decode_seconds: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class _Kind:
    """A format, and whose attention kernel runs it."""

    name: str
    kv: KVConfig
    calibration: Path | None = None
    by_llama_cpp: bool = False

    def route(self, n_gpu_layers: int) -> str:
        """Whose attention runs on what; on a GPU the formats of llama.cpp are its own."""
        tiered = "tiered " if self.kv.is_tiered else ""
        if n_gpu_layers:
            own = self.kv.is_tiered or self.kv.tiers[0].type_k in OWN_TYPES
            return f"{'pykvq' if own else 'llama.cpp'} {tiered}flash attention (gpu)"
        return f"{'llama.cpp' if self.by_llama_cpp else 'pykvq'} {tiered}flash attention (cpu)"


def bench(
    model_path: str | os.PathLike[str],
    settings: BenchSettings | None = None,
    *,
    progress: Callable[[float, str], None] | None = None,
) -> dict[str, Any]:
    """Measures prefill and decode for each KV format at each depth.

    Args:
        model_path: a GGUF file.
        settings: formats, depths (tokens in the cache), tokens to prefill and to generate, repeats, threads, and
            calibrate and n_gpu_layers, as for ``Llama``.
        progress: called with the share done (0 to 1) and what is next.

    Returns:
        ``{model, settings, read_gbps, rows}``: rows as ``BenchRow``; read_gbps is the read bandwidth of all threads.

    Raises:
        InvalidArgumentError: an unknown format, or no depth, repeat or token to measure.
        OutOfMemoryError, ModelFileError, UnsupportedModelError, CalibrationError: as when loading a model.
    """
    settings = settings or BenchSettings()
    _check(settings)
    configs = [parse_kv_config(name) for name in settings.kv]
    rows: list[BenchRow] = []
    with Model(model_path, n_gpu_layers=settings.n_gpu_layers) as model:
        kinds = [_Kind(BASELINE, parse_kv_config("f16"), by_llama_cpp=True)]
        for name, config in zip(settings.kv, configs, strict=True):
            kinds.append(_make_kind(model, model_path, name, config, settings))
        tokens = _text_tokens(model, max(settings.depths) + settings.n_prefill + settings.n_gen)
        for i, depth in enumerate(settings.depths):
            share = i / len(settings.depths)
            report = _part_of(progress, share, 1 / len(settings.depths), f"depth {depth:,}")
            rows += _bench_depth(model, kinds, depth, tokens, settings, report)
        n_threads = settings.n_threads or os.cpu_count() or 1
        description = model.description()
    _add_ratios(rows)
    return {
        "model": _identify(Path(model_path), description),
        "settings": asdict(settings),
        "read_gbps": _read_bandwidth(n_threads),
        "rows": [asdict(row) for row in rows],
    }


def _make_kind(
    model: Model, model_path: str | os.PathLike[str], name: str, config: KVConfig, settings: BenchSettings
) -> _Kind:
    n_ctx = max(settings.depths) + settings.n_prefill
    info = calibration_for(model, model_path, config, settings.calibrate, n_ctx, settings.n_threads)
    return _Kind(name, with_calibration(config, info), None if info is None else info.path)


def _check(settings: BenchSettings) -> None:
    sizes = {"prefill": settings.n_prefill, "gen": settings.n_gen, "repeat": settings.n_repeat}
    for name, size in sizes.items():
        if size < 1:
            raise InvalidArgumentError(f"{name} must be at least 1, got {size}")
    if not settings.depths or min(settings.depths) < 0:
        raise InvalidArgumentError(f"depths must be numbers of tokens from 0 up, got {list(settings.depths)}")


def _text_tokens(model: Model, n: int) -> list[int]:
    """Real text, as attention is not spread evenly over it; repeated as often as it takes."""
    text = sample_text()[: 8 * n]
    tokens = model.tokenize(text.encode(), add_special=False, parse_special=False)
    return (tokens * (n // len(tokens) + 1))[:n]


def _part_of(
    progress: Callable[[float, str], None] | None, start: float, size: float, what: str
) -> Callable[[float, str], None]:
    def report(share: float, step: str) -> None:
        if progress is not None:
            progress(start + size * share, f"{what}, {step}")

    return report


def _bench_depth(
    model: Model,
    kinds: list[_Kind],
    depth: int,
    tokens: list[int],
    settings: BenchSettings,
    report: Callable[[float, str], None],
) -> list[BenchRow]:
    n_ctx = max(_MIN_CTX, depth + max(settings.n_prefill, settings.n_gen) + _WARM_UP_TOKENS)
    rows = [
        BenchRow(kind.name, depth, kind.route(settings.n_gpu_layers), kind.calibration is not None) for kind in kinds
    ]
    n_steps = len(kinds) * (1 + settings.n_repeat)
    with contextlib.ExitStack() as stack:
        contexts: dict[KVConfig, Context] = {}  # both F16 kernels read the same cache
        for i, kind in enumerate(kinds):
            report(i / n_steps, f"filling {kind.name}")
            if kind.kv not in contexts:
                contexts[kind.kv] = stack.enter_context(contextlib.closing(_make_context(model, kind, n_ctx, settings)))
                _fill(contexts[kind.kv], tokens[:depth])
            with _kernel_of(kind):  # warm-up
                _decode_each(contexts[kind.kv], tokens[depth : depth + _WARM_UP_TOKENS], depth)
            rows[i].kv_bytes = contexts[kind.kv].read_info().kv_bytes
        for repeat in range(settings.n_repeat):
            for i, kind in enumerate(kinds):
                report((len(kinds) * (1 + repeat) + i) / n_steps, f"{kind.name}, {repeat + 1} of {settings.n_repeat}")
                _measure(contexts[kind.kv], kind, rows[i], tokens[depth:], settings)
        for kind, row in zip(kinds, rows, strict=True):
            _summarize(row, contexts[kind.kv], settings)
    return rows


def _make_context(model: Model, kind: _Kind, n_ctx: int, settings: BenchSettings) -> Context:
    n_threads = settings.n_threads
    return Context(
        model,
        kind.kv,
        n_ctx=n_ctx,
        n_batch=_MAX_BATCH,
        n_ubatch=kind.kv.micro_batch(n_ctx),
        n_seq_max=2,
        kv_unified=True,
        n_threads=n_threads,
        n_threads_batch=n_threads,
        flash_attn=1,
        calibration=None if kind.calibration is None else os.fspath(kind.calibration),
    )


def _fill(context: Context, tokens: list[int]) -> None:
    for start in range(0, len(tokens), context.info.n_batch):
        chunk = tokens[start : start + context.info.n_batch]
        n = len(chunk)
        context.decode_batch(chunk, range(start, start + n), [_HELPER_SEQUENCE] * n, [False] * n)
        context.kv_copy(_HELPER_SEQUENCE, _SEQUENCE)
        context.kv_remove(0, _HELPER_SEQUENCE)


@contextlib.contextmanager
def _kernel_of(kind: _Kind) -> Iterator[None]:
    """Chooses the attention kernel, see native/cpu/kvq-cpu.h."""
    name = "PYKVQ_FLASH_ATTN"
    before = os.environ.get(name)
    os.environ[name] = "ggml" if kind.by_llama_cpp else "pykvq"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _decode_each(context: Context, tokens: list[int], depth: int) -> float:
    """Seconds for the tokens one by one; the cache is as before afterwards."""
    start = time.perf_counter()
    for i, token in enumerate(tokens):
        context.decode([token], depth + i, [True])
    seconds = time.perf_counter() - start
    context.kv_remove(depth)
    return seconds


def _measure(context: Context, kind: _Kind, row: BenchRow, tokens: list[int], settings: BenchSettings) -> None:
    time.sleep(_SETTLE_SECONDS)
    with _kernel_of(kind):
        _decode_each(context, tokens[:_WARM_UP_TOKENS], row.depth)
        row.decode_seconds.append(_decode_each(context, tokens[: settings.n_gen], row.depth))
        n = settings.n_prefill
        start = time.perf_counter()
        for first in range(0, n, context.info.n_batch):
            chunk = tokens[first : min(first + context.info.n_batch, n)]
            last = first + len(chunk) == n
            context.decode(chunk, row.depth + first, [False] * (len(chunk) - 1) + [last])
        row.prefill_seconds.append(time.perf_counter() - start)
        context.kv_remove(row.depth)


def _summarize(row: BenchRow, context: Context, settings: BenchSettings) -> None:
    row.decode_tps = settings.n_gen / statistics.median(row.decode_seconds)
    row.prefill_tps = settings.n_prefill / statistics.median(row.prefill_seconds)
    tiers = context.read_tiers()
    if tiers:
        row.kv_bytes_used = sum(tier.n_bytes * tier.n_used // tier.n_capacity for tier in tiers if tier.n_capacity)
    else:
        row.kv_bytes_used = row.kv_bytes * row.depth // context.info.n_ctx


def _add_ratios(rows: list[BenchRow]) -> None:
    base = {row.depth: row for row in rows if row.kv == BASELINE}
    shallow = {row.kv: 1 / row.decode_tps for row in rows if row.depth == 0}
    for row in rows:
        row.prefill_ratio = row.prefill_tps / base[row.depth].prefill_tps
        row.decode_ratio = row.decode_tps / base[row.depth].decode_tps
        seconds = 1 / row.decode_tps - shallow[row.kv] if row.kv in shallow else 0.0
        if seconds > 0:
            row.attention_gbps = row.kv_bytes_used / seconds / 1e9


def _identify(path: Path, description: str) -> dict[str, Any]:
    return {"name": path.name, "description": description, "bytes": path.stat().st_size, "sha256": sha256_of(path)}


def _read_bandwidth(n_threads: int) -> float:
    """Gigabytes a second that all threads together read from memory; the best of five."""
    arrays = [np.ones(_BANDWIDTH_BYTES // 8, dtype=np.uint64) for _ in range(n_threads)]
    best = 0.0
    with ThreadPoolExecutor(n_threads) as pool:
        for _ in range(5):
            start = time.perf_counter()
            list(pool.map(np.bitwise_or.reduce, arrays))
            best = max(best, n_threads * _BANDWIDTH_BYTES / (time.perf_counter() - start))
    return best / 1e9
