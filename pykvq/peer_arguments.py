"""Arguments of llama-cpp-python that pykvq's methods have not: why, and what to use."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from typing import Any

from pykvq.errors import UnsupportedArgumentError

# method -> argument -> (the value that changes nothing, what to do)
UNSUPPORTED: dict[str, dict[str, tuple[Any, str]]] = {
    "__init__": {
        "split_mode": (1, "layers are split over all GPUs, or those that device names"),
        "tensor_split": (None, "layers are split by the GPUs' free memory: leave some out with device"),
        "kv_overrides": (None, "change the metadata in the file, with gguf's gguf_set_metadata"),
        "attention_type": (-1, "the model's own attention is used"),
        "lora_base": (None, "adapters are applied to the loaded weights: use lora_path and lora_scale alone"),
        "numa": (False, "bind the process with numactl"),
        "chat_format": (None, "the model's own template is used: pass another as chat_template"),
        "chat_handler": (None, "multimodal input is not supported: pass text, or a chat_template"),
        "tokenizer": (None, "the model's own tokenizer is used"),
        "spm_infill": (False, "suffix puts the prefix first"),
    },
    "create_completion": {"tfs_z": (1.0, "tail-free sampling is gone from llama.cpp: use min_p or typical_p")},
    "create_chat_completion": {"tfs_z": (1.0, "tail-free sampling is gone from llama.cpp: use min_p or typical_p")},
    "generate": {
        "tfs_z": (1.0, "tail-free sampling is gone from llama.cpp: use min_p or typical_p"),
        "penalize_nl": (True, "line breaks are penalised like other tokens: use logit_bias"),
    },
    "sample": {
        "tfs_z": (1.0, "tail-free sampling is gone from llama.cpp: use min_p or typical_p"),
        "penalize_nl": (True, "line breaks are penalised like other tokens: use logit_bias"),
        "idx": (None, "the logits of the last token evaluated are used"),
    },
    "from_pretrained": {
        "local_dir_use_symlinks": ("auto", "huggingface_hub has no such option any more: use local_dir or cache_dir"),
    },
}

# method -> argument -> why it changes nothing, whatever its value
IGNORED: dict[str, dict[str, str]] = {
    "__init__": {
        "logits_all": "log probabilities need no flag",
        "no_perf": "native timings are not collected",
    },
}


def refuse(method: str, given: Mapping[str, Any]) -> None:
    """Raises for each argument given that pykvq has not, unless its value changes nothing.

    Raises:
        UnsupportedArgumentError: names what to use instead.
        TypeError: neither pykvq nor llama-cpp-python has the argument.
    """
    known = UNSUPPORTED[method]
    for name, value in given.items():
        if name in IGNORED.get(method, {}):
            continue
        if name not in known:
            raise TypeError(f"{method}() got an unexpected keyword argument {name!r}{_nearest(method, name)}")
        neutral, advice = known[name]
        if value != neutral:
            raise UnsupportedArgumentError(f"{name}={value!r} is not supported by pykvq: {advice}")


def _nearest(method: str, name: str) -> str:
    from pykvq.llama import Llama

    found = difflib.get_close_matches(name, inspect.signature(getattr(Llama, method)).parameters, n=1)
    return f": did you mean {found[0]!r}?" if found else ""
