"""Fidelity: what a KV format costs on a model, measured against an F16 cache on the same text."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pykvq import native
from pykvq.arguments import require_type
from pykvq.calibration import CalibrationInfo
from pykvq.calibration.automatic import calibration_for
from pykvq.errors import InvalidArgumentError
from pykvq.handles import ProgressCallback
from pykvq.kv_config import KVConfig, parse_kv_configs
from pykvq.kv_layers import with_calibration
from pykvq.measured import remember
from pykvq.quality.evaluate import REFERENCE, SKIPPED_SHARE, Candidate, CandidateResult, compare, split_text
from pykvq.quality.float_weights import write_float_copy
from pykvq.quality.metrics import METRICS_VERSION
from pykvq.quality.needle import needle
from pykvq.runtime import Model
from pykvq.sample_text import sample_text

__all__ = ["DEFAULT_FORMATS", "fidelity", "needle"]

DEFAULT_FORMATS = ("f16", "q8_0", "q4_0", "ultra4", "ultra2")
DEFAULT_CTX = 2048
DEFAULT_CHUNKS = 4


def fidelity(
    model_path: str | os.PathLike[str],
    kv: str | KVConfig | Sequence[str | KVConfig] = DEFAULT_FORMATS,
    *,
    text: str | None = None,
    n_ctx: int = DEFAULT_CTX,
    n_chunks: int = DEFAULT_CHUNKS,
    float_weights: bool = False,
    calibrate: str | os.PathLike[str] | None = None,
    n_threads: int | None = None,
    progress: Callable[[float], None] | None = None,
    calibration_progress: ProgressCallback | None = None,
) -> dict[str, Any]:
    """Compares KV formats with an F16 cache: what each predicts after the same tokens, batch by batch as in generation.

    Args:
        model_path: the GGUF file.
        kv: presets, tiers or KVConfigs, or one of them.
        text: what to predict; None for help texts that Python carries.
        n_ctx, n_chunks: texts of n_ctx tokens, evenly spread over ``text``; the first quarter of each is not compared.
        float_weights: decode the weights to F32 in a temporary copy first. Quantized weights round activations to 8
            bits, and any change of the cache flips some of these roundings; that noise is the row "f16" of a report.
        calibrate: as for ``Llama``; always of the model as it is.
        n_threads: None for the physical cores.
        progress: called with 0 to 1.
        calibration_progress: the same for a calibration that is made first.

    Returns:
        model, settings, versions, and presets: a dict for each format with name, tiers, bits_per_element (all-in, of
        n_ctx tokens), kv_bytes, kld_mean (nats; kld_sem its standard error, tokens taken as independent), kld_median,
        kld_p99, kld_p999, same_top (share of tokens whose likeliest successor is the same), ppl, ppl_change (relative
        to F16) and ppl_change_error (its standard error), nonfinite (share of logits), n_aged (tokens of a chunk that
        have left the first tier at its end, None without tiers; 0 says that n_ctx is too small to measure the format).

    Raises:
        InvalidArgumentError: an unknown format, or a text shorter than one chunk.
        InternalError: what the model predicts with an F16 cache is not a number. ModelFileError, CalibrationError, ...
    """
    require_type("model_path", model_path, str, os.PathLike)
    require_type("text", text, str, optional=True)
    require_type("n_ctx", n_ctx, int)
    require_type("n_chunks", n_chunks, int)
    require_type("float_weights", float_weights, bool)
    n_ctx, n_chunks = int(n_ctx), int(n_chunks)
    configs = parse_kv_configs(kv)
    if not configs or n_chunks < 1 or n_ctx < 4 * SKIPPED_SHARE:
        raise InvalidArgumentError(
            f"nothing to compare: {len(configs)} formats, {n_chunks} chunks of {n_ctx} tokens "
            f"(give at least 1, 1 and {4 * SKIPPED_SHARE})"
        )
    text = sample_text() if text is None else text
    with tempfile.TemporaryDirectory(prefix="pykvq-") as folder:
        with Model(model_path) as model:
            tokens = model.tokenize(text.encode("utf-8", "replace"), add_special=True, parse_special=False)
            chunks = split_text(tokens, n_ctx, n_chunks)
            candidates = [
                _candidate(model, model_path, config, calibrate, n_ctx, n_threads, calibration_progress)
                for config in configs
            ]
            used: str | os.PathLike[str] = model_path
            if float_weights:
                used = Path(folder) / "float.gguf"
                write_float_copy(model_path, used)

        def report(done: int, total: int) -> None:
            if progress is not None:
                progress(done / total)

        with Model(used) as model:
            results = compare(model, candidates, chunks, n_threads=n_threads, progress=report)
    result: dict[str, Any] = {
        "model": Path(model_path).name,
        "settings": {
            "n_ctx": n_ctx,
            "n_chunks": len(chunks),
            "n_compared": len(results[0].divergence.kld),
            "reference": REFERENCE,
            "float_weights": float_weights,
            "metrics_version": METRICS_VERSION,
        },
        "versions": _versions(),
        "presets": [_row(result) for result in results],
    }
    remember(model_path, result)
    return result


def _candidate(
    model: Model,
    model_path: str | os.PathLike[str],
    config: KVConfig,
    calibrate: str | os.PathLike[str] | None,
    n_ctx: int,
    n_threads: int | None,
    progress: ProgressCallback | None,
) -> Candidate:
    info: CalibrationInfo | None = calibration_for(model, model_path, config, calibrate, n_ctx, n_threads, progress)
    config = with_calibration(config, info)
    return Candidate(config.name, config, None if info is None else os.fspath(info.path))


def _row(result: CandidateResult) -> dict[str, Any]:
    return {
        "name": result.candidate.name,
        "tiers": str(result.candidate.kv),
        "calibrated": result.candidate.calibration is not None,
        "bits_per_element": result.bits_per_element,
        "kv_bytes": result.kv_bytes,
        "n_aged": result.n_aged,
        **result.divergence.summary(),
    }


def _versions() -> dict[str, Any]:
    from pykvq import __version__

    ffi, lib = native.load()
    build = json.loads(ffi.string(lib.pykvq_build_info()))
    return {"pykvq": __version__, **{name: build.get(name) for name in ("llama_cpp", "ggml", "compiler", "build")}}
