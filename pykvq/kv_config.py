"""KV cache formats: the presets, and the form TYPE[/VTYPE][:TOKENS]+... that spells tiers out."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from numbers import Integral
from typing import TypeVar

from pykvq.arguments import require_type
from pykvq.errors import InvalidArgumentError

# every type that the native library can store a KV cache in, and its bits per element with scales
KV_TYPE_BITS = {
    "f32": 32.0,
    "f16": 16.0,
    "bf16": 16.0,
    "q8_0": 8.5,
    "q5_1": 6.0,
    "q5_0": 5.5,
    "q4_1": 5.0,
    "q4_0": 4.5,
    "iq4_nl": 4.5,
    "q4_ve": 4.25,
    "q2_t": 2.25,
    "q4_ves": 4.5,
    "q2_ts": 2.5,
}
# numbers of ggml's types
_GGML_TYPES = {0: "f32", 1: "f16", 2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1", 8: "q8_0", 20: "iq4_nl", 30: "bf16"}
# types that a calibration serves, and what holds keys in their place when it sorts them
OWN_TYPES = ("q4_ve", "q2_t", "q4_ves", "q2_ts")
_SPECTRAL_KEYS = {"q4_ve": "q4_ves", "q2_t": "q2_ts"}
_FLOAT_TYPES = ("f32", "f16", "bf16")
_WINDOW_TYPES = ("f16", "bf16")
# how a tier says that its layers' types are dealt by a calibration, and how it names the type of one
_DEALT = "auto"
_LAYER_TYPE = re.compile(r"([kv])(0|[1-9][0-9]{0,3})=(\w+)")
_LAYER_ENTRY = re.compile(r"[kv][0-9]+=", re.IGNORECASE)
_MAX_TIERS = 4
_MAX_TOKENS = 2**30

_PRESETS = {
    "f16": "f16",
    "bf16": "bf16",
    "q8_0": "q8_0",
    "q4_0": "q4_0",
    "q4_ve": "q4_ve",
    "q2_t": "q2_t",
    "ultra4": "f16:128+q4_ve@auto",
    "ultra2": "f16:128+q4_ve@auto:16384+q2_t@auto",
}
DEFAULT_PRESET = "ultra4"
DEFAULT_SINKS = 4
# room for new tokens, a part of the context: it is kept in the first tier's type
_STAGING_SHARE = 32
_MIN_MICRO_BATCH, _MAX_MICRO_BATCH = 64, 512


@dataclass(frozen=True)
class LayerTypes:
    """The types of a layer."""

    layer: int
    type_k: str
    type_v: str


@dataclass(frozen=True)
class Tier:
    """Tokens of one age: the types of K and V, and how many tokens of a sequence; None is all that are left.

    ``layers`` are those of other types. ``dealt``: a calibration is to say which, by how sensitive they are.
    """

    type_k: str
    type_v: str
    n_tokens: int | None = None
    layers: tuple[LayerTypes, ...] = ()
    dealt: bool = False

    def bits_per_element(self) -> float:
        """Bits per element of K and V together, scales included, without the layers of other types."""
        return (KV_TYPE_BITS[self.type_k] + KV_TYPE_BITS[self.type_v]) / 2

    def types_of_layers(self) -> dict[str, str]:
        """Types that differ from the tier's: {"k7": "q8_0"} for the keys of layer 7."""
        keys = {f"k{layer.layer}": layer.type_k for layer in self.layers if layer.type_k != self.type_k}
        return keys | {f"v{layer.layer}": layer.type_v for layer in self.layers if layer.type_v != self.type_v}

    def type_of(self, part: str) -> str:
        """The type of a layer's keys or values: of "k7", the keys of layer 7."""
        return self.types_of_layers().get(part, self.type_k if part[0] == "k" else self.type_v)

    def types(self) -> set[str]:
        """All types in it."""
        return {self.type_k, self.type_v}.union(*({layer.type_k, layer.type_v} for layer in self.layers))

    def __str__(self) -> str:
        text = self.type_k if self.type_k == self.type_v else f"{self.type_k}/{self.type_v}"
        own = [f"{part}={name}" for part, name in self.types_of_layers().items()]
        if own or self.dealt:
            text += "@" + ",".join(own or [_DEALT])
        return text if self.n_tokens is None else f"{text}:{self.n_tokens}"


