"""Sampling parameters, under the names and with the defaults of llama-cpp-python."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from pykvq.errors import InvalidArgumentError

_INT32_MAX = 2**31 - 1
# of the native sampler, which allocates that many at once
_MAX_LAST_N = 2**20


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is drawn.

    The chain is logit bias, penalties, top-k, typical-p, top-p, min-p, temperature, draw, as in llama-cpp-python. A
    temperature of 0 takes the likeliest token after the penalties; a mirostat mode replaces the filters between them.

    Raises:
        InvalidArgumentError: a value is out of its range.
    """

    seed: int = 0
    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    # tokens of the answer that the penalties look back at
    last_n_tokens: int = 64
    mirostat_mode: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    # added to the logits, by token id
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("temperature", "mirostat_tau", "mirostat_eta"):
            self._require(name, lambda value: value >= 0, "0 or more")
        for name in ("top_p", "typical_p"):
            self._require(name, lambda value: 0 <= value <= 1, "between 0 and 1 (1 turns it off)")
        self._require("min_p", lambda value: 0 <= value <= 1, "between 0 (off) and 1")
        self._require("repeat_penalty", lambda value: value > 0, "above 0 (1 turns it off)")
        for name in ("frequency_penalty", "presence_penalty"):
            self._require(name, math.isfinite, "a finite number (0 turns it off)")
        for name in ("top_k", "mirostat_mode", "last_n_tokens", "seed"):
            self._require(name, lambda value: int(value) == value, "a whole number")
        self._require("top_k", lambda value: abs(value) <= _INT32_MAX, "an int32 (0 or less turns it off)")
        self._require("mirostat_mode", lambda value: value in (0, 1, 2), "0 (off), 1 or 2")
        self._require("last_n_tokens", lambda value: -1 <= value <= _INT32_MAX, "-1 (the whole context) or more")
        for token, bias in self.logit_bias.items():
            if not 0 <= token <= _INT32_MAX or math.isnan(bias):
                raise InvalidArgumentError(f"logit_bias[{token}]={bias}: needs a token id and a number")

    def _require(self, name: str, is_valid: object, rule: str) -> None:
        value = getattr(self, name)
        try:
            valid = math.isfinite(value) and is_valid(value)  # type: ignore[operator]
        except (TypeError, ValueError, OverflowError):
            valid = False
        if not valid:
            raise InvalidArgumentError(f"{name} must be {rule}, got {value!r}")

    def native_fields(self) -> dict[str, int | float | bool | str | None]:
        """The fields of ``pykvq_sampler_params`` except the logit bias."""
        return {
            "seed": self.seed & 0xFFFFFFFF,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "typical_p": self.typical_p,
            "repeat_penalty": self.repeat_penalty,
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
            "penalty_last_n": min(self.last_n_tokens, _MAX_LAST_N),
            "mirostat_mode": self.mirostat_mode,
            "mirostat_tau": self.mirostat_tau,
            "mirostat_eta": self.mirostat_eta,
        }
