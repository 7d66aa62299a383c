"""pykvq.Llama gives the answers of llama_cpp.Llama, as record.py has recorded them."""

import json
from pathlib import Path

import pytest
from calls import CALLS, LOAD, outcome

from pykvq import Llama

RECORD = json.loads((Path(__file__).parent / "answers.json").read_text(encoding="utf-8"))
# answers in which peers built for two instruction sets agree: the others hang on how products are rounded
ANSWERED = [(i, *call) for i, call in enumerate(CALLS) if RECORD["answers"][i] is not None]


@pytest.fixture(scope="module")
def model(smollm2_path):
    with Llama(smollm2_path, kv_quant="f16", **LOAD) as llm:
        yield llm


def test_enough_answers_were_recorded():
    assert len(RECORD["answers"]) == len(CALLS)
    assert len(ANSWERED) >= 30


@pytest.mark.parametrize(("i", "method", "arguments"), ANSWERED)
def test_the_answer_is_the_same(model, i, method, arguments):
    model.reset()
    expected = RECORD["answers"][i]
    found = outcome(getattr(model, method)(**arguments))
    assert found.pop("logprobs", None) == pytest.approx(expected.pop("logprobs", None), abs=0.3)
    assert found == expected
