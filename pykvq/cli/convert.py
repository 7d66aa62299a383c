"""``pykvq-convert``: a Hugging Face model as a GGUF file, quantized if asked."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from pykvq.calibration import calibrate
from pykvq.cli.console import note, progress_bar
from pykvq.cli.program import require, run_program
from pykvq.convert import convert
from pykvq.kv_config import KVConfig, parse_kv_configs, split_kv_formats
from pykvq.llama import Llama
from pykvq.predict import predict_kv
from pykvq.sample_text import sample_text
from pykvq.units import size_text

PROGRAM = "pykvq-convert"
# enough to reach every tier of the presets
_TRIED_CTX, _TRIED_TOKENS = 1024, 300


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
    with_calibration: Annotated[
        bool, typer.Option("--calibrate", help="Make the calibration too, beside OUT.gguf.")
    ] = False,
    kv: Annotated[
        str | None,
        typer.Option("--kv", metavar="A,B,...", help="Run the result with these KV formats, and tell what they take."),
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
    formats = parse_kv_configs(split_kv_formats(kv or ""))
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
    if with_calibration:
        with progress_bar("calibrating") as show:
            info = calibrate(out, n_threads=threads, progress=lambda done: show(done, 1))
        note(f"wrote {info.path}, {size_text(info.path.stat().st_size)}")
    for config in formats:
        _try(out, config, with_calibration, threads)
    return 0


def _try(path: Path, config: KVConfig, calibrated: bool, threads: int | None) -> None:
    """Computes a text with a KV format, which raises if it cannot, and tells what its cache takes."""
    use = "auto" if calibrated else "never"
    with Llama(path, kv_quant=config, n_ctx=_TRIED_CTX, n_threads=threads, calibrate=use) as llm:
        tokens = llm.tokenize(sample_text()[: 8 * _TRIED_TOKENS].encode())[:_TRIED_TOKENS]
        llm.create_completion(tokens, max_tokens=8, temperature=0)
    need = predict_kv(path, 0, config, calibrated=calibrated)
    note(
        f"{config.name}: runs; {need['n_ctx']} tokens of context take {size_text(need['kv_bytes'])}, "
        f"{need['ratio']:.2f}x of F16"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    return run_program(PROGRAM, _command, argv)


if __name__ == "__main__":
    sys.exit(main())
