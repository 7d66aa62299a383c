"""The native sampler on logits made here, and the threads that a context computes with."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tiny_models import TinyModel

from pykvq import InvalidArgumentError
from pykvq.errors import InternalError
from pykvq.runtime import Model, Sampler
from pykvq.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0)
# a bias of nothing, so that the chain has a link before the draw
BY_CHAIN = SamplingParams(temperature=0, logit_bias={0: 0.0})


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    with Model(TinyModel().write(tmp_path_factory.mktemp("tiny") / "tiny.gguf")) as tiny:
        yield tiny


def draw(model, params, logits):
    sampler = Sampler(model, params)
    try:
        return sampler.sample_logits(logits)
    finally:
        sampler.close()


def test_greedy_draws_are_those_of_the_chain(model):
    rng = np.random.default_rng(1)
    for _ in range(50):
        # few different values, so that the largest occurs several times; the first of them is taken
        logits = rng.integers(-3, 4, model.info.n_vocab).astype(np.float32)
        logits[rng.random(len(logits)) < 0.2] = -np.inf
        assert draw(model, GREEDY, logits) == draw(model, BY_CHAIN, logits) == int(np.argmax(logits))


@pytest.mark.parametrize("params", [GREEDY, BY_CHAIN, SamplingParams()])
def test_logits_that_leave_no_choice(model, params):
    logits = np.full(model.info.n_vocab, -np.inf, dtype=np.float32)
    with pytest.raises(InvalidArgumentError, match="every logit is infinite"):
        draw(model, params, logits)
    logits[3:] = 0
    logits[7] = np.nan
    with pytest.raises(InternalError, match="not a number"):
        draw(model, params, logits)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads /proc")
def test_no_openmp():
    """Its threads are shared by all of a process, and its barriers sleep once there are more of them than cores."""
    code = "from pykvq.native import load; load(); print(open('/proc/self/maps').read())"
    maps = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "libpykvq-ggml-cpu" in maps
    assert "libgomp" not in maps
