"""``pykvq-quantize``: a smaller copy of a model file, and importance matrices."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from pykvq.cli.console import note, progress_bar
from pykvq.cli.program import require, run_program
from pykvq.errors import InvalidArgumentError, ModelFileError
from pykvq.models import resolve
from pykvq.quantize import make_imatrix, quantize
from pykvq.units import size_text

PROGRAM = "pykvq-quantize"


def _command(
    model: Annotated[str, typer.Argument(metavar="IN", help="A GGUF file or the name of a model.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The file to write.")],
    type_name: Annotated[
        str | None, typer.Argument(metavar="[TYPE]", help="f16, q8_0, q4_k_m, ...; a wrong one lists all.")
    ] = None,
    imatrix: Annotated[
        Path | None, typer.Option("--imatrix", metavar="FILE", help="Round with this importance matrix (GGUF).")
    ] = None,
    imatrix_text: Annotated[
        Path | None,
        typer.Option(
            "--make-imatrix",
            metavar="TEXT",
            help="Write to OUT the importance matrix of IN over this text file, instead of a model.",
        ),
    ] = None,
    allow_requantize: Annotated[
        bool, typer.Option("--allow-requantize", help="Take weights that are quantized already, at a loss.")
    ] = False,
    pure: Annotated[bool, typer.Option("--pure", help="Every matrix in the same type.")] = False,
    threads: Annotated[
        int | None, typer.Option("--threads", metavar="N", help="Threads. [default: the physical cores]")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Begin even if memory or disk seem too small.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show where an error came from.")] = False,
) -> int:
    """Write a quantized copy of a model, or with --make-imatrix the importance matrix of one.

    OUT appears when all is done; an interrupted run leaves nothing behind.
    """
    del verbose  # see run_program
    require(threads is None or 1 <= threads <= 512, "--threads", threads, "1 to 512")
    if (type_name is None) == (imatrix_text is None):
        raise InvalidArgumentError("give a TYPE, or --make-imatrix TEXT, and not both")
    path = resolve(model, fetch=False)
    with progress_bar(out.name) as show:
        if imatrix_text is not None:
            n_tokens = make_imatrix(
                path, _read_text(imatrix_text), out, n_threads=threads, progress=lambda done: show(done, 1)
            )
            note(f"wrote {out}, over {n_tokens} tokens")
            return 0
        quantize(
            path,
            out,
            type_name or "",
            imatrix=imatrix,
            allow_requantize=allow_requantize,
            pure=pure,
            n_threads=threads,
            force=force,
            progress=lambda done: show(done, 1),
        )
    note(f"wrote {out}, {size_text(out.stat().st_size)}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    return run_program(PROGRAM, _command, argv)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ModelFileError(f"cannot read '{path}' ({error.strerror}): give a text file") from error


if __name__ == "__main__":
    sys.exit(main())
