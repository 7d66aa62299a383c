"""``kv_quant="auto"``: what is allocated stays within ``kv_memory``, whatever else the context is asked for."""

from __future__ import annotations

import contextlib

import pytest
from tiny_models import TinyModel

from pykvq import AsyncLlama, Llama, OutOfMemoryError

N_CTX = 1024


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return TinyModel(n_ctx_train=8 * N_CTX).write(tmp_path_factory.mktemp("auto") / "tiny.gguf")


def allocated(kind, path, **arguments) -> int:
    with contextlib.closing(kind(path, n_ctx=N_CTX, n_threads=1, calibrate="never", **arguments)) as llm:
        n_bytes: int = llm.kv_info()["kv_bytes"]
        return n_bytes


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (Llama, {}),
        (Llama, {"n_ubatch": 512}),
        (Llama, {"embedding": True}),
        (AsyncLlama, {"n_slots": 4}),
        (AsyncLlama, {"n_slots": 3, "n_ubatch": 256}),
    ],
)
def test_no_more_is_allocated_than_given(path, kind, arguments):
    f16 = allocated(kind, path, kv_quant="f16", **arguments)
    fitting = 0
    for share in (0.15, 0.3, 0.5, 0.8, 0.99, 1.0):
        budget = int(share * f16)
        with contextlib.suppress(OutOfMemoryError):
            assert allocated(kind, path, kv_quant="auto", kv_memory=budget, **arguments) <= budget
            fitting += 1
    assert fitting >= 1


def test_embeddings_have_no_tiers(path):
    """Nothing grows old in a cache that each text empties."""
    arguments = {"n_ctx": 8 * N_CTX, "n_threads": 1, "calibrate": "never", "embedding": True}
    with Llama(path, kv_quant="f16", **arguments) as llm:
        f16 = llm.kv_info()["kv_bytes"]
    with Llama(path, kv_quant="auto", kv_memory=f16, **arguments) as llm:
        assert llm.kv_info()["tiers_spec"] == "f16"
    with pytest.raises(OutOfMemoryError):
        Llama(path, kv_quant="auto", kv_memory=f16 - 1, **arguments)
