"""``pykvq-fidelity``: what KV formats cost on a model."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from pykvq.cli.console import note, progress_bars, write
from pykvq.cli.plot import new_plot, save_plot
from pykvq.cli.program import run_program
from pykvq.cli.text_file import read_text, require_targets, write_json
from pykvq.errors import InvalidArgumentError
from pykvq.kv_config import parse_kv_configs, split_kv_formats
from pykvq.measured import nothing_aged, warning
from pykvq.sample_text import sample_text

PROGRAM = "pykvq-fidelity"
_DEFAULT_KV = "f16,q8_0,q4_0,ultra4,ultra2"


def _fidelity(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A GGUF file.")],
    kv: Annotated[str, typer.Option("--kv", metavar="A,B,...", help="Presets or tiers to compare.")] = _DEFAULT_KV,
    text: Annotated[
        str | None, typer.Option("--text", metavar="FILE", help="Text to predict. [default: Python's help topics]")
    ] = None,
    ctx: Annotated[int, typer.Option("--ctx", metavar="N", help="Tokens of a chunk.")] = 2048,
    chunks: Annotated[int, typer.Option("--chunks", metavar="N", help="Chunks, spread over the text.")] = 4,
    float_weights: Annotated[
        bool,
        typer.Option(
            "--float-weights",
            help="Decode the weights to F32 first: what the cache costs, without the noise of 8-bit activations.",
        ),
    ] = False,
    needle: Annotated[
        str | None,
        typer.Option(
            "--needle", metavar="N,M,...", help="Look for a hidden number in prompts of N, M, ... tokens too."
        ),
    ] = None,
    calibration: Annotated[
        str | None, typer.Option("--calibration", metavar="FILE|never", help="[default: the model's own]")
    ] = None,
    json_path: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the figures here.")] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE.png", help="Draw KLD against bits (needs matplotlib).")
    ] = None,
    threads: Annotated[
        int | None, typer.Option("--threads", metavar="N", help="Threads. [default: the physical cores]")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show where an error comes from.")] = False,
) -> int:
    """Compare KV formats with an F16 cache on the same text: KLD, same top token, perplexity, bits and bytes."""
    del verbose  # read by run_program
    formats = split_kv_formats(kv)
    parse_kv_configs(formats)
    lengths = _parse_lengths(needle)
    require_targets((json_path, plot), model, text, calibration)
    content = sample_text() if text is None else read_text(text)
    from pykvq.quality import fidelity
    from pykvq.quality import needle as find_needle
    from pykvq.quality.needle import require_length
    from pykvq.quality.report import format_needles, format_table

    figure = new_plot(plot) if plot is not None else None
    require_length(model, content, lengths)
    with progress_bars("calibrating", "comparing", "searching") as (show_calibration, show, show_search):
        report = fidelity(
            model,
            formats,
            text=content,
            n_ctx=ctx,
            n_chunks=chunks,
            float_weights=float_weights,
            calibrate=calibration,
            n_threads=threads,
            progress=show,
            calibration_progress=show_calibration,
        )
        if lengths:
            report["needle"] = find_needle(
                model,
                formats,
                text=content,
                lengths=lengths,
                calibrate=calibration,
                n_threads=threads,
                progress=show_search,
            )
    write(format_table(report) + "\n")
    if lengths:
        write("\n" + format_needles(report["needle"]) + "\n")
    for row in report["presets"]:
        if nothing_aged(row):
            note(f"note: {row['name']}: no token left the first tier at --ctx {ctx}: give a larger one")
        if line := warning(row["name"], row):
            note(f"note: {line}")
    if json_path is not None:
        write_json(json_path, report)
    if figure is not None and plot is not None:
        _draw(report, figure[1])
        save_plot(figure[0], plot)
    return 0


def _parse_lengths(value: str | None) -> list[int]:
    try:
        lengths = [int(part) for part in value.split(",")] if value else []
    except ValueError:
        lengths = [0]
    if any(length < 128 for length in lengths):
        raise InvalidArgumentError(f"--needle {value}: give prompt lengths of 128 tokens or more, as in 1024,4096")
    return lengths


def _draw(report: dict[str, Any], axes: Any) -> None:
    """Mean KLD against bits per element, one point a format."""
    for row in report["presets"]:
        if 0 < row["kld_mean"] < math.inf:
            point = (row["bits_per_element"], row["kld_mean"])
            axes.plot(*point, "o", color="tab:blue" if row["calibrated"] else "tab:gray")
            axes.annotate(row["name"], point, xytext=(6, 4), textcoords="offset points")
    bits = f"bits an element of K and V, all-in, {report['settings']['n_ctx']} tokens"
    axes.set(xlabel=bits, ylabel="mean KLD against F16, nats", title=report["model"])
    axes.set_yscale("log")
    axes.grid(visible=True, which="both", alpha=0.3)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    return run_program(PROGRAM, _fidelity, argv)


if __name__ == "__main__":
    sys.exit(main())
