"""What a model and its KV cache will take, told before anything is loaded."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil

from pykvq import native
from pykvq.calibration import CalibrationInfo, find
from pykvq.errors import CalibrationError, ModelFileError, OutOfMemoryError, UnsupportedModelError
from pykvq.gguf_header import Header, read_headers
from pykvq.handles import FieldValue, context_params
from pykvq.kv_config import DEFAULT_PRESET, DEFAULT_SINKS, KVConfig, parse_kv_config
from pykvq.kv_layers import usual_deal, with_calibration
from pykvq.runtime import Model

_MIB = 1024 * 1024
_MEASURED_TOKENS = 1 << 16  # longer contexts are extrapolated
_CONTEXT_STEP = 256  # llama.cpp rounds contexts up to it
# from the best to the smallest: what to fall back on when a format does not fit
_SMALLER_FORMATS = ("q8_0", "ultra4", "ultra2", "q2_t")


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes that a model with one context takes once it runs.

    ``mapped_bytes`` are pages of the model file, which the system may drop and read again; ``weights_bytes`` all
    weights in main memory, mapped ones and a calibration's matrices included; ``compute_bytes`` scratch of the
    computation, and llama.cpp's tables of the cells of the cache and of its graphs. ``process_bytes`` is what this
    process takes without any weights: Python, the libraries, and the model's vocabulary. The ``device_*`` are on GPUs.
    """

    n_ctx: int
    mapped_bytes: int
    weights_bytes: int
    kv_bytes: int
    compute_bytes: int
    process_bytes: int
    device_weights_bytes: int
    device_kv_bytes: int
    device_compute_bytes: int

    @property
    def new_bytes(self) -> int:
        """Main memory that loading takes in addition to what the process has already."""
        return self.weights_bytes + self.kv_bytes + self.compute_bytes

    @property
    def total_bytes(self) -> int:
        """Resident memory of the process with the model loaded and the context in use."""
        return self.process_bytes + self.new_bytes

    @property
    def device_bytes(self) -> int:
        """Memory on GPUs."""
        return self.device_weights_bytes + self.device_kv_bytes + self.device_compute_bytes


def kv_bytes(model: Model, kv: KVConfig, n_ctx: int, **params: FieldValue) -> tuple[int, int]:
    """Bytes of a KV cache, and of the same cache in F16. Recurrent state is not counted."""
    ffi, lib = native.load()
    sizes = ffi.new("int64_t[2]")
    values, keep_alive = context_params(kv, _sized(kv, n_ctx, params))
    with model.use() as pointer:
        native.check(lib.pykvq_predict_kv(pointer, values, sizes, sizes + 1))
    del keep_alive
    return int(sizes[0]), int(sizes[1])


