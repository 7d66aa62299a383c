"""Which calibration a model is loaded with."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from pykvq.calibration import CalibrationInfo, calibrate, find, model_hash
from pykvq.calibration.file import read_info
from pykvq.calibration.moments import TEXT_TOKENS
from pykvq.errors import CalibrationError, InvalidArgumentError
from pykvq.handles import ProgressCallback
from pykvq.kv_config import KVConfig, calibration_choice
from pykvq.runtime import Model

# contexts up to this long share a calibration
_MIN_POSITIONS = 2048

logger = logging.getLogger("pykvq")


def calibration_for(
    model: Model,
    model_path: str | os.PathLike[str],
    kv: KVConfig,
    choice: str | os.PathLike[str] | None,
    n_ctx: int,
    n_threads: int | None = None,
    progress: ProgressCallback | None = None,
) -> CalibrationInfo | None:
    """The calibration to use, made if need be; None where the format has no use for one.

    Args:
        choice: "auto", "never", a path, or None for what the environment says.

    Raises:
        CalibrationError: it is missing, damaged, of another model or format, or cannot be stored.
        InvalidArgumentError: the format holds sorted keys and there is no calibration to sort them.
    """
    choice = calibration_choice(choice)
    if not kv.uses_calibration:
        return None
    if choice == "never":
        info = None
    elif choice == "auto":
        info = _automatic(model, model_path, n_ctx, n_threads, progress)
    else:
        info = read_info(Path(choice), model_hash(model_path))
    if info is not None and info.n_positions < n_ctx:
        logger.warning(
            "the calibration %s is for contexts of %d tokens, this one has %d: keys beyond lose more",
            info.path,
            info.n_positions,
            n_ctx,
        )
    if kv.needs_calibration and not (info is not None and info.spectral_keys):
        raise InvalidArgumentError(
            f"the KV format {kv} holds keys that a calibration sorts, and there is none that does: use q4_ve and q2_t"
        )
    return info


def positions_for(n_ctx: int) -> int:
    """The positions that a calibration for n_ctx tokens covers: keys of longer contexts are turned further."""
    return max(_MIN_POSITIONS, 1 << (n_ctx - 1).bit_length())


def _automatic(
    model: Model,
    model_path: str | os.PathLike[str],
    n_ctx: int,
    n_threads: int | None,
    progress: ProgressCallback | None,
) -> CalibrationInfo | None:
    info = find(model_path, n_ctx)
    if info is not None and info.n_positions >= n_ctx:
        return info
    if model.info.is_recurrent or model.info.has_encoder or model.info.n_ctx_train < TEXT_TOKENS:
        return None
    try:
        return calibrate(
            model_path, n_positions=positions_for(n_ctx), n_threads=n_threads, progress=progress, model=model
        )
    except CalibrationError as error:
        if info is not None:
            return info
        logger.warning("no calibration, a plain rotation is used instead: %s", error)
        return None
