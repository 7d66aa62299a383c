"""``kv_quant="auto"``: the format that is predicted to cost least among those that fit the memory given."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from pykvq.calibration import CalibrationInfo
from pykvq.errors import InvalidArgumentError, OutOfMemoryError
from pykvq.kv_config import KVConfig, parse_kv_config
from pykvq.kv_layers import predicted_kld, with_calibration
from pykvq.predict import available_memory

_MIB = 1024 * 1024
_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*")

# what may be chosen: F16, then a window of F16 and these types behind it; K and V apart, since models differ in what
# they bear
_TYPES = ("q8_0", "q4_ve", "q2_t")
_CTX_STEP = 256
_MAX_BYTES = 2**63


@dataclass(frozen=True)
class AutomaticChoice:
    """What was chosen, and why: the sizes in bytes, and the predicted KLD in nats, which is a rough figure."""

    kv: KVConfig
    n_bytes: int
    budget: int
    predicted_kld: float

    def __str__(self) -> str:
        return (
            f"{self.kv.name}: {self.n_bytes / _MIB:.0f} MiB of {self.budget / _MIB:.0f}, "
            f"predicted KLD {self.predicted_kld:.2g}"
        )


def parse_memory(value: str | int | float | None) -> int:
    """Bytes: a number of bytes, text such as "2GiB", or a fraction below 1 of the memory that is available now.

    Raises:
        InvalidArgumentError: it is none of these.
    """
    if isinstance(value, float) and 0 < value < 1:
        return int(available_memory() * value)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 1 <= value < _MAX_BYTES:
        return int(value)
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None or match[2].upper() not in _UNITS or not math.isfinite(float(match[1])):
        raise InvalidArgumentError(
            f'kv_memory={value!r} is no size: give bytes, "2GiB", or a fraction of the free memory such as 0.5'
        )
    n_bytes = float(match[1]) * _UNITS[match[2].upper()]
    return parse_memory(n_bytes if n_bytes < 1 else int(n_bytes))


def choose_format(
    calibration: CalibrationInfo | None,
    n_ctx: int,
    budget: int,
    *,
    n_sink: int,
    n_bytes: Callable[[KVConfig, int], int],
    tiers: bool = True,
) -> AutomaticChoice:
    """The format of least predicted KLD whose cache of n_ctx tokens takes at most ``budget`` bytes.

    Args:
        n_bytes: the bytes that a format takes with so many tokens of context.
        tiers: whether tokens may change their type as they age.

    Raises:
        OutOfMemoryError: none does; the message has the largest n_ctx that fits.
    """
    choices = [
        AutomaticChoice(kv, n_bytes(kv, n_ctx), budget, predicted_kld(kv, calibration))
        for kv in _formats(calibration, n_sink)
        if tiers or not kv.is_tiered
    ]
    fitting = [choice for choice in choices if choice.n_bytes <= budget]
    if fitting:
        return min(fitting, key=lambda choice: (choice.predicted_kld, choice.n_bytes))
    smallest = min(choices, key=lambda choice: choice.n_bytes)
    largest = _largest_ctx(lambda tokens: n_bytes(smallest.kv, tokens), n_ctx, budget)
    raise OutOfMemoryError(
        f"no KV format of {n_ctx} tokens fits {budget / _MIB:.0f} MiB, the smallest takes "
        f"{smallest.n_bytes / _MIB:.0f} MiB: {f'use n_ctx {largest} or less' if largest else 'give it more'}"
    )


def _formats(calibration: CalibrationInfo | None, n_sink: int) -> list[KVConfig]:
    names = ["f16", *(f"f16:128+{k}/{v}@auto" if k != v else f"f16:128+{k}@auto" for k in _TYPES for v in _TYPES)]
    return [with_calibration(parse_kv_config(name, n_sink=n_sink), calibration) for name in names]


def _largest_ctx(n_bytes: Callable[[int], int], n_ctx: int, budget: int) -> int:
    low, high = 0, n_ctx // _CTX_STEP
    while low < high:
        middle = (low + high + 1) // 2
        if n_bytes(middle * _CTX_STEP) <= budget:
            low = middle
        else:
            high = middle - 1
    return low * _CTX_STEP
