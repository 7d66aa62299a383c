"""Record what llama_cpp.Llama answers to the calls of calls.py.

usage: PYTHON_OF_THE_PEER record.py MODEL.gguf OUT.json [OTHER.json]

The peer is llama-cpp-python of the version in cmake/llama_cpp_pin.json, in an environment of its own. Matrix products
round differently with each instruction set; with OTHER.json, the record of a peer built for another one, answers in
which the two peers differ are left out.
"""

import json
import sys
from pathlib import Path

import llama_cpp

sys.path.insert(0, str(Path(__file__).parent))
from calls import CALLS, LOAD, outcome


def main(model_path: str, out: str, other: str | None = None) -> None:
    """Answer all calls and write the record."""
    model = llama_cpp.Llama(model_path, verbose=False, **LOAD)
    answers = []
    for method, arguments in CALLS:
        model.reset()
        answers.append(outcome(getattr(model, method)(**arguments)))
    if other is not None:
        known = json.loads(Path(other).read_text(encoding="utf-8"))["answers"]
        answers = [mine if same(mine, theirs) else None for mine, theirs in zip(answers, known, strict=True)]
    record = {"peer": f"llama-cpp-python {llama_cpp.__version__}", "model": Path(model_path).name, "answers": answers}
    Path(out).write_text(json.dumps(record, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def same(a: dict, b: dict) -> bool:
    """Whether two answers have the same text and end."""
    return all(a[key] == b[key] for key in ("text", "finish_reason", "usage"))


if __name__ == "__main__":
    main(*sys.argv[1:])
