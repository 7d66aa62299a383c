import os
import signal
from pathlib import Path

import pytest

# a calibration is made by the tests that are about it
os.environ["PYKVQ_CALIBRATE"] = "never"

# a shell's background job ignores SIGINT, and so would the commands under test; a handler is not inherited, ignoring is
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct Q4_1: the file PYKVQ_TEST_MODEL_SMOLLM2 names, else the demo model, fetched if need be."""
    given = os.environ.get("PYKVQ_TEST_MODEL_SMOLLM2")
    if given:
        return Path(given)
    from pykvq import catalog

    return catalog.fetch(catalog.default_model())


@pytest.fixture(scope="session")
def qwen_path() -> Path:
    """Qwen2.5-Coder-0.5B-Instruct Q4_K_M, which PYKVQ_TEST_MODEL_QWEN names."""
    given = os.environ.get("PYKVQ_TEST_MODEL_QWEN")
    if not given:
        pytest.skip("PYKVQ_TEST_MODEL_QWEN does not name a file")
    return Path(given)
