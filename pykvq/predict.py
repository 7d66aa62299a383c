"""What a KV cache will take, told before anything is loaded."""

from __future__ import annotations

import os
from typing import Any

from pykvq import native
from pykvq.handles import context_params
from pykvq.kv_config import DEFAULT_PRESET, DEFAULT_SINKS, KVConfig, parse_kv_config
from pykvq.runtime import Model


def predict_kv(
    model_path: str | os.PathLike[str],
    n_ctx: int = 4096,
    kv_quant: str | KVConfig = DEFAULT_PRESET,
    *,
    n_batch: int = 512,
    n_ubatch: int | None = None,
    n_sink: int = DEFAULT_SINKS,
) -> dict[str, Any]:
    """The size of a KV cache, from the model file's metadata alone; no weights are read.

    Args:
        model_path: the GGUF file.
        n_ctx: tokens, 0 for the model's training context.
        kv_quant, n_batch, n_ubatch, n_sink: as for ``Llama``.

    Returns:
        kv_quant, n_ctx, kv_bytes, kv_bytes_f16 (the same cache in F16) and their quotient ratio. Recurrent state of
        hybrid models is not counted.

    Raises:
        ModelFileError: the file is missing, damaged or not a GGUF file.
        InvalidArgumentError, UnsupportedModelError: as ``Llama`` would raise.
    """
    kv = parse_kv_config(kv_quant, n_sink=n_sink)
    ffi, lib = native.load()
    sizes = ffi.new("int64_t[2]")
    with Model(model_path, metadata_only=True) as model, model.use() as pointer:
        tokens = n_ctx or model.info.n_ctx_train
        micro_batch = min(n_batch, kv.micro_batch(tokens) if n_ubatch is None else n_ubatch)
        params, keep_alive = context_params(kv, {"n_ctx": tokens, "n_batch": n_batch, "n_ubatch": micro_batch})
        native.check(lib.pykvq_predict_kv(pointer, params, sizes, sizes + 1))
        del keep_alive
    n_bytes, n_bytes_f16 = sizes
    return {
        "kv_quant": kv.name,
        "n_ctx": tokens,
        "kv_bytes": n_bytes,
        "kv_bytes_f16": n_bytes_f16,
        "ratio": n_bytes / n_bytes_f16 if n_bytes_f16 else 1.0,
    }
