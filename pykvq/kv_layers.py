"""What types cost which layer, and a tier's bits dealt to the layers by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pykvq.calibration.file import CalibrationInfo, LayerSensitivity
from pykvq.kv_config import KV_TYPE_BITS, KVConfig, LayerTypes, Tier

# variance that a type adds to a stored coordinate of variance 1: normal values, the reference encoders; for q4_ves
# less, since the strong coordinates of sorted keys gain most from a step up
NOISE = {
    "f32": 0.0,
    "f16": 0.0,
    "bf16": 1e-6,
    "q8_0": 2.5e-5,
    "q4_ve": 0.0069,
    "q4_ves": 0.0035,
    "q2_t": 0.1106,
    "q2_ts": 0.1106,
}
# KLD in nats for an error of keys and values that is as large as the residual stream, fitted to what single layers
# cost in docs/fidelity.md
_KEY_KLD, _VALUE_KLD = 1.3, 0.4
# sensitivities where no calibration says any, summed over layers: SmolLM2's
_USUAL_SENSITIVITY = (0.3, 0.25)
# types that a layer may get in a dealt tier
_KEY_TYPES = {True: ("q2_ts", "q4_ves", "q8_0", "f16"), False: ("q2_t", "q4_ve", "q8_0", "f16")}
_VALUE_TYPES = ("q2_t", "q4_ve", "q8_0", "f16")
# bits an element that a dealt tier of two bits may take more: a few layers carry most of its cost
_MORE_BITS = 0.1875
_FEW_BITS = 3.0
# and no layer gets less than its tier unless that pays even if it costs so many times what is predicted, which is off
# by a factor of ten for some layers
_DOUBT = 16.0


@dataclass
class _Part:
    """A layer's keys or values: elements of a token, what noise costs, types to choose from, the tier's, the chosen."""

    size: int
    cost: float
    types: list[str]
    usual: str
    chosen: str

    def kld(self, name: str) -> float:
        """What a type costs, with doubt if it is less than usual."""
        doubt = _DOUBT if KV_TYPE_BITS[name] < KV_TYPE_BITS[self.usual] else 1.0
        return self.cost * NOISE.get(name, 0.0) * doubt  # a type that is never dealt is the only choice

    def bits(self, name: str) -> float:
        """Bits of a token."""
        return self.size * KV_TYPE_BITS[name]

    def best(self, price: float) -> str:
        """The type of least cost when a bit costs ``price``."""
        return min(self.types, key=lambda name: self.kld(name) + price * self.bits(name))


def with_calibration(kv: KVConfig, calibration: CalibrationInfo | None) -> KVConfig:
    """The format as a context with this calibration has it: sorted keys, and types dealt to the layers."""
    spectral = calibration is not None and calibration.spectral_keys
    layers = () if calibration is None else calibration.sensitivity
    return _dealt(kv.with_spectral_keys() if spectral else kv, layers, spectral)


def predicted_kld(kv: KVConfig, calibration: CalibrationInfo | None) -> float:
    """What the oldest tier's types are expected to cost, in nats: a rough figure."""
    tier = kv.tiers[-1]
    if calibration is None:
        k, v = _USUAL_SENSITIVITY
        return _KEY_KLD * k * NOISE[tier.type_k] + _VALUE_KLD * v * NOISE[tier.type_v]
    own = {layer.layer: layer for layer in tier.layers}
    total = 0.0
    for layer in calibration.sensitivity:
        types = own.get(layer.layer, tier)
        total += _KEY_KLD * layer.k * NOISE[types.type_k] + _VALUE_KLD * layer.v * NOISE[types.type_v]
    return total


def usual_deal(kv: KVConfig, n_layers: int) -> KVConfig:
    """The format with dealt tiers as large as they may get, for a model that is not calibrated yet."""
    equal = [LayerSensitivity(i, 1.0, 1.0, 1, 1) for i in range(n_layers)]
    return _dealt(kv, equal, any(tier.type_k in _KEY_TYPES[True][:2] for tier in kv.tiers))


def _dealt(kv: KVConfig, layers: Sequence[LayerSensitivity], spectral: bool) -> KVConfig:
    tiers: list[Tier] = []
    for i, tier in enumerate(kv.tiers):
        older = next((other for other in kv.tiers[i + 1 :] if not other.dealt), None)
        tiers.append(_deal_tier(tier, tiers[-1], older, layers, spectral) if tier.dealt else tier)
    return replace(kv, tiers=tuple(tiers))


def _deal_tier(
    tier: Tier, younger: Tier, older: Tier | None, layers: Sequence[LayerSensitivity], spectral: bool
) -> Tier:
    """The tier with types of least predicted cost, at no more bits than it may take, none above the younger tier's, and
    none below those of an older tier whose types are given."""

    def part(layer: str, size: int, cost: float, types: Sequence[str], usual: str) -> _Part:
        most = KV_TYPE_BITS[younger.type_of(layer)]
        least = 0.0 if older is None else min(KV_TYPE_BITS[older.type_of(layer)], KV_TYPE_BITS[usual])
        types = [name for name in types if least <= KV_TYPE_BITS[name] <= most]
        if not any(KV_TYPE_BITS[name] <= KV_TYPE_BITS[usual] for name in types):
            types = [usual]  # no choice that the bits allow
        return _Part(size, cost, types, usual, usual)

    keys, values = [], []
    for layer in layers:
        keys.append(part(f"k{layer.layer}", layer.n_k, _KEY_KLD * layer.k, _KEY_TYPES[spectral], tier.type_k))
        values.append(part(f"v{layer.layer}", layer.n_v, _VALUE_KLD * layer.v, _VALUE_TYPES, tier.type_v))
    nominal = tier.bits_per_element()
    allowed = nominal + (_MORE_BITS if nominal < _FEW_BITS else 0.0)
    _deal_bits([*keys, *values], allowed)
    types = [LayerTypes(s.layer, k.chosen, v.chosen) for s, k, v in zip(layers, keys, values, strict=True)]
    own = tuple(entry for entry in types if (entry.type_k, entry.type_v) != (tier.type_k, tier.type_v))
    return replace(tier, layers=own, dealt=False)


def _deal_bits(parts: Sequence[_Part], allowed: float) -> None:
    """Chooses types that take at most ``allowed`` bits an element.

    A price for a bit is found at which each part, taking what is cheapest for it, stays within the bits (Shoham and
    Gersho 1988); what is left over goes to the steps up that gain most a bit.
    """
    budget = allowed * sum(part.size for part in parts)
    low, high = 0.0, max((part.cost for part in parts), default=0.0) + 1.0
    for _ in range(100):
        price = (low + high) / 2
        if sum(part.bits(part.best(price)) for part in parts) > budget:
            low = price
        else:
            high = price
    for part in parts:
        part.chosen = part.best(high)
    left = budget - sum(part.bits(part.chosen) for part in parts)
    while steps := [step for part in parts for step in _steps_up(part, left)]:
        _, part, name = max(steps, key=lambda step: step[0])
        left -= part.bits(name) - part.bits(part.chosen)
        part.chosen = name


def _steps_up(part: _Part, left: float) -> list[tuple[float, _Part, str]]:
    """What larger types gain for each bit that they take more, of those for which enough bits are left."""
    have = part.bits(part.chosen)
    return [
        ((part.kld(part.chosen) - part.kld(name)) / (part.bits(name) - have), part, name)
        for name in part.types
        if 0 < part.bits(name) - have <= left and part.kld(name) < part.kld(part.chosen)
    ]
