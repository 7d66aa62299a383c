"""``pykvq-inspect``: what a model file holds, and what its KV cache would take."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from pykvq.cli.console import note, write
from pykvq.cli.plot import new_plot, save_plot
from pykvq.cli.program import EXIT_FAILURE, run_program
from pykvq.errors import PykvqError
from pykvq.kv_config import kv_presets
from pykvq.model_file import KVFormatNeed, ModelFile, kv_curves, kv_formats, read_model_file
from pykvq.models import resolve
from pykvq.predict import available_memory
from pykvq.units import parse_size, size_text

PROGRAM = "pykvq-inspect"
_PLOT_POINTS = 33


def _command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A GGUF file, any part of a split one, or a name.")],
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory", metavar="SIZE", help="Budget for the largest contexts, as 8G. [default: what is free now]"
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw KV memory against context (.png, .svg, .pdf).")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show where an error came from.")] = False,
) -> int:
    """Tell what a GGUF model is. Only the headers of the file are read."""
    del verbose  # see run_program
    path = resolve(model, fetch=False)
    budget = available_memory() if memory is None else parse_size(memory, "--memory")
    facts = read_model_file(path)
    problem: PykvqError | None = None
    formats: dict[str, KVFormatNeed] = {}
    try:
        formats = kv_formats(path, facts.context_length or 4096, budget or None)
    except PykvqError as error:  # the facts are still worth telling
        problem = error
    if as_json:
        write(json.dumps(_json_object(facts, formats, budget, problem), ensure_ascii=False, indent=2) + "\n")
    else:
        write("".join(f"{line}\n" for line in [*_fact_lines(facts), *_format_lines(facts, formats, budget)]))
    if problem is not None:
        note(f"{PROGRAM}: error: this model cannot be run: {problem}")
        return EXIT_FAILURE
    if plot is not None:
        _draw(facts, path, plot)
        note(f"drew {plot}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    return run_program(PROGRAM, _command, argv)


def _json_object(
    facts: ModelFile, formats: dict[str, KVFormatNeed], budget: int, problem: PykvqError | None
) -> dict[str, Any]:
    return {
        **asdict(facts),
        "paths": [str(path) for path in facts.paths],
        "calibration": None if facts.calibration is None else str(facts.calibration),
        "bits_per_weight": facts.bits_per_weight,
        "memory_budget": budget,
        "kv_formats": {name: asdict(need) for name, need in formats.items()},
        "error": None if problem is None else str(problem),
    }


def _fact_lines(facts: ModelFile) -> list[str]:
    first = facts.paths[0]
    parts = f" in {len(facts.paths)} files" if len(facts.paths) > 1 else ""
    rows = {
        "file": f"{first}, {size_text(facts.file_bytes)}{parts}, GGUF version {facts.version}",
        "model": f"{facts.name or '(no name)'}, architecture {facts.architecture}",
        "parameters": f"{facts.n_params / 1e6:,.1f} million, {facts.bits_per_weight:.2f} bits each",
        "context": "not told" if facts.context_length is None else f"{facts.context_length} tokens in training",
        "layers": _pairs(facts.shape, ("block_count", "embedding_length", "feed_forward_length", "expert_count")),
        "heads": _pairs(facts.shape, ("head_count", "head_count_kv", "key_length", "value_length", "sliding_window")),
        "rope": _pairs(facts.rope, tuple(facts.rope)) or "not told",
        "tokenizer": _pairs(facts.tokenizer, ("model", "pre", "n_tokens", "bos", "eos")),
        "chat template": "yes" if facts.has_chat_template else "no",
        "calibration": "no" if facts.calibration is None else str(facts.calibration),
    }
    lines = [f"{name:<14} {' '.join(value.split())}" for name, value in rows.items()]
    lines += ["", f"{'weights':<14} {'tensors':>8} {'parameters':>14} {'size':>10}"]
    for name, weight in facts.weight_types.items():
        lines.append(f"{name:<14} {weight.n_tensors:>8} {weight.n_elements:>14,} {size_text(weight.n_bytes):>10}")
    return lines


def _pairs(values: dict[str, Any], names: tuple[str, ...]) -> str:
    return ", ".join(f"{name} {_short(values[name])}" for name in names if values.get(name) is not None)


def _short(value: Any) -> str:
    if isinstance(value, list) and len(value) > 4:
        return f"{min(value)} to {max(value)}" if min(value) != max(value) else str(value[0])
    return f"{value:g}" if isinstance(value, float) else str(value)


def _format_lines(facts: ModelFile, formats: dict[str, KVFormatNeed], budget: int) -> list[str]:
    if not formats:
        return []
    limit = facts.context_length or 4096
    heading = f"largest context in {size_text(budget)}" if budget else ""
    lines = ["", f"{'KV format':<14} {'bytes/token':>12} {'of F16':>8}   {heading}".rstrip()]
    for name, need in formats.items():
        largest = ""
        if need.largest_context is not None:
            largest = f"{need.largest_context}{' (all it was trained on)' if need.largest_context == limit else ''}"
        lines.append(f"{name:<14} {need.bytes_per_token:>12,.0f} {need.ratio:>8.3f}   {largest}".rstrip())
    if impossible := [name for name in kv_presets() if name not in formats]:
        lines.append(f"not for heads of this size: {', '.join(impossible)}")
    return lines


def _draw(facts: ModelFile, path: Path, target: Path) -> None:
    limit = facts.context_length or 4096
    contexts = sorted({max(256, limit * i // (_PLOT_POINTS - 1)) for i in range(_PLOT_POINTS)})
    figure, axes = new_plot(target)
    for name, n_bytes in kv_curves(path, contexts).items():
        axes.plot(contexts, [value / 2**20 for value in n_bytes], label=name)
    axes.set(xlabel="context (tokens)", ylabel="KV cache (MiB)", title=facts.name or path.name)
    axes.set_xlim(0, limit)
    axes.set_ylim(0)
    axes.grid(alpha=0.3)
    axes.legend()
    save_plot(figure, target)


if __name__ == "__main__":
    sys.exit(main())
