"""``pykvq-bench``: tokens a second with each KV cache format, as ratios to llama.cpp's own F16 attention."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from pykvq.cli.console import note, progress_bar, write
from pykvq.cli.plot import new_plot, save_plot
from pykvq.cli.program import run_program
from pykvq.cli.text_file import require_targets, write_json
from pykvq.errors import InvalidArgumentError
from pykvq.kv_config import split_kv_formats
from pykvq.models import resolve
from pykvq.units import size_text

PROGRAM = "pykvq-bench"


def _command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A GGUF file, or a name.")],
    kv: Annotated[str, typer.Option("--kv", metavar="A,B,...", help="KV formats.")] = "f16,q8_0,ultra4,ultra2",
    depth: Annotated[str, typer.Option("--depth", metavar="N,...", help="Tokens in the cache.")] = "0,4096",
    prefill: Annotated[int, typer.Option("--prefill", metavar="N", help="Tokens to prefill.")] = 512,
    gen: Annotated[int, typer.Option("--gen", metavar="N", help="Tokens to generate.")] = 64,
    repeat: Annotated[int, typer.Option("--repeat", metavar="N", help="Rounds; medians are told.")] = 5,
    threads: Annotated[int | None, typer.Option("--threads", metavar="N", help="[default: all cores]")] = None,
    n_gpu_layers: Annotated[int, typer.Option("--n-gpu-layers", metavar="N", help="Layers on the GPU; -1: all.")] = 0,
    calibration: Annotated[
        str | None, typer.Option("--calibration", metavar="FILE|never", help="[default: the model's own]")
    ] = None,
    as_json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all results here.")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Draw decode speed by depth.")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show where an error came from.")] = False,
) -> int:
    """Measure prefill and decode speed by KV format and depth. Close what else uses the machine."""
    del verbose  # see run_program
    from pykvq.bench import BenchSettings, bench

    settings = BenchSettings(
        kv=tuple(split_kv_formats(kv)),
        depths=_numbers(depth, "--depth"),
        n_prefill=prefill,
        n_gen=gen,
        n_repeat=repeat,
        n_threads=threads,
        calibrate=calibration,
        n_gpu_layers=n_gpu_layers,
    )
    path = resolve(model)
    require_targets((as_json, plot), str(path), calibration)
    figure = new_plot(plot) if plot is not None else None
    with progress_bar("measuring") as report:
        result = bench(path, settings, progress=lambda share, _step: report(share, 1.0))
    write("".join(f"{line}\n" for line in table(result)))
    if as_json is not None:
        write_json(as_json, result)
    if figure is not None and plot is not None:
        _draw(result, figure[1])
        save_plot(figure[0], plot)
        note(f"drew {plot}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    return run_program(PROGRAM, _command, argv)


def _numbers(text: str, option: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise InvalidArgumentError(f"{option} {text!r} is not a list of numbers such as 0,4096") from error


def table(result: dict[str, Any]) -> list[str]:
    """The lines of the table on stdout."""
    settings = result["settings"]
    lines = [
        f"{result['model']['name']}: prefill of {settings['n_prefill']}, {settings['n_gen']} tokens generated, medians "
        f"of {settings['n_repeat']}; memory read bandwidth {result['read_gbps']:.1f} GB/s",
        "calibrated: " + (", ".join(dict.fromkeys(row["kv"] for row in result["rows"] if row["calibrated"])) or "none"),
        f"{'depth':>7}  {'KV format':<20} {'KV memory':>10} {'prefill t/s':>12} {'ratio':>6} {'decode t/s':>11} "
        f"{'ratio':>6} {'GB/s':>6}",
    ]
    for row in result["rows"]:
        rate = "" if row["attention_gbps"] is None else f"{row['attention_gbps']:.1f}"
        lines.append(
            f"{row['depth']:>7}  {row['kv']:<20} {size_text(row['kv_bytes']):>10} {row['prefill_tps']:>12.1f} "
            f"{row['prefill_ratio']:>6.2f} {row['decode_tps']:>11.2f} {row['decode_ratio']:>6.2f} {rate:>6}"
        )
    return lines


def _draw(result: dict[str, Any], axes: Any) -> None:
    for name in dict.fromkeys(row["kv"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["kv"] == name]
        axes.plot([row["depth"] for row in rows], [row["decode_tps"] for row in rows], marker="o", label=name)
    axes.set(xlabel="depth (tokens in the cache)", ylabel="decode (tokens a second)", title=result["model"]["name"])
    axes.set_yscale("log")
    axes.grid(alpha=0.3)
    axes.legend()


if __name__ == "__main__":
    sys.exit(main())
