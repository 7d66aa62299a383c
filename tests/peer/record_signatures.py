"""Record the signatures of llama_cpp.Llama.

usage: PYTHON_OF_THE_PEER record_signatures.py OUT.json
"""

import inspect
import json
import sys
from pathlib import Path

import llama_cpp

METHODS = (
    "__init__",
    "create_completion",
    "create_chat_completion",
    "create_embedding",
    "embed",
    "generate",
    "eval",
    "sample",
    "tokenize",
    "detokenize",
    "from_pretrained",
    "set_cache",
    "set_seed",
    "save_state",
    "load_state",
    "reset",
)


def parameters(method: str) -> dict[str, str | None]:
    """The defaults, as Python writes them, by argument; None for one without."""
    found = inspect.signature(getattr(llama_cpp.Llama, method)).parameters.values()
    return {
        each.name: None if each.default is each.empty else repr(each.default)
        for each in found
        if each.name not in ("self", "kwargs")
    }


def main(out: str) -> None:
    """Write the record."""
    record = {
        "peer": f"llama-cpp-python {llama_cpp.__version__}",
        "methods": {method: parameters(method) for method in METHODS},
        "names": [name for name in dir(llama_cpp.Llama) if not name.startswith("_")],
    }
    Path(out).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
