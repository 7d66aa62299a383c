import fake_native
import pytest

from pykvq import native


@pytest.fixture
def lib(monkeypatch):
    """The fake native library, in place of the real one."""
    fake = fake_native.FakeLib()
    monkeypatch.setattr(native, "load", lambda: (fake_native.ffi, fake))
    return fake


@pytest.fixture
def model_path(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF fake")
    return path


@pytest.fixture
def llm(lib, model_path):
    """A Llama on the fake library; fill ``lib.replies`` (or use ``reply``) with what it is to answer."""
    from pykvq import Llama

    with Llama(model_path, n_ctx=256, n_batch=16) as model:
        yield model


@pytest.fixture
def reply(lib):
    """Sets the bytes of the next answer, and the token that ends it."""

    def queue(text, end=fake_native.EOS):
        lib.replies.clear()
        lib.replies.extend(text.encode() if isinstance(text, str) else text)
        if end is not None:
            lib.replies.append(end)

    return queue
