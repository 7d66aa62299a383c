"""``pykvq-calibrate``: make the calibration of a model."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from pykvq.cli.console import progress_bars, write
from pykvq.cli.program import run_program
from pykvq.cli.text_file import read_text
from pykvq.files import require_other_file

PROGRAM = "pykvq-calibrate"


def _calibrate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A GGUF file.")],
    text: Annotated[
        str | None,
        typer.Option("--text", metavar="FILE", help="Text to compute. [default: its own and Python's help topics]"),
    ] = None,
    tokens: Annotated[
        int, typer.Option("--tokens", metavar="N", help="Tokens of it: 256 to 65536, more of a text.")
    ] = 2048,
    ctx: Annotated[
        int, typer.Option("--ctx", metavar="N", help="Tokens of the longest context that it is for; 0 for the model's.")
    ] = 2048,
    output: Annotated[
        str | None,
        typer.Option("--output", metavar="FILE", help="Where to write. [default: MODEL.kvq.gguf, or the cache folder]"),
    ] = None,
    uniform: Annotated[
        bool, typer.Option("--uniform", help="The same number of bits for all key coordinates.")
    ] = False,
    threads: Annotated[
        int | None, typer.Option("--threads", metavar="N", help="Threads. [default: the physical cores]")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show where an error comes from.")] = False,
) -> int:
    """Find the bases in which a model's keys and values lose least, and keep them for every later load.

    It writes some short texts, or takes yours, and computes them once; seconds on a small model.
    """
    del verbose  # read by run_program
    from pykvq.calibration import calibrate

    if output is not None and text is not None:
        require_other_file(Path(output), Path(text))
    with progress_bars("calibrating") as (show,):
        info = calibrate(
            model,
            text=None if text is None else read_text(text),
            n_tokens=tokens,
            n_positions=ctx,
            output=output,
            spectral_keys=False if uniform else None,
            n_threads=threads,
            progress=show,
        )
    write(f"{info.path}\n")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    return run_program(PROGRAM, _calibrate, argv)


if __name__ == "__main__":
    sys.exit(main())
