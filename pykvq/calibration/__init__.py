"""Calibration: the bases in which a model's keys and values are stored, made from the model itself in one pass."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from pykvq.arguments import require_type
from pykvq.calibration import file
from pykvq.calibration.file import CalibrationInfo, model_hash
from pykvq.calibration.moments import TEXT_TOKENS, LayerMoments, collect_moments
from pykvq.calibration.own_text import write_texts
from pykvq.calibration.transforms import BLOCK, layer_transform
from pykvq.calibration.weights import output_grams, output_norms, read_tensors
from pykvq.errors import AbortedError, CalibrationError, InvalidArgumentError
from pykvq.file_names import part_paths
from pykvq.files import require_other_file
from pykvq.runtime import Model
from pykvq.sample_text import sample_text, spread_starts

__all__ = ["DEFAULT_POSITIONS", "DEFAULT_TOKENS", "CalibrationInfo", "calibrate", "find", "model_hash"]

DEFAULT_TOKENS = 2048
# of the default text: the model writes half of them in texts of _OWN_TOKENS, a sequence each
MAX_OWN_TOKENS = 65536
MAX_POSITIONS = 1 << 30
# a text of fewer different tokens says nothing of how keys and values vary
_MIN_DIFFERENT = 16
# tokens of the longest context that a calibration is for, if nothing else is asked
DEFAULT_POSITIONS = 2048
# enough for a text's tokens in languages and tokenizers that need most
_PIECE_CHARACTERS = 2048
# tokens of a text that the model writes: many short texts tell more than one long one
_OWN_TOKENS = 128
# of the time that a calibration takes, the parts until the text is written, and until the linear algebra
_TEXT_SHARE, _PASS_SHARE = 0.4, 0.8


def find(model_path: str | os.PathLike[str], n_positions: int = 0) -> CalibrationInfo | None:
    """A model's calibration, beside it or in the cache folder, None if there is none.

    Of two, the first that is for ``n_positions`` tokens, else the one for longer contexts.

    Raises:
        CalibrationError: there are only such that are damaged, of another format or of another model.
    """
    hash_ = model_hash(model_path)
    found: CalibrationInfo | None = None
    error: CalibrationError | None = None
    for path in filter(Path.is_file, file.candidates(model_path, hash_)):
        try:
            info = file.read_info(path, hash_)
        except CalibrationError as reason:
            error = error or reason
            continue
        if info.n_positions >= n_positions:
            return info
        if found is None or info.n_positions > found.n_positions:
            found = info
    if found is None and error is not None:
        raise error
    return found


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
        n_tokens: tokens of it, in pieces of 256 from different places; up to 65,536 without a text.
        n_positions: tokens of the longest context it is for; 0 for the model's training context.
        output: where to write; None for beside the model, or the cache folder if that is not writable.
        spectral_keys: give the most important key coordinates more bits; None does so where the head dim allows it.
        n_threads: None for the physical cores.
        progress: called with 0 to 1; returning False stops.
        model: the model, if it is loaded already.

    Raises:
        InvalidArgumentError: the text is too short or repeats a few tokens, ``output`` is the model, or a number is out
        of range. CalibrationError: it cannot be stored, or the model gives no finite moments. ModelFileError,
        AbortedError.
    """
    _check_arguments(text, n_tokens, n_positions)
    report = progress or (lambda _done: True)
    if output is not None:
        require_other_file(Path(output), *part_paths(model_path))
    hash_ = model_hash(model_path)
    target = file.writable(file.candidates(model_path, hash_) if output is None else [Path(output)])
    owned = None if model is not None else Model(model_path)
    try:
        used = model or owned
        assert used is not None
        n_pieces = n_tokens // TEXT_TOKENS
        n_positions = n_positions or used.info.n_ctx_train
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
        if report(_PASS_SHARE + (1 - _PASS_SHARE) * (i + 1) / len(moments)) is False:
            raise AbortedError("stopped by its progress callback")
    from pykvq import __version__

    header: dict[str, str | int | bool] = {
        "model_hash": hash_,
        "model_name": Path(model_path).name,
        "spectral_keys": spectral_keys,
        "n_tokens": len(tokens),
        "n_positions": n_positions,
        "text": "the model's own and Python's help topics" if text is None else "a text of the user",
        "version": __version__,
    }
    file.write(target, layers, header)
    return file.read_info(target, hash_)


def _check_arguments(text: str | None, n_tokens: int, n_positions: int) -> None:
    require_type("text", text, str, optional=True)
    require_type("n_tokens", n_tokens, int)
    require_type("n_positions", n_positions, int)
    if n_tokens < TEXT_TOKENS:
        raise InvalidArgumentError(f"a calibration needs {TEXT_TOKENS} tokens at least, got n_tokens={n_tokens}")
    if text is None and n_tokens > MAX_OWN_TOKENS:
        raise InvalidArgumentError(
            f"n_tokens={n_tokens}: without a text of yours a calibration takes {MAX_OWN_TOKENS} tokens at most"
        )
    if not 0 <= n_positions <= MAX_POSITIONS:
        raise InvalidArgumentError(
            f"n_positions={n_positions}: a calibration is for contexts of 1 to {MAX_POSITIONS} tokens, 0 for the "
            "model's training context"
        )


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
    tokens = [token for start in starts for token in ids[start : start + TEXT_TOKENS]]
    if (n_different := len(set(tokens))) < _MIN_DIFFERENT:
        raise InvalidArgumentError(
            f"the text consists of {n_different} different tokens, again and again: give another text"
        )
    return tokens


def _tokenize(model: Model, text: str) -> list[int]:
    return model.tokenize(text.encode("utf-8", "replace"), add_special=True, parse_special=False)


def _check_finite(moments: list[LayerMoments], model_path: str | os.PathLike[str]) -> None:
    for layer in moments:
        if not all(np.isfinite(part).all() for part in (layer.qq, layer.kk, layer.vv)):
            raise CalibrationError(
                f"layer {layer.layer} of '{os.fspath(model_path)}' computes values that are not finite: the model is "
                "damaged, or needs a larger floating-point type than F16"
            )
