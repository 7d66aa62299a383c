"""pykvq: GGUF models with a KV cache that is a quarter of its usual size.

>>> from pykvq import Llama
>>> with Llama("model.gguf", kv_quant="ultra4") as llm:
...     print(llm("The capital of France is", max_tokens=16)["choices"][0]["text"])
"""

from __future__ import annotations

from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

from pykvq import errors
from pykvq.errors import *  # noqa: F403
from pykvq.kv_config import KVConfig, Tier, kv_presets

if TYPE_CHECKING:
    from pykvq.async_llama import AsyncLlama
    from pykvq.calibration import calibrate
    from pykvq.llama import Llama
    from pykvq.predict import predict_kv, predict_memory
    from pykvq.quality import fidelity

__all__ = [
    "AsyncLlama",
    "KVConfig",
    "Llama",
    "Tier",
    "__version__",
    "calibrate",
    "fidelity",
    "kv_presets",
    "predict_kv",
    "predict_memory",
    *errors.__all__,
]

try:
    __version__ = metadata.version("pykvq")
except metadata.PackageNotFoundError:  # a source tree that is not installed
    __version__ = "0+unknown"


# these pull in numpy, jinja2 and the native library, which `pykvq-run --help` need not wait for
_LAZY = {
    "AsyncLlama": "pykvq.async_llama",
    "Llama": "pykvq.llama",
    "calibrate": "pykvq.calibration",
    "fidelity": "pykvq.quality",
    "predict_kv": "pykvq.predict",
    "predict_memory": "pykvq.predict",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'pykvq' has no attribute {name!r}")
