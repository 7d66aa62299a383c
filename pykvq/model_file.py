"""What a model file holds, and what its KV cache would take: the facts behind ``pykvq-inspect``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pykvq.errors import ModelFileError, UnsupportedModelError
from pykvq.file_names import calibration_path
from pykvq.gguf_header import Header, TensorInfo, read_headers
from pykvq.kv_config import KVConfig, kv_presets
from pykvq.predict import Predictor

# a context of so many tokens is long enough for its bytes a token to be those of the oldest tier
_LONG_CONTEXT = 1 << 20
# integers that every part of pykvq relies on, with the range that makes sense; keys of the architecture
_RANGES = {
    "context_length": (1, 1 << 30),
    "embedding_length": (1, 1 << 24),
    "block_count": (1, 1 << 16),
    "feed_forward_length": (0, 1 << 26),
    "attention.head_count": (0, 1 << 16),
    "attention.head_count_kv": (0, 1 << 16),
    "attention.key_length": (1, 1 << 16),
    "attention.value_length": (1, 1 << 16),
    "attention.sliding_window": (0, 1 << 30),
    "rope.dimension_count": (0, 1 << 16),
    "expert_count": (0, 1 << 16),
    "expert_used_count": (0, 1 << 16),
}


@dataclass(frozen=True)
class WeightType:
    """The tensors of one type."""

    n_tensors: int
    n_elements: int
    n_bytes: int


@dataclass(frozen=True)
class KVFormatNeed:
    """What a KV format takes in this model."""

    bytes_per_token: float  # of the oldest tokens in a long context
    ratio: float  # against F16
    largest_context: int | None  # that fits the budget, None without one


@dataclass(frozen=True)
class ModelFile:
    """A model file's facts. A value is None where the file does not tell it."""

    paths: list[Path]
    file_bytes: int
    version: int
    architecture: str
    name: str | None
    context_length: int | None
    shape: dict[str, Any]
    rope: dict[str, Any]
    tokenizer: dict[str, Any]
    has_chat_template: bool
    calibration: Path | None
    n_params: int
    weights_bytes: int
    largest_tensor: int  # elements
    weight_types: dict[str, WeightType]

    @property
    def bits_per_weight(self) -> float:
        """Bits of a weight on average, scales included."""
        return 8 * self.weights_bytes / self.n_params if self.n_params else 0.0


def read_model_file(path: str | os.PathLike[str]) -> ModelFile:
    """The facts of a model, from the headers of its file or files alone.

    Raises:
        ModelFileError: a file is missing, damaged or not a GGUF file, or tells what no model can be.
    """
    headers = read_headers(path)
    metadata = headers[0].metadata
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise ModelFileError(f"'{os.fspath(path)}' is no model: general.architecture is missing or no text")
    own = {key[len(architecture) + 1 :]: value for key, value in metadata.items() if key.startswith(f"{architecture}.")}
    _check_ranges(path, own)
    tensors = [tensor for header in headers for tensor in header.tensors]
    return ModelFile(
        paths=[header.path for header in headers],
        file_bytes=sum(header.file_bytes for header in headers),
        version=headers[0].version,
        architecture=architecture,
        name=_text(metadata.get("general.name")),
        context_length=own.get("context_length"),
        shape=_shape(own),
        rope={key[5:]: value for key, value in own.items() if key.startswith("rope.")},
        tokenizer=_tokenizer(path, headers[0]),
        has_chat_template="tokenizer.chat_template" in metadata,
        calibration=_calibration(path),
        n_params=sum(tensor.n_elements for tensor in tensors),
        weights_bytes=sum(tensor.n_bytes for tensor in tensors),
        largest_tensor=max((tensor.n_elements for tensor in tensors), default=0),
        weight_types=_by_type(tensors),
    )


def kv_formats(path: str | os.PathLike[str], context_length: int, budget: int | None) -> dict[str, KVFormatNeed]:
    """What each KV preset takes in a model, and the largest context for ``budget`` bytes of main memory.

    Contexts longer than ``context_length`` are not looked at, and formats that the model's heads do not fit left out.

    Raises:
        ModelFileError, UnsupportedModelError: llama.cpp cannot load the model.
    """
    with Predictor(path) as predictor:
        f16_bytes = 0.0
        result = {}
        for name, preset in _possible_presets(predictor).items():
            kv = predictor.as_loaded(preset)
            ends = [predictor.kv_bytes(kv, n_ctx)[0] for n_ctx in (_LONG_CONTEXT, 2 * _LONG_CONTEXT)]
            bytes_per_token = (ends[1] - ends[0]) / _LONG_CONTEXT
            f16_bytes = f16_bytes or bytes_per_token  # the first preset
            largest = None
            if budget is not None:
                calibrated = preset.takes_calibration()
                largest = predictor.largest_context(kv, budget, context_length, calibrated=calibrated)
            result[name] = KVFormatNeed(bytes_per_token, bytes_per_token / f16_bytes if f16_bytes else 1.0, largest)
        return result