_Entry = TypeVar("_Entry", Tier, LayerTypes)


@dataclass(frozen=True)
class KVConfig:
    """A KV cache format: its tiers, youngest tokens first. One tier is a cache of one type throughout.

    With several, the first ``n_sink`` tokens of a sequence never leave the first tier; its ``n_tokens`` is the window.
    """

    name: str
    tiers: tuple[Tier, ...]
    n_sink: int = DEFAULT_SINKS

    @property
    def is_tiered(self) -> bool:
        """Whether tokens change their type as they age."""
        return len(self.tiers) > 1

    @property
    def needs_flash_attention(self) -> bool:
        """Whether only flash attention can read the cache: V is quantized, or there are tiers."""
        return self.is_tiered or self.tiers[0].type_v not in _FLOAT_TYPES

    @property
    def uses_calibration(self) -> bool:
        """Whether a calibration makes a difference: a tier is of a type of our own, or has its types dealt."""
        return any(tier.dealt or tier.types() & set(OWN_TYPES) for tier in self.tiers)

    def takes_calibration(self, choice: str | os.PathLike[str] | None = None) -> bool:
        """Whether a load with this ``calibrate`` uses a calibration, which is made if need be; see ``Llama``."""
        return self.uses_calibration and calibration_choice(choice) != "never"

    @property
    def needs_calibration(self) -> bool:
        """Whether a tier is of a type that is for sorted keys only."""
        return any(tier.types() & set(_SPECTRAL_KEYS.values()) for tier in self.tiers)

    def with_spectral_keys(self) -> KVConfig:
        """The same with the spectral types for K."""

        def spectral(entry: _Entry) -> _Entry:
            return replace(entry, type_k=_SPECTRAL_KEYS.get(entry.type_k, entry.type_k))

        tiers = (replace(spectral(tier), layers=tuple(map(spectral, tier.layers))) for tier in self.tiers)
        return replace(self, tiers=tuple(tiers))

    def micro_batch(self, n_ctx: int) -> int:
        """Tokens to compute at once: fewer in short contexts with tiers, since they take room in the first tier."""
        if not self.is_tiered:
            return _MAX_MICRO_BATCH
        share = max(n_ctx // _STAGING_SHARE, 1)
        return min(_MAX_MICRO_BATCH, max(_MIN_MICRO_BATCH, 1 << (share.bit_length() - 1)))

    def __str__(self) -> str:
        return "+".join(map(str, self.tiers))


def calibration_choice(choice: str | os.PathLike[str] | None) -> str | os.PathLike[str]:
    """What ``Llama``'s argument ``calibrate`` means: itself, or for None what PYKVQ_CALIBRATE says."""
    return os.environ.get("PYKVQ_CALIBRATE") or "auto" if choice is None else choice


def kv_presets() -> dict[str, KVConfig]:
    """All presets by name."""
    return {name: KVConfig(name, _parse_tiers(tiers)) for name, tiers in _PRESETS.items()}


def parse_kv_config(
    value: str | KVConfig,
    *,
    type_k: str | int | None = None,
    type_v: str | int | None = None,
    n_sink: int = DEFAULT_SINKS,
) -> KVConfig:
    """The format that ``value`` names.

    Args:
        value: a KVConfig, a preset, or tiers such as "f16:128+q8_0:2048+q4_ve" or "q8_0/q4_ve" (K and V apart).
        type_k, type_v: if given, a cache without tiers, of these types; the one left out is like the other.
        n_sink: first tokens of a sequence that stay in the first tier.

    Raises:
        InvalidArgumentError: an unknown name or a list of tiers that makes no sense; the message lists the valid ones.
    """
    if type_k is not None or type_v is not None:
        key, value_type = (type_v if type_k is None else type_k), (type_k if type_v is None else type_v)
        tier = Tier(_checked_type(key, "type_k"), _checked_type(value_type, "type_v"))
        return KVConfig(str(tier), (tier,))
    if isinstance(value, KVConfig):
        _check_tiers(str(value), value.tiers)
        return value
    if not isinstance(value, str):
        raise InvalidArgumentError(f"kv_quant must be a name such as {DEFAULT_PRESET!r}, got {value!r}")
    require_type("n_sink", n_sink, int)
    if not 0 <= n_sink <= _MAX_TOKENS:
        raise InvalidArgumentError(f"n_sink must be between 0 and {_MAX_TOKENS} tokens, got {n_sink}")
    name = value.strip().lower()
    return KVConfig(name, _parse_tiers(_PRESETS.get(name, name), value), n_sink)


def parse_kv_configs(values: str | KVConfig | Iterable[str | KVConfig]) -> list[KVConfig]:
    """The formats that a list of names and KVConfigs means, or a single one.

    Raises:
        InvalidArgumentError: as ``parse_kv_config``, or it is no list.
    """
    if isinstance(values, (str, KVConfig)):
        return [parse_kv_config(values)]
    require_type("kv", values, Iterable)
    return [parse_kv_config(value) for value in values]


def split_kv_formats(text: str) -> list[str]:
    """The formats of "A,B,...", the form of ``--kv``; types of layers stay together: "A@k3=q8_0,v3=q8_0,B" has two."""
    formats: list[str] = []
    for part in filter(None, map(str.strip, text.split(","))):
        if formats and _LAYER_ENTRY.match(part):
            formats[-1] += f",{part}"
        else:
            formats.append(part)
    return formats


def _parse_tiers(text: str, asked: str | None = None) -> tuple[Tier, ...]:
    tiers = tuple(_parse_tier(part, text if asked is None else asked) for part in text.split("+"))
    _check_tiers(text, tiers)
    return tiers


def _parse_tier(part: str, asked: str) -> Tier:
    head, colon, count = part.partition(":")
    types, at, own = head.partition("@")
    type_k, slash, type_v = types.partition("/")
    if type_k not in KV_TYPE_BITS or (slash and type_v not in KV_TYPE_BITS):
        raise InvalidArgumentError(
            f"unknown KV format {asked!r}: use one of {', '.join(_PRESETS)}, or tiers TYPE[/VTYPE][:TOKENS]+... "
            f"with types {', '.join(KV_TYPE_BITS)}"
        )
    if colon and not (count.isascii() and count.isdigit() and int(count) <= _MAX_TOKENS):
        raise InvalidArgumentError(f"KV tier {part!r}: {count!r} is not a number of tokens from 0 to {_MAX_TOKENS}")
    tier = Tier(type_k, type_v if slash else type_k, int(count) if colon else None)
    if own == _DEALT:
        return replace(tier, dealt=True)
    return replace(tier, layers=_parse_layers(own, tier, part)) if at else tier


def _parse_layers(text: str, tier: Tier, part: str) -> tuple[LayerTypes, ...]:
    """Of "k7=q8_0,v3=q4_ve", the types of layers 3 and 7."""
    layers: dict[int, LayerTypes] = {}
    seen: set[str] = set()
    for entry in text.split(","):
        match = _LAYER_TYPE.fullmatch(entry)
        if match is None or match[3] not in KV_TYPE_BITS:
            raise InvalidArgumentError(
                f"KV tier {part!r}: {entry!r} is no type of a layer: write k7=q8_0 for the keys of layer 7, v7=q8_0 "
                f"for its values, or @{_DEALT}"
            )
        name = match[1] + match[2]
        if name in seen:
            raise InvalidArgumentError(f"KV tier {part!r} has two types for {name}: give one")
        seen.add(name)
        layer = layers.get(int(match[2]), LayerTypes(int(match[2]), tier.type_k, tier.type_v))
        is_key = match[1] == "k"
        layers[layer.layer] = replace(layer, type_k=match[3]) if is_key else replace(layer, type_v=match[3])
    return tuple(layers[i] for i in sorted(layers))


def _check_tiers(text: str, tiers: tuple[Tier, ...]) -> None:
    if not 1 <= len(tiers) <= _MAX_TIERS:
        raise InvalidArgumentError(f"KV format {text!r} has {len(tiers)} tiers: give 1 to {_MAX_TIERS}")
    for tier in tiers:
        _check_tier(text, tier)
    if tiers[-1].n_tokens is not None:
        raise InvalidArgumentError(
            f"KV format {text!r}: the last tier takes all tokens that are left, so leave :{tiers[-1].n_tokens} away"
            + (", or add a tier" if len(tiers) == 1 else "")
        )
    for older, younger in zip(tiers[1:], tiers, strict=False):
        if younger.n_tokens is None or (younger.n_tokens == 0 and younger is not tiers[0]):
            raise InvalidArgumentError(f"KV tier '{younger}' of {text!r} needs a number of tokens, as in f16:128+q4_ve")
        if older.bits_per_element() > younger.bits_per_element():
            raise InvalidArgumentError(
                f"KV tier '{older}' of {text!r} is larger than '{younger}' before it: list tiers from large to small"
            )
        _check_layers(text, older, younger)
    if tiers[0].layers or tiers[0].dealt:
        what = f"write f16:128+{tiers[0]}" if len(tiers) == 1 else "leave what follows @ away"
        raise InvalidArgumentError(
            f"KV tier '{tiers[0]}' of {text!r}: the first tier is of the same types in all layers, {what}"
        )
    if len(tiers) > 1 and not {tiers[0].type_k, tiers[0].type_v} <= set(_WINDOW_TYPES):
        raise InvalidArgumentError(
            f"KV tier '{tiers[0]}' of {text!r} holds the newest tokens: it must be of {' or '.join(_WINDOW_TYPES)}"
        )


def _check_tier(text: str, tier: Tier) -> None:
    """Refuses what only a Tier made by hand can have."""
    for name in (tier.type_k, tier.type_v, *itertools.chain(*((own.type_k, own.type_v) for own in tier.layers))):
        if not isinstance(name, str) or name not in KV_TYPE_BITS:
            raise InvalidArgumentError(
                f"{name!r} in the KV format {text!r} is not a KV type: use one of {', '.join(KV_TYPE_BITS)}"
            )
    if tier.layers and tier.dealt:
        raise InvalidArgumentError(
            f"KV tier '{tier}' of {text!r} has types of layers and dealt=True, which chooses them: give one of the two"
        )
    layers = [own.layer for own in tier.layers]
    twice = next((layer for layer in layers if layers.count(layer) > 1), None)
    if twice is not None:
        raise InvalidArgumentError(f"KV tier '{tier}' of {text!r} has layer {twice} more than once: give it once")


def _check_layers(text: str, older: Tier, younger: Tier) -> None:
    """Refuses layers whose types grow with age."""
    for part in [*older.types_of_layers(), *younger.types_of_layers()]:
        old, young = older.type_of(part), younger.type_of(part)
        if KV_TYPE_BITS[old] > KV_TYPE_BITS[young]:
            raise InvalidArgumentError(
                f"{part} of {text!r} is {old} in tier '{older}', larger than {young} in '{younger}' before it: list "
                "types from large to small"
            )


def _checked_type(name: object, argument: str) -> str:
    if isinstance(name, Integral) and int(name) in _GGML_TYPES:  # as llama-cpp-python has it
        return _GGML_TYPES[int(name)]
    if not isinstance(name, str) or name.lower() not in KV_TYPE_BITS:
        raise InvalidArgumentError(f"{argument}={name!r} is not a KV type: use one of {', '.join(KV_TYPE_BITS)}")
    return name.lower()
