import pytest
from file_model import FileModel

from pykvq import Llama


@pytest.fixture(scope="session", autouse=True)
def own_measurements(tmp_path_factory):
    """What tests measure of a model is not kept among the user's figures, nor are these told here."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("measured")
        patch.setattr("pykvq.measured.cache_dir", lambda: folder)
        yield


@pytest.fixture(scope="module")
def llm(smollm2_path):
    """SmolLM2 with an F16 cache, shared by the tests of a module.

    Batches stay below 64 tokens, from where on llama.cpp attends in another way that rounds differently.
    """
    with Llama(smollm2_path, kv_quant="f16", n_ctx=1024, n_batch=32, n_threads=1) as model:
        yield model


@pytest.fixture(scope="session")
def smollm2_f32(smollm2_path, tmp_path_factory):
    """SmolLM2 with its weights as float32, a FileModel of 540 MB.

    On the weights of the file ggml rounds activations to 8 bits, so that any other order of a sum moves logits by some
    tenths. Without that two ways to compute the same agree closely.
    """
    path = tmp_path_factory.mktemp("smollm2") / "smollm2-f32.gguf"
    yield FileModel(smollm2_path).write_f32(path)
    path.unlink()
