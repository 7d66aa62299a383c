"""What was measured of a model before: the last fidelity report by KV format, kept in the user's cache folder."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from pykvq.calibration.file import model_hash
from pykvq.catalog import cache_dir
from pykvq.errors import ModelFileError
from pykvq.files import json_text, written_at_once

# where the likeliest token changes as often as this, a format is not called faithful, however it compares with others
LOW_SAME_TOP = 0.97
_KEPT = ("kld_mean", "kld_sem", "same_top", "ppl_change", "nonfinite")


def remember(model_path: str | os.PathLike[str], report: dict[str, Any]) -> None:
    """Keeps the rows of a report that say something, each in the place of an older one of the same tiers; silently not,
    without a folder to write to."""
    path = _path(model_path)
    known = _read(path)
    settings = report["settings"]
    rows = [row for row in report["presets"] if not nothing_aged(row)]
    if not rows:
        return
    for row in rows:
        known[row["tiers"]] = {
            **{name: row[name] for name in _KEPT},
            "n_ctx": settings["n_ctx"],
            "n_compared": settings["n_compared"],
            "float_weights": settings["float_weights"],
        }
    with contextlib.suppress(OSError, ModelFileError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_at_once(path) as temporary:
            temporary.write_text(json_text(known, indent=1), encoding="utf-8")


def recall(model_path: str | os.PathLike[str], tiers: str) -> dict[str, Any] | None:
    """What a report said of a format on this model: kld_mean, kld_sem (nats), same_top, ppl_change, nonfinite (shares),
    n_ctx, n_compared, float_weights; None if it was never measured. A figure that was not finite is None.

    Args:
        tiers: the format as text, as ``kv_info()["tiers_spec"]``.
    """
    if not _folder().is_dir():  # nothing was ever measured: spare each load the hash
        return None
    return _read(_path(model_path)).get(tiers)


def nothing_aged(row: dict[str, Any]) -> bool:
    """Whether a row of a report is of tiers of which only the first held tokens: it says nothing of the others."""
    n_aged: int | None = row["n_aged"]
    return n_aged == 0


def warning(name: str, measured: dict[str, Any]) -> str | None:
    """What a user is to know of a format that was measured, or None."""
    if measured["nonfinite"] > 0:
        share = 100 * measured["nonfinite"]
        return f"{name}: {f'{share:.3g}' if share >= 0.01 else 'less than 0.01'} % of the logits are not finite"
    if measured["same_top"] < LOW_SAME_TOP:
        changed = 100 * (1 - measured["same_top"])
        return f"{name} changes the likeliest token of {changed:.1f} % of the tokens on this model"
    return None


def _path(model_path: str | os.PathLike[str]) -> Path:
    return _folder() / f"{model_hash(model_path)[:32]}.json"


def _folder() -> Path:
    return cache_dir() / "fidelity"


def _read(path: Path) -> dict[str, Any]:
    try:
        known = json.loads(path.read_text(encoding="utf-8"), parse_constant=lambda _name: None)
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}
