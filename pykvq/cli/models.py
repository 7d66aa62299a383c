"""``pykvq-models``: the models on this machine, and fetching more."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer

from pykvq import hub, models
from pykvq.cli.console import note, progress_bar, write
from pykvq.cli.program import new_app, run_program
from pykvq.errors import ModelFileError
from pykvq.units import size_text

PROGRAM = "pykvq-models"

app = new_app(no_args_is_help=True, help="List, fetch and delete models.")


@app.command("list")
def _list(as_json: Annotated[bool, typer.Option("--json", help="Print a JSON array.")] = False) -> int:
    """List the models on this machine: pykvq's own, and those of llama.cpp, LM Studio and the Hugging Face cache."""
    found = models.local_models()
    if as_json:
        write(json.dumps([{**asdict(model), "path": str(model.path)} for model in found], indent=2) + "\n")
        return 0
    width = max((len(model.name) for model in found), default=0)
    for model in found:
        write(f"{model.name:<{width}}  {size_text(model.file_bytes):>10}  {model.source:<16}  {model.path}\n")
    if not found:
        note(f"no models: fetch one with `{PROGRAM} pull hf:ORG/REPO`; looked in {_looked_in()}")
    return 0


@app.command("pull")
def _pull(
    name: Annotated[str, typer.Argument(metavar="hf:ORG/REPO[:FILE]", help="FILE may be a type, such as Q4_K_M.")],
) -> int:
    """Fetch a model, or go on with an interrupted fetch, and print its path."""
    with progress_bar(name, is_bytes=True) as show:
        path = models.resolve(name if name.startswith("hf:") or "/" not in name else f"hf:{name}", progress=show)
    if not path.exists():
        raise ModelFileError(f"there is no model {name!r}: give hf:ORG/REPO[:FILE], or a name of the catalog")
    write(f"{path}\n")
    return 0


@app.command("path")
def _path(name: Annotated[str, typer.Argument(metavar="NAME")]) -> int:
    """Print the path of a model on this machine."""
    path = models.resolve(name, fetch=False)
    if not path.exists():
        raise ModelFileError(f"there is no model {name!r} on this machine: `{PROGRAM} list` shows those that are")
    write(f"{path}\n")
    return 0


@app.command("remove")
def _remove(
    name: Annotated[str, typer.Argument(metavar="NAME")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> int:
    """Delete a model that pykvq fetched."""
    model = models.find(name)
    if model is None:
        raise ModelFileError(f"there is no model {name!r} on this machine: `{PROGRAM} list` shows those that are")
    if not yes:
        typer.confirm(f"delete {model.path} ({size_text(model.file_bytes)})?", abort=True, err=True)
    models.remove(model)
    note(f"deleted {model.path}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    return run_program(PROGRAM, app, argv)


def _looked_in() -> str:
    return ", ".join(str(folder.path) for folder in models.folders()) or str(hub.models_dir())


if __name__ == "__main__":
    sys.exit(main())
