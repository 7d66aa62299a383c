"""Second moments of what attention sees, collected in one pass over a text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pykvq import native
from pykvq.errors import InvalidArgumentError
from pykvq.handles import ProgressGuard, context_params, int32_pointer
from pykvq.kv_config import DEFAULT_SINKS, parse_kv_config
from pykvq.runtime import Model

Array = npt.NDArray[np.float64]
# tokens that a calibration needs at least, and those of a passage. A passage is computed twice in a row: what a long
# context is for, finding again what stood before, shows in the second half only
TEXT_TOKENS = 256
PASSAGE_TOKENS = 1024
# newest tokens of which errors are not counted: the presets keep them exact
_WINDOW = 128


@dataclass(frozen=True)
class LayerMoments:
    """Means over tokens, for each KV head of a layer; queries are those of all heads that read the KV head.

    qq, kk: mean of q qᵀ and k kᵀ after position rotation, [n_head, dim_k, dim_k]. vv: [n_head, dim_v, dim_v].
    k, v: means, [n_head, dim].
    reach, swing, output: see ``pykvq_layer_moments``, sums over the query heads of a KV head and means over queries;
    [n_head], and twice [n_head, dim_v, dim_v]. residual: squared norm of the residual stream that enters the layer.
    """

    layer: int
    qq: Array
    kk: Array
    vv: Array
    k: Array
    v: Array
    windowed: bool
    kq_scale: float
    reach: Array
    swing: Array
    output: Array
    residual: float


def collect_moments(
    model: Model,
    tokens: Sequence[int],
    *,
    n_positions: int,
    n_threads: int | None = None,
    progress: Callable[[float], bool | None] | None = None,
) -> list[LayerMoments]:
    """Computes passages of ``tokens`` at positions spread over ``n_positions``, and returns the moments by layer.

    Keys at the end of a long context are turned by larger angles than those at its start; the basis must fit both.

    Raises:
        InvalidArgumentError: too few tokens. AbortedError: ``progress`` returned False.
    """
    if len(tokens) < TEXT_TOKENS:
        raise InvalidArgumentError(f"the text has {len(tokens)} tokens: a calibration needs {TEXT_TOKENS} at least")
    ids, n_text, step = _texts(tokens, n_positions)
    ffi, lib = native.load()
    values = {"n_threads": n_threads, "n_threads_batch": n_threads, "kv_unified": True}
    params, keep_alive = context_params(parse_kv_config("f16"), values)
    guard = ProgressGuard(progress)
    out = ffi.new("pykvq_moments **")
    with model.use() as pointer:
        status = lib.pykvq_moments_collect(
            pointer,
            params,
            int32_pointer(ids),
            len(ids),
            n_text,
            step,
            DEFAULT_SINKS,
            _WINDOW,
            *guard.arguments(),
            out,
        )
    del keep_alive
    guard.check(status)
    try:
        return [_read_layer(out[0], i) for i in range(lib.pykvq_moments_layer_count(out[0]))]
    finally:
        lib.pykvq_moments_free(out[0])


def _texts(tokens: Sequence[int], n_positions: int) -> tuple[npt.NDArray[np.int32], int, int]:
    """Texts of a passage twice in a row: their tokens, the length of one, and how far apart their positions start."""
    n_passage = min(PASSAGE_TOKENS, len(tokens), max(TEXT_TOKENS, n_positions) // 2)
    passages = [tokens[start : start + n_passage] for start in range(0, len(tokens), n_passage)]
    ids = np.concatenate([np.tile(np.asarray(passage, dtype=np.int32), 2) for passage in passages])
    return ids, 2 * n_passage, max(0, n_positions - 2 * n_passage) // max(1, len(passages) - 1)


def _read_layer(moments: object, i: int) -> LayerMoments:
    ffi, lib = native.load()
    layer = ffi.new("pykvq_layer_moments *")
    native.check(lib.pykvq_moments_get_layer(moments, i, layer))

    def read(pointer: object, *shape: int) -> Array:
        n = int(np.prod(shape))
        values: Array = np.frombuffer(ffi.buffer(pointer, 8 * n), dtype=np.float64).reshape(shape).copy()
        return values

    h, dim_k, dim_v = layer.n_head, layer.dim_k, layer.dim_v
    return LayerMoments(
        layer=layer.layer,
        qq=read(layer.qq, h, dim_k, dim_k) / layer.n_query,
        kk=read(layer.kk, h, dim_k, dim_k) / layer.n_key,
        vv=read(layer.vv, h, dim_v, dim_v) / layer.n_key,
        k=read(layer.k, h, dim_k) / layer.n_key,
        v=read(layer.v, h, dim_v) / layer.n_key,
        windowed=bool(layer.windowed),
        kq_scale=float(layer.kq_scale),
        reach=read(layer.reach, h) / max(layer.n_sample, 1),
        swing=read(layer.swing, h, dim_v, dim_v) / max(layer.n_sample, 1),
        output=read(layer.output, h, dim_v, dim_v) / max(layer.n_sample, 1),
        residual=float(np.exp(layer.log_residual)),
    )
