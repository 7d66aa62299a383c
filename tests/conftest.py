import os
import signal
from pathlib import Path

import pytest

# a calibration is made by the tests that are about it
os.environ["PYKVQ_CALIBRATE"] = "never"

# a shell's background job ignores SIGINT, and so would the commands under test; a handler is not inherited, ignoring is
signal.signal(signal.SIGINT, signal.default_int_handler)


def link(directory: Path, model: Path) -> Path:
    """A model's file in a directory of its own, without the calibration that may lie beside it."""
    path = directory / model.name
    path.symlink_to(model.absolute())
    return path


@pytest.fixture(scope="session")
def smollm2_path(tmp_path_factory) -> Path:
    """SmolLM2-135M-Instruct Q4_1: the file PYKVQ_TEST_MODEL_SMOLLM2 names, else the demo model, fetched if need be."""
    given = os.environ.get("PYKVQ_TEST_MODEL_SMOLLM2")
    if not given:
        from pykvq import catalog

        given = catalog.fetch(catalog.default_model())
    return link(tmp_path_factory.mktemp("models"), Path(given))


@pytest.fixture(scope="session")
def qwen_path(tmp_path_factory) -> Path:
    """Qwen2.5-Coder-0.5B-Instruct Q4_K_M, which PYKVQ_TEST_MODEL_QWEN names."""
    given = os.environ.get("PYKVQ_TEST_MODEL_QWEN")
    if not given:
        pytest.skip("PYKVQ_TEST_MODEL_QWEN does not name a file")
    return link(tmp_path_factory.mktemp("models"), Path(given))
