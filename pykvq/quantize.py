"""Quantizing model files, and the importance matrices that make it better.

The quantization is llama.cpp's own. An importance matrix holds, for each weight matrix, the mean square of each of its
inputs over a text; columns with large inputs are then rounded with more care.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pykvq import native
from pykvq.errors import InvalidArgumentError, ModelFileError, OutOfMemoryError
from pykvq.file_names import part_paths
from pykvq.files import require_other_file, require_space, written_at_once
from pykvq.handles import ProgressCallback, ProgressGuard, fill_struct, int32_pointer
from pykvq.model_file import read_model_file
from pykvq.predict import available_memory
from pykvq.runtime import Model

# metadata, and matrices that stay larger than the type says
_SPARE_BYTES = 1 << 25
_SPARE_BITS = 1.0
_CHUNK_TOKENS = 512
_FLOAT_TYPES = ("f32", "f16", "bf16")


@dataclass(frozen=True)
class QuantizeType:
    """A type that a model file can have; ``bits`` of a weight of most matrices, scales included."""

    name: str
    bits: float
    needs_imatrix: bool


@functools.cache
def quantize_types() -> dict[str, QuantizeType]:
    """All types by name, from large to small."""
    ffi, lib = native.load()
    names = [lib.pykvq_quantize_type_name(i) for i in range(lib.pykvq_quantize_type_count())]
    types = [
        QuantizeType(
            ffi.string(name).decode("ascii"),
            lib.pykvq_quantize_type_bits(name),
            lib.pykvq_quantize_type_needs_imatrix(name),
        )
        for name in names
    ]
    return {kind.name: kind for kind in types}


def checked_type(name: str, has_imatrix: bool) -> QuantizeType:
    """The type with this name.

    Raises:
        InvalidArgumentError: there is none, or it needs an importance matrix.
    """
    kind = quantize_types().get(name.lower())
    if kind is None:
        raise InvalidArgumentError(f"unknown model type {name!r}: use one of {', '.join(quantize_types())}")
    if kind.needs_imatrix and not has_imatrix:
        raise InvalidArgumentError(
            f"{kind.name} is only usable with an importance matrix: make one with "
            "`pykvq-quantize MODEL OUT --make-imatrix TEXT` and give it with --imatrix"
        )
    return kind


def quantize(
    path: str | os.PathLike[str],
    out_path: str | os.PathLike[str],
    type_name: str = "q4_k_m",
    *,
    imatrix: str | os.PathLike[str] | None = None,
    allow_requantize: bool = False,
    pure: bool = False,
    n_threads: int | None = None,
    force: bool = False,
    progress: ProgressCallback | None = None,
) -> None:
    """Writes a quantized copy of a model; ``out_path`` is replaced at the end, in one step.

    Args:
        path: the GGUF file; of a split model, its first file. The copy is one file.
        out_path: where to write.
        type_name: one of ``quantize_types()``.
        imatrix: an importance matrix, see ``make_imatrix``.
        allow_requantize: take weights that are quantized already, at a loss.
        pure: every matrix in the same type.
        n_threads: None for the physical cores.
        force: begin even if memory or disk seem too small.
        progress: called with 0 to 1; returning False stops.

    Raises:
        ModelFileError: a file is missing, damaged or cannot be written.
        InvalidArgumentError: an unknown type, or the model is quantized already. OutOfMemoryError, AbortedError.
    """
    kind = checked_type(type_name, imatrix is not None)
    source, target = Path(path), Path(out_path)
    require_other_file(target, *part_paths(source), *([] if imatrix is None else [Path(imatrix)]))
    model = read_model_file(source)
    quantized = [name for name in model.weight_types if name not in _FLOAT_TYPES]
    if quantized and not allow_requantize:
        raise InvalidArgumentError(
            f"'{source}' is quantized already ({', '.join(quantized)}): start from a 16-bit model, or lose quality "
            f"with `pykvq-quantize IN OUT {kind.name} --allow-requantize` (quantize(..., allow_requantize=True))"
        )
    if not force:
        require_space(target.parent, int(model.n_params * (kind.bits + _SPARE_BITS) / 8) + _SPARE_BYTES)
        _require_memory(source, model.largest_tensor, kind)
    ffi, lib = native.load()
    params = ffi.new("pykvq_quantize_params *", lib.pykvq_quantize_default_params())
    keep_alive = fill_struct(
        params,
        {
            "type": kind.name,
            "imatrix": None if imatrix is None else os.fspath(imatrix),
            "n_threads": n_threads,
            "allow_requantize": allow_requantize,
            "pure": pure,
        },
    )
    guard = ProgressGuard(progress)
    params.progress, params.progress_data = guard.arguments()
    with written_at_once(target) as temporary:
        status = lib.pykvq_quantize(os.fsencode(model.paths[0]), os.fsencode(temporary), params)
        guard.check(status, format_error=ModelFileError)
    del keep_alive


def make_imatrix(
    model_path: str | os.PathLike[str],
    text: str,
    out_path: str | os.PathLike[str],
    *,
    n_chunk: int = _CHUNK_TOKENS,
    n_threads: int | None = None,
    progress: ProgressCallback | None = None,
) -> int:
    """Writes the importance matrix of a model over a text, in the GGUF form of llama.cpp's tools.

    Args:
        model_path: the model, best with 16-bit weights.
        text: some hundred thousand characters of what the model is to be good at.
        out_path: where to write; replaced at the end, in one step.
        n_chunk: tokens that are computed with one another.
        n_threads: None for the physical cores.
        progress: called with 0 to 1; returning False stops.

    Returns:
        The number of tokens used.

    Raises:
        InvalidArgumentError: the text has fewer tokens than a chunk.
        ModelFileError: a file is missing, damaged or cannot be written. OutOfMemoryError, AbortedError.
    """
    _, lib = native.load()
    require_other_file(Path(out_path), *part_paths(model_path))
    with Model(model_path) as model, model.use() as pointer, written_at_once(Path(out_path)) as temporary:
        tokens = model.tokenize(text.encode("utf-8", "replace"), add_special=True, parse_special=False)
        if len(tokens) < n_chunk:
            raise InvalidArgumentError(
                f"the text has {len(tokens)} tokens, fewer than the {n_chunk} of a chunk: give a longer one"
            )
        ids = np.array(tokens, dtype=np.int32)
        guard = ProgressGuard(progress)
        out = os.fsencode(temporary)
        status = lib.pykvq_imatrix_write(
            pointer, int32_pointer(ids), len(ids), n_chunk, n_threads or 0, out, *guard.arguments()
        )
        guard.check(status, format_error=ModelFileError)
        return len(tokens) // n_chunk * n_chunk


def _require_memory(source: Path, largest_tensor: int, kind: QuantizeType) -> None:
    """A tensor is held in float32 and in the new type at once; the source is mapped."""
    needed = int(largest_tensor * (4 + kind.bits / 8))
    free = available_memory()
    if needed > free > 0:
        raise OutOfMemoryError(
            f"quantizing '{source}' needs {needed / 2**20:.0f} MiB for its largest tensor and {free / 2**20:.0f} MiB "
            "are free: free some, or use force=True (--force)"
        )