def kv_curves(path: str | os.PathLike[str], contexts: list[int]) -> dict[str, list[int]]:
    """Bytes of the KV cache by preset, at each of the contexts."""
    with Predictor(path) as predictor:
        formats = {name: predictor.as_loaded(kv) for name, kv in _possible_presets(predictor).items()}
        return {name: [predictor.kv_bytes(kv, n_ctx)[0] for n_ctx in contexts] for name, kv in formats.items()}


def _possible_presets(predictor: Predictor) -> dict[str, KVConfig]:
    """The presets that a model can have: some types hold blocks that its heads do not fill."""
    presets = kv_presets()
    predictor.kv_bytes(presets["f16"], _LONG_CONTEXT)  # raises for a model that can have none
    possible = {}
    for name, kv in presets.items():
        with contextlib.suppress(UnsupportedModelError):
            predictor.kv_bytes(kv, _LONG_CONTEXT)
            possible[name] = kv
    return possible


def _check_ranges(path: str | os.PathLike[str], own: Mapping[str, Any]) -> None:
    for key, (low, high) in _RANGES.items():
        value = own.get(key)
        values = value if isinstance(value, list) else [] if value is None else [value]
        wrong = next((v for v in values if not isinstance(v, int) or isinstance(v, bool) or not low <= v <= high), None)
        if wrong is not None:
            raise ModelFileError(f"'{os.fspath(path)}' is damaged: {key} is {wrong!r}, possible is {low} to {high}")


def _shape(own: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes by the names that llama.cpp's metadata has."""
    n_embd, n_head = own.get("embedding_length"), own.get("attention.head_count")
    head_dim = n_embd // n_head if isinstance(n_embd, int) and isinstance(n_head, int) and n_head > 0 else None
    return {
        "embedding_length": n_embd,
        "block_count": own.get("block_count"),
        "feed_forward_length": own.get("feed_forward_length"),
        "head_count": n_head,
        "head_count_kv": own.get("attention.head_count_kv", n_head),
        "key_length": own.get("attention.key_length", head_dim),
        "value_length": own.get("attention.value_length", head_dim),
        "sliding_window": own.get("attention.sliding_window"),
        "expert_count": own.get("expert_count"),
        "expert_used_count": own.get("expert_used_count"),
    }


def _tokenizer(path: str | os.PathLike[str], header: Header) -> dict[str, Any]:
    n_tokens = header.length("tokenizer.ggml.tokens")
    tokens = {}
    for name in ("bos", "eos", "eot", "padding", "unknown"):
        token = header.metadata.get(f"tokenizer.ggml.{name}_token_id")
        # -1 says that there is none
        if token is not None and not (isinstance(token, int) and (0 <= token < n_tokens or token in (-1, 2**32 - 1))):
            raise ModelFileError(f"'{os.fspath(path)}' is damaged: its {name} token is {token!r} of {n_tokens} tokens")
        tokens[name] = token
    return {
        "model": _text(header.metadata.get("tokenizer.ggml.model")),
        "pre": _text(header.metadata.get("tokenizer.ggml.pre")),
        "n_tokens": n_tokens,
        **tokens,
    }


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None if value is None else f"({value.length} bytes)"


def _by_type(tensors: list[TensorInfo]) -> dict[str, WeightType]:
    result: dict[str, WeightType] = {}
    for tensor in tensors:
        before = result.get(tensor.type_name, WeightType(0, 0, 0))
        result[tensor.type_name] = WeightType(
            before.n_tensors + 1, before.n_elements + tensor.n_elements, before.n_bytes + tensor.n_bytes
        )
    return dict(sorted(result.items(), key=lambda item: -item[1].n_bytes))


def _calibration(path: str | os.PathLike[str]) -> Path | None:
    candidate = calibration_path(path)
    return candidate if candidate.is_file() else None
