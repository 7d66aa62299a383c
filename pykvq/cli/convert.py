"""``pykvq-convert``: a Hugging Face model as a GGUF file, quantized if asked."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from pykvq.cli.console import note, progress_bar
from pykvq.cli.program import require, run_program
from pykvq.convert import convert
from pykvq.units import size_text

PROGRAM = "pykvq-convert"


def _command(
    source: Annotated[
        str,
        typer.Argument(metavar="SRC", help="A folder with a Hugging Face model, ORG/REPO of the hub, or a GGUF file."),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT.gguf", help="The file to write.")],
    type_name: Annotated[
        str, typer.Option("--type", metavar="TYPE", help="f16, q8_0, q4_k_m, ...; a wrong one lists all.")
    ] = "q4_k_m",
    imatrix: Annotated[
        Path | None, typer.Option("--imatrix", metavar="FILE", help="Quantize with this importance matrix (GGUF).")
    ] = None,
    threads: Annotated[
        int | None, typer.Option("--threads", metavar="N", help="Threads. [default: the physical cores]")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Begin even if memory or disk seem too small.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show where an error came from.")] = False,
) -> int:
    """Convert a model with llama.cpp's own converter, which needs `pip install 'pykvq[tools]'`.

    OUT.gguf appears when all is done; an interrupted run leaves nothing behind.
    """
    del verbose  # see run_program
    require(threads is None or 1 <= threads <= 512, "--threads", threads, "1 to 512")
    with progress_bar(out.name) as show:
        convert(
            source,
            out,
            type_name,
            imatrix=imatrix,
            n_threads=threads,
            force=force,
            progress=lambda _what, done: show(done, 1),
        )
    note(f"wrote {out}, {size_text(out.stat().st_size)}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    return run_program(PROGRAM, _command, argv)


if __name__ == "__main__":
    sys.exit(main())
