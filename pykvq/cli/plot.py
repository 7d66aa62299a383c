"""Plots of the command-line programs, drawn by matplotlib without a display."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pykvq.errors import InvalidArgumentError


def new_plot(target: Path) -> tuple[Any, Any]:
    """A matplotlib figure and its axes, to be made before the work whose result is drawn.

    Raises:
        InvalidArgumentError: matplotlib is not installed, or ``target`` could not be written.
    """
    if not target.absolute().parent.is_dir():
        raise InvalidArgumentError(f"cannot draw {target}: its folder does not exist")
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise InvalidArgumentError("--plot needs matplotlib: pip install 'pykvq[tools]'") from error
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    return figure, axes


def save_plot(figure: Any, target: Path) -> None:
    """Writes a figure in the format of the file's suffix.

    Raises:
        InvalidArgumentError: no such format, or the file cannot be written.
    """
    try:
        figure.savefig(target, dpi=150)
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(f"cannot draw {target}: {error}") from error
