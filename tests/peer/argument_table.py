"""The table of docs/migration.md that says what became of each argument of llama_cpp.Llama.

usage: argument_table.py   writes the table into the page
"""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

from pykvq import Llama
from pykvq.peer_arguments import IGNORED, UNSUPPORTED

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "migration.md"
_PLACE = re.compile(r"(?<=<!-- arguments -->\n).*(?=<!-- end of arguments -->)", re.S)

# the same value, written otherwise
_EQUAL = ({"[]", "None"}, {"None", "-1"}, {"4294967295", "-1"}, {"None", "'auto'"})
# defaults that llama.cpp resolves to what the peer spells out
_FROM_MODEL = ("yarn_ext_factor", "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow", "yarn_orig_ctx")


def peer_methods() -> dict[str, dict[str, str | None]]:
    """The peer's arguments and their defaults by method."""
    methods: dict[str, dict[str, str | None]] = json.loads((HERE / "signatures.json").read_text())["methods"]
    return methods


def state(method: str, name: str, default: str | None) -> str:
    """What became of an argument: "same", or what differs."""
    if name in IGNORED.get(method, {}):
        return f"accepted, changes nothing: {IGNORED[method][name]}"
    if name in UNSUPPORTED.get(method, {}):
        return f"not supported: {UNSUPPORTED[method][name][1]}"
    parameters = inspect.signature(getattr(Llama, method)).parameters
    own = parameters[name].default if name in parameters else _sampling_default(name)
    written = None if own is inspect.Parameter.empty else repr(own)
    if written == default or {written, default} in _EQUAL or name in _FROM_MODEL:
        return "same"
    return f"default {written} instead of {default}"


def _sampling_default(name: str) -> object:
    """The default of an argument that a method passes on to SamplingParams."""
    from pykvq.sampling import SamplingParams

    return inspect.signature(SamplingParams).parameters[name].default


def table() -> str:
    """The table as Markdown."""
    rows = ["| method | argument | state |", "|---|---|---|"]
    for method, arguments in peer_methods().items():
        states = {name: state(method, name, default) for name, default in arguments.items()}
        same = [f"`{name}`" for name, text in states.items() if text == "same"]
        if same or not states:
            rows.append(f"| `{method}` | {', '.join(same) or 'none'} | same |")
        rows += [f"| `{method}` | `{name}` | {text} |" for name, text in states.items() if text != "same"]
    return "\n".join(rows) + "\n"


def written_table() -> str:
    """The table in the page."""
    found = _PLACE.search(PAGE.read_text(encoding="utf-8"))
    assert found, f"{PAGE} has no place for the table"
    return found[0]


if __name__ == "__main__":
    PAGE.write_text(_PLACE.sub(lambda _: table(), PAGE.read_text(encoding="utf-8")), encoding="utf-8")