class Predictor:
    """A model of which only the metadata is loaded, to ask what contexts of it would take. A context manager.

    Args:
        model_path: the GGUF file; of a split model, its first file.
        model_params: fields of ``pykvq_model_params`` that the load will have.

    Raises:
        ModelFileError: the file is missing, damaged or not a GGUF file.
    """

    def __init__(self, model_path: str | os.PathLike[str], **model_params: FieldValue) -> None:
        self._path = Path(model_path)
        self._uses_mmap = model_params.get("use_mmap") is not False
        self._model = Model(model_path, progress=None, metadata_only=True, **model_params)
        self.n_ctx_train = self._model.info.n_ctx_train
        # with a calibration; see pykvq.calibration.calibrate
        self._sorts_keys = self._model.info.head_dim_k % 64 == 0
        # the vocabulary is loaded now, and nothing else of the model
        self._process_bytes = int(psutil.Process().memory_info().rss)
        self._mapped: int | None = None

    def __enter__(self) -> Predictor:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._model.close()

    def calibrated(self, kv: KVConfig) -> KVConfig:
        """The format as a load with a calibration has it, or at most as large while there is none."""
        if any(tier.dealt for tier in kv.tiers) and self._calibration is not None:
            return with_calibration(kv, self._calibration)
        return usual_deal(kv.with_spectral_keys() if self._sorts_keys else kv, self._model.info.n_layer)

    @cached_property
    def _calibration(self) -> CalibrationInfo | None:
        """The one that is there; a damaged or foreign one is as none."""
        try:
            return find(self._path)
        except CalibrationError:
            return None

    def as_loaded(self, kv: KVConfig) -> KVConfig:
        """The format as ``Llama`` has it if nothing is said of a calibration."""
        return self.calibrated(kv) if kv.takes_calibration() else kv

    def kv_bytes(self, kv: KVConfig, n_ctx: int, **params: FieldValue) -> tuple[int, int]:
        """Bytes of a KV cache, and of the same cache in F16. Recurrent state is not counted."""
        return kv_bytes(self._model, kv, n_ctx, **params)

    def memory(self, kv: KVConfig, n_ctx: int, *, calibrated: bool = False, **params: FieldValue) -> MemoryNeed:
        """Bytes of everything: weights, KV cache and compute buffers. ``params`` are fields of the context's."""
        need = self._memory(self.calibrated(kv) if calibrated else kv, n_ctx, params)
        if not (calibrated and kv.uses_calibration):
            return need
        host, device = self._calibration_bytes
        return replace(
            need,
            weights_bytes=need.weights_bytes + host,
            device_weights_bytes=need.device_weights_bytes + device,
        )

    def _memory(self, kv: KVConfig, n_ctx: int, params: Mapping[str, FieldValue]) -> MemoryNeed:
        if n_ctx > _MEASURED_TOKENS:
            return self._extrapolated(kv, n_ctx, params)
        ffi, lib = native.load()
        info = ffi.new("pykvq_memory_info *")
        values, keep_alive = context_params(kv, _sized(kv, n_ctx, params))
        with self._model.use() as model:
            native.check(lib.pykvq_predict_memory(model, values, info))
        del keep_alive
        self._calibration_bytes = int(info.calibration_bytes), int(info.device_calibration_bytes)
        mapped = self._mapped_bytes()
        return MemoryNeed(
            n_ctx=n_ctx,
            mapped_bytes=mapped if self._uses_mmap else 0,
            weights_bytes=mapped + info.weights_bytes,
            kv_bytes=info.kv_bytes,
            compute_bytes=info.compute_bytes,
            process_bytes=self._process_bytes,
            device_weights_bytes=info.device_weights_bytes,
            device_kv_bytes=info.device_kv_bytes,
            device_compute_bytes=info.device_compute_bytes,
        )

    def _extrapolated(self, kv: KVConfig, n_ctx: int, params: Mapping[str, FieldValue]) -> MemoryNeed:
        """The need of a long context: llama.cpp's books alone, which a measurement makes, would take gigabytes."""
        half, full = (self._memory(kv, n, params) for n in (_MEASURED_TOKENS // 2, _MEASURED_TOKENS))
        kv_growth = self.kv_bytes(kv, n_ctx, **params)[0] / max(self.kv_bytes(kv, _MEASURED_TOKENS, **params)[0], 1)
        steps = (n_ctx - _MEASURED_TOKENS) / (_MEASURED_TOKENS // 2)
        return replace(
            full,
            n_ctx=n_ctx,
            kv_bytes=int(full.kv_bytes * kv_growth),
            device_kv_bytes=int(full.device_kv_bytes * kv_growth),
            compute_bytes=full.compute_bytes + int(steps * (full.compute_bytes - half.compute_bytes)),
            device_compute_bytes=full.device_compute_bytes
            + int(steps * (full.device_compute_bytes - half.device_compute_bytes)),
        )

    def largest_context(
        self, kv: KVConfig, budget: int, limit: int, *, calibrated: bool = False, **params: FieldValue
    ) -> int:
        """The most tokens, up to ``limit``, with which all takes at most ``budget`` bytes of main memory; or 0."""
        low, high = 0, max(limit // _CONTEXT_STEP, 1)
        if self.memory(kv, limit, calibrated=calibrated, **params).new_bytes <= budget:
            return limit
        while high - low > 1 and high - low > low // 64:
            middle = (low + high) // 2
            need = self.memory(kv, middle * _CONTEXT_STEP, calibrated=calibrated, **params)
            fits = need.new_bytes <= budget
            low, high = (middle, high) if fits else (low, middle)
        return low * _CONTEXT_STEP

    def _mapped_bytes(self) -> int:
        """Bytes of the files between the first and the last weight that is used as it is in the file.

        llama.cpp maps whole files and gives back what lies before and after those weights.
        """
        if self._mapped is None:
            self._mapped = sum(self._mapped_span(header) for header in read_headers(self._path))
        return self._mapped

    def _mapped_span(self, header: Header) -> int:
        _, lib = native.load()
        with self._model.use() as model:
            used = [
                tensor
                for tensor in header.tensors
                if lib.pykvq_model_tensor_is_as_in_file(model, tensor.name.encode("utf-8", "replace"))
            ]
        if not self._uses_mmap:
            return sum(tensor.n_bytes for tensor in used)
        ends = [tensor.offset + tensor.n_bytes for tensor in used]
        return max(ends) - min(tensor.offset for tensor in used) if used else 0


def predict_kv(
    model_path: str | os.PathLike[str],
    n_ctx: int = 4096,
    kv_quant: str | KVConfig = DEFAULT_PRESET,
    *,
    n_batch: int = 512,
    n_ubatch: int | None = None,
    n_sink: int = DEFAULT_SINKS,
    calibrated: bool = True,
) -> dict[str, Any]:
    """The size of a KV cache, from the model file's metadata alone; no weights are read.

    Args:
        model_path: the GGUF file.
        n_ctx: tokens, 0 for the model's training context.
        kv_quant, n_batch, n_ubatch, n_sink: as for ``Llama``.
        calibrated: with a calibration, with which keys of q4_ve and q2_t take a quarter of a bit more.

    Returns:
        kv_quant, n_ctx, kv_bytes, kv_bytes_f16 (the same cache in F16) and their quotient ratio. Recurrent state of
        hybrid models is not counted.

    Raises:
        ModelFileError: the file is missing, damaged or not a GGUF file.
        InvalidArgumentError, UnsupportedModelError: as ``Llama`` would raise.
    """
    kv = parse_kv_config(kv_quant, n_sink=n_sink)
    with Predictor(model_path) as predictor:
        if calibrated:
            kv = predictor.calibrated(kv)
        tokens = n_ctx or predictor.n_ctx_train
        n_bytes, n_bytes_f16 = predictor.kv_bytes(kv, tokens, n_batch=n_batch, n_ubatch=n_ubatch)
    return {
        "kv_quant": kv.name,
        "n_ctx": tokens,
        "kv_bytes": n_bytes,
        "kv_bytes_f16": n_bytes_f16,
        "ratio": n_bytes / n_bytes_f16 if n_bytes_f16 else 1.0,
    }


def predict_memory(
    model_path: str | os.PathLike[str],
    n_ctx: int = 4096,
    kv_quant: str | KVConfig = DEFAULT_PRESET,
    *,
    n_batch: int = 512,
    n_ubatch: int | None = None,
    n_sink: int = DEFAULT_SINKS,
    n_gpu_layers: int = 0,
    use_mmap: bool = True,
    calibrated: bool = True,
) -> MemoryNeed:
    """The memory of a model with its KV cache and compute buffers, from the file's metadata alone.

    ``total_bytes`` of the result is the resident memory of this process once the context has been in use to its end.
    Arguments and exceptions are those of ``Llama``; n_ctx 0 is the model's training context, ``calibrated`` says that
    formats that use a calibration have one.
    """
    kv = parse_kv_config(kv_quant, n_sink=n_sink)
    with Predictor(model_path, n_gpu_layers=n_gpu_layers, use_mmap=use_mmap) as predictor:
        n_ctx = n_ctx or predictor.n_ctx_train
        return predictor.memory(kv, n_ctx, calibrated=calibrated, n_batch=n_batch, n_ubatch=n_ubatch)


def available_memory() -> int:
    """Bytes of main memory that this process could still take, within its control group too; 0 if unknown."""
    return int(native.load()[1].pykvq_available_memory())


def require_memory(
    model_path: str | os.PathLike[str],
    kv: KVConfig,
    n_ctx: int,
    model_params: Mapping[str, FieldValue],
    params: Mapping[str, FieldValue],
    *,
    calibrated: bool = False,
) -> None:
    """Refuses to load what does not fit, before anything is allocated.

    ``model_params`` and ``params`` are fields of ``pykvq_model_params`` and ``pykvq_context_params``. A file that
    cannot be read is let through: loading it tells what is wrong. ``calibrated``: with a calibration, for formats that
    use one.

    Raises:
        OutOfMemoryError: too little is free; the message has the numbers and the largest setting that fits.
    """
    available = available_memory()
    on_device = model_params.get("n_gpu_layers", 0) != 0 and available_device_memory() > 0
    try:
        if available == 0 or (not on_device and _surely_fits(read_headers(model_path), n_ctx, available)):
            return
    except ModelFileError:
        return
    with Predictor(model_path, **model_params) as predictor:
        need = predictor.memory(kv, n_ctx or predictor.n_ctx_train, calibrated=calibrated, **params)
        _require_device_memory(model_path, need)
        if need.new_bytes > available:
            raise OutOfMemoryError(_refusal(model_path, predictor, kv, need, available, calibrated, params))


def _sized(kv: KVConfig, n_ctx: int, params: Mapping[str, FieldValue]) -> dict[str, FieldValue]:
    """Parameters of a context with the micro-batch that ``Llama`` would choose."""
    n_batch, n_ubatch = params.get("n_batch") or 512, params.get("n_ubatch") or kv.micro_batch(n_ctx)
    return {**params, "n_ctx": n_ctx, "n_batch": n_batch, "n_ubatch": min(int(n_batch), int(n_ubatch)), "force": True}


def _surely_fits(headers: list[Header], n_ctx: int, available: int) -> bool:
    """Whether generous bounds stay below half of the memory, so that nothing need be computed exactly."""
    metadata = headers[0].metadata
    arch = metadata.get("general.architecture")

    def largest(key: str) -> int:
        value = metadata.get(f"{arch}.{key}", 0)
        return int(max(value, default=0) if isinstance(value, list) else value)

    try:
        n_layer, n_embd, n_head = largest("block_count"), largest("embedding_length"), largest("attention.head_count")
        n_ctx = n_ctx or largest("context_length")
        n_head_kv = largest("attention.head_count_kv") or n_head
        head_dim = max(largest("attention.key_length"), largest("attention.value_length"), n_embd // max(n_head, 1))
        n_vocab = headers[0].length("tokenizer.ggml.tokens")
        n_ff = largest("feed_forward_length")
    except (TypeError, ValueError):
        return False
    weights = 2 * sum(header.file_bytes for header in headers)
    kv = 8 * n_ctx * n_layer * n_head_kv * head_dim
    compute = 4 * 512 * (n_ctx * max(n_head, 1) + n_vocab + 8 * n_embd + 4 * n_ff)
    return 0 < weights + kv + compute < available // 2


def available_device_memory() -> int:
    """Bytes of GPU memory that are free; 0 without a GPU."""
    return int(native.load()[1].pykvq_available_device_memory())


def _require_device_memory(model_path: str | os.PathLike[str], need: MemoryNeed) -> None:
    free = available_device_memory()
    if need.device_bytes > free > 0:
        raise OutOfMemoryError(
            f"'{os.fspath(model_path)}' needs {_mib(need.device_bytes)} of GPU memory (weights "
            f"{_mib(need.device_weights_bytes)}, KV cache {_mib(need.device_kv_bytes)}, compute buffers "
            f"{_mib(need.device_compute_bytes)}) and {_mib(free)} are free: use fewer n_gpu_layers, or force=True "
            "(--force) to try all the same"
        )


def _refusal(
    model_path: str | os.PathLike[str],
    predictor: Predictor,
    kv: KVConfig,
    need: MemoryNeed,
    available: int,
    calibrated: bool,
    params: Mapping[str, FieldValue],
) -> str:
    n_ctx = predictor.largest_context(kv, available, need.n_ctx, calibrated=calibrated, **params)
    fitting = [f"n_ctx {n_ctx} fits"] if n_ctx else []
    for name in _SMALLER_FORMATS:
        try:
            smaller = predictor.memory(parse_kv_config(name), need.n_ctx, calibrated=calibrated, **params)
        except UnsupportedModelError:  # the model's heads do not fill its blocks
            continue
        if smaller.kv_bytes < need.kv_bytes and smaller.new_bytes <= available:
            fitting.append(f"the KV format {name} fits n_ctx {need.n_ctx}")
            break
    advice = ", ".join(fitting) or "no context fits: free memory, or take a smaller model"
    return (
        f"'{os.fspath(model_path)}' with n_ctx {need.n_ctx} in {kv.name} needs {_mib(need.new_bytes)} (weights "
        f"{_mib(need.weights_bytes)}, KV cache {_mib(need.kv_bytes)}, compute buffers {_mib(need.compute_bytes)}) and "
        f"{_mib(available)} are free: {advice}; force=True (--force) loads it all the same"
    )


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / _MIB:.0f} MiB"
