"""Calibration: the bases in which a model's keys and values are stored, made from the model itself in one pass."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from pykvq.calibration import file
from pykvq.calibration.file import CalibrationInfo, model_hash
from pykvq.calibration.moments import TEXT_TOKENS, LayerMoments, collect_moments
from pykvq.calibration.own_text import write_texts
from pykvq.calibration.transforms import BLOCK, layer_transform
from pykvq.calibration.weights import output_grams, output_norms, read_tensors
from pykvq.errors import CalibrationError, InvalidArgumentError
from pykvq.file_names import part_paths
from pykvq.files import require_other_file
from pykvq.runtime import Model
from pykvq.sample_text import sample_text, spread_starts

__all__ = ["DEFAULT_POSITIONS", "DEFAULT_TOKENS", "CalibrationInfo", "calibrate", "find", "model_hash"]

DEFAULT_TOKENS = 2048
# tokens of the longest context that a calibration is for, if nothing else is asked
DEFAULT_POSITIONS = 2048
# enough for a text's tokens in languages and tokenizers that need most
_PIECE_CHARACTERS = 2048
# tokens of a text that the model writes: many short texts tell more than one long one
_OWN_TOKENS = 128
# of the time that a calibration takes, the parts until the text is written, and until the linear algebra
_TEXT_SHARE, _PASS_SHARE = 0.4, 0.8


def find(model_path: str | os.PathLike[str]) -> CalibrationInfo | None:
    """A model's calibration, beside it or in the cache folder, None if there is none.

    Raises:
        CalibrationError: there is one, and it is damaged, of another format or of another model.
    """
    hash_ = model_hash(model_path)
    path = next((path for path in file.candidates(model_path, hash_) if path.exists()), None)
    return None if path is None else file.read_info(path, hash_)


def calibrate(
    model_path: str | os.PathLike[str],
    *,
    text: str | None = None,
    n_tokens: int = DEFAULT_TOKENS,
    n_positions: int = DEFAULT_POSITIONS,
    output: str | os.PathLike[str] | None = None,
    spectral_keys: bool | None = None,
    n_threads: int | None = None,
    progress: Callable[[float], bool | None] | None = None,
    model: Model | None = None,
) -> CalibrationInfo:
    """Makes and stores the calibration of a model.

    Args:
        model_path: the GGUF file.
        text: what to compute; None for half what the model writes itself, half help texts that Python carries.
        n_tokens: tokens of it, in pieces of 256 from different places.
        n_positions: tokens of the longest context it is for.
        output: where to write; None for beside the model, or the cache folder if that is not writable.
        spectral_keys: give the most important key coordinates more bits; None does so where the head dim allows it.
        n_threads: None for the physical cores.
        progress: called with 0 to 1; returning False stops.
        model: the model, if it is loaded already.

    Raises:
        InvalidArgumentError: the text is too short, or ``output`` is the model. CalibrationError: it cannot be stored,
        or the model gives no finite moments. ModelFileError, AbortedError.
    """
    report = progress or (lambda _done: True)
    if output is not None:
        require_other_file(Path(output), *part_paths(model_path))
    owned = None if model is not None else Model(model_path)
    try:
        used = model or owned
        assert used is not None
        n_pieces = n_tokens // TEXT_TOKENS
        if n_pieces == 0:
            raise InvalidArgumentError(f"a calibration needs {TEXT_TOKENS} tokens at least, got n_tokens={n_tokens}")
        start = _TEXT_SHARE if text is None else 0.0
        if text is None:
            tokens = _default_tokens(used, n_pieces, n_threads, lambda done: report(done * start))
        else:
            tokens = _pieces(used, text, n_pieces)
        moments = collect_moments(
            used,
            tokens,
            n_positions=n_positions,
            n_threads=n_threads,
            progress=lambda done: report(start + done * (_PASS_SHARE - start)),
        )
    finally:
        if owned is not None:
            owned.close()
    if spectral_keys is None:
        spectral_keys = all(layer.k.shape[-1] % BLOCK == 0 for layer in moments)
    _check_finite(moments, model_path)
    tensors = read_tensors(model_path)
    grams, norms = output_grams(tensors, moments), output_norms(tensors)
    layers = []
    for i, layer in enumerate(moments):
        layers.append(layer_transform(layer, grams.get(layer.layer), norms.get(layer.layer), spectral=spectral_keys))
        report(_PASS_SHARE + (1 - _PASS_SHARE) * (i + 1) / len(moments))
    from pykvq import __version__

    hash_ = model_hash(model_path)
    header: dict[str, str | int | bool] = {
        "model_hash": hash_,
        "model_name": Path(model_path).name,
        "spectral_keys": spectral_keys,
        "n_tokens": len(tokens),
        "n_positions": n_positions,
        "text": "the model's own and Python's help topics" if text is None else "a text of the user",
        "version": __version__,
    }
    paths = file.candidates(model_path, hash_) if output is None else [Path(output)]
    return file.read_info(file.write(paths, layers, header), hash_)


def _default_tokens(
    model: Model, n_pieces: int, n_threads: int | None, progress: Callable[[float], bool | None]
) -> list[int]:
    """Texts of the model and pieces of the sample text in turn, so that both lie at all positions."""
    n_own = (n_pieces + 1) // 2
    texts = write_texts(model, n_own * TEXT_TOKENS // _OWN_TOKENS, _OWN_TOKENS, n_threads=n_threads, progress=progress)
    written = [token for text in texts for token in text]
    pieces = [written[i : i + TEXT_TOKENS] for i in range(0, len(written), TEXT_TOKENS)]
    sample = sample_text()  # tokenizing the whole of it takes some tokenizers a minute
    for i, start in enumerate(spread_starts(len(sample), _PIECE_CHARACTERS, n_pieces - n_own)):
        pieces.insert(2 * i + 1, _tokenize(model, sample[start : start + _PIECE_CHARACTERS])[:TEXT_TOKENS])
    return [token for piece in pieces for token in piece]


def _pieces(model: Model, text: str, n_pieces: int) -> list[int]:
    """Pieces of TEXT_TOKENS tokens each, spread over the text."""
    ids = _tokenize(model, text)
    if len(ids) < TEXT_TOKENS:
        raise InvalidArgumentError(f"the text has {len(ids)} tokens: a calibration needs {TEXT_TOKENS} at least")
    starts = spread_starts(len(ids), TEXT_TOKENS, min(n_pieces, len(ids) // TEXT_TOKENS))
    return [token for start in starts for token in ids[start : start + TEXT_TOKENS]]


def _tokenize(model: Model, text: str) -> list[int]:
    return model.tokenize(text.encode("utf-8", "replace"), add_special=True, parse_special=False)


def _check_finite(moments: list[LayerMoments], model_path: str | os.PathLike[str]) -> None:
    for layer in moments:
        if not all(np.isfinite(part).all() for part in (layer.qq, layer.kk, layer.vv)):
            raise CalibrationError(
                f"layer {layer.layer} of '{os.fspath(model_path)}' computes values that are not finite: the model is "
                "damaged, or needs a larger floating-point type than F16"
            )
