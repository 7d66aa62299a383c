import pytest

from pykvq import Llama


@pytest.fixture(scope="module")
def llm(smollm2_path):
    """SmolLM2 with an F16 cache, shared by the tests of a module.

    Batches stay below 64 tokens, from where on llama.cpp attends in another way that rounds differently.
    """
    with Llama(smollm2_path, kv_quant="f16", n_ctx=1024, n_batch=32, n_threads=1) as model:
        yield model
