"""What loading a model would take, in the parts that the load dialog draws."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pykvq.kv_config import KV_TYPE_BITS, KVConfig, kv_presets, parse_kv_config
from pykvq.measured import recall
from pykvq.predict import Predictor, available_device_memory, available_memory
from pykvq.server.settings import LoadOptions

_F16_BITS = 16


@dataclass(frozen=True)
class Forecast:
    """Bytes of main memory, and ``device`` bytes on GPUs. ``tiers`` are the KV cache's parts, youngest tokens first.

    ``measured`` is what ``pykvq.fidelity`` last said of the KV format on this model, None if it was never asked.
    """

    weights: int
    tiers: tuple[tuple[str, int], ...]
    buffers: int
    total_f16: int
    available: int
    device: int
    available_device: int
    measured: dict[str, Any] | None

    @property
    def kv(self) -> int:
        """Bytes of the KV cache."""
        return sum(n_bytes for _, n_bytes in self.tiers)

    @property
    def total(self) -> int:
        """Bytes that loading takes."""
        return self.weights + self.kv + self.buffers

    @property
    def fits(self) -> bool:
        """Whether what is free suffices."""
        return self.total <= self.available and (not self.available_device or self.device <= self.available_device)


class Forecaster:
    """Asks a model file, of which only the metadata is loaded, what options would take. Its methods may take a second.

    Raises:
        ModelFileError: the file is damaged or no model.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._predictors: dict[int, Predictor] = {}
        self.n_ctx_train = self._predictor(0).n_ctx_train

    def forecast(self, options: LoadOptions) -> Forecast:
        """What a load with these options takes.

        Raises:
            InvalidArgumentError: the KV format is none.
        """
        predictor = self._predictor(options.n_gpu_layers)
        asked = parse_kv_config(options.kv_quant)
        kv = predictor.as_loaded(asked)
        n_ctx = (options.n_ctx or self.n_ctx_train) * options.n_slots
        need = predictor.memory(kv, n_ctx, calibrated=asked.takes_calibration())
        reference = predictor.memory(kv_presets()["f16"], n_ctx)
        return Forecast(
            weights=need.weights_bytes,
            tiers=_tiers(kv, n_ctx, options.n_slots, need.kv_bytes, reference.kv_bytes),
            buffers=need.compute_bytes,
            total_f16=reference.new_bytes,
            available=available_memory(),
            device=need.device_bytes,
            available_device=available_device_memory(),
            measured=recall(self._path, str(kv)) or recall(self._path, str(asked)),
        )

    def close(self) -> None:
        """Frees the metadata."""
        for predictor in self._predictors.values():
            predictor.__exit__()
        self._predictors.clear()

    def _predictor(self, n_gpu_layers: int) -> Predictor:
        if n_gpu_layers not in self._predictors:
            self._predictors[n_gpu_layers] = Predictor(self._path, n_gpu_layers=n_gpu_layers)
        return self._predictors[n_gpu_layers]


def _tiers(kv: KVConfig, n_ctx: int, n_slots: int, n_bytes: int, n_bytes_f16: int) -> tuple[tuple[str, int], ...]:
    """Bytes by tier: of older ones what their tokens take, of the first one the rest (room for new tokens)."""
    left, sizes = n_ctx, []
    for tier in kv.tiers:
        n_tokens = left if tier.n_tokens is None else min(left, tier.n_tokens * n_slots)
        left -= n_tokens
        bits = (KV_TYPE_BITS[tier.type_k] + KV_TYPE_BITS[tier.type_v]) / 2
        sizes.append(int(n_bytes_f16 * n_tokens / n_ctx * bits / _F16_BITS))
    sizes[0] = max(n_bytes - sum(sizes[1:]), 0)
    named = zip((tier_name(tier.type_k, tier.type_v) for tier in kv.tiers), sizes, strict=True)
    return tuple((name, size) for name, size in named if size)  # a context may be too short for the last tier


def tier_name(type_k: str, type_v: str) -> str:
    """A tier's types as one name."""
    return type_k if type_k == type_v else f"{type_k} / {type_v}"
