"""Names of KV cache formats: the presets, and the form TYPE[/VTYPE] that gives K and V apart."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pykvq.errors import InvalidArgumentError

# every type that the native library can store a KV cache in, largest first
KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl", "q4_ve", "q2_t")
_FLOAT_TYPES = ("f32", "f16", "bf16")

# preset -> (type of K, type of V)
_PRESETS = {
    "f16": ("f16", "f16"),
    "bf16": ("bf16", "bf16"),
    "q8_0": ("q8_0", "q8_0"),
    "q4_0": ("q4_0", "q4_0"),
    "q4_ve": ("q4_ve", "q4_ve"),
    "q2_t": ("q2_t", "q2_t"),
    "ultra4": ("q4_ve", "q4_ve"),
}
DEFAULT_PRESET = "ultra4"


@dataclass(frozen=True)
class KVConfig:
    """A KV cache format: the name it was asked for by, and the types of K and V."""

    name: str
    type_k: str
    type_v: str

    @property
    def needs_flash_attention(self) -> bool:
        """Whether V is quantized, which only flash attention can read."""
        return self.type_v not in _FLOAT_TYPES

    def bits_per_element(self) -> float:
        """Bits per element of K and V together, scales included, from the native block sizes."""
        return (_bits_per_element(self.type_k) + _bits_per_element(self.type_v)) / 2


def kv_presets() -> dict[str, KVConfig]:
    """All presets by name."""
    return {name: KVConfig(name, type_k, type_v) for name, (type_k, type_v) in _PRESETS.items()}


def parse_kv_config(text: str, *, type_k: str | None = None, type_v: str | None = None) -> KVConfig:
    """The format that ``text`` names: a preset, or TYPE[/VTYPE] such as "q8_0/q4_ve".

    Args:
        text: the name; upper and lower case are the same.
        type_k, type_v: types that replace those of ``text``.

    Raises:
        InvalidArgumentError: an unknown name (the message lists the valid ones), or a tier list.
    """
    if not isinstance(text, str):
        raise InvalidArgumentError(f"kv_quant must be a name such as {DEFAULT_PRESET!r}, got {text!r}")
    config = _parse(text)
    if type_k is not None:
        config = replace(config, type_k=_checked_type(type_k, "type_k"))
    if type_v is not None:
        config = replace(config, type_v=_checked_type(type_v, "type_v"))
    if type_k is not None or type_v is not None:
        config = replace(config, name=f"{config.type_k}/{config.type_v}")
    return config


def _parse(text: str) -> KVConfig:
    name = text.strip().lower()
    if "+" in name or ":" in name:
        raise InvalidArgumentError(
            f"KV format {text!r} is a tier list, which this version does not support: "
            f"use one of {', '.join(_PRESETS)}, or TYPE/VTYPE with types {', '.join(KV_TYPES)}"
        )
    if name in _PRESETS:
        return kv_presets()[name]
    type_k, separator, type_v = name.partition("/")
    if type_k not in KV_TYPES or (separator and type_v not in KV_TYPES):
        raise InvalidArgumentError(
            f"unknown KV format {text!r}: use one of {', '.join(_PRESETS)}, "
            f"or TYPE/VTYPE (K and V apart) with types {', '.join(KV_TYPES)}"
        )
    return KVConfig(name, type_k, type_v if separator else type_k)


def _checked_type(name: str, argument: str) -> str:
    if not isinstance(name, str) or name.lower() not in KV_TYPES:
        raise InvalidArgumentError(f"{argument}={name!r} is not a KV type: use one of {', '.join(KV_TYPES)}")
    return name.lower()


def _bits_per_element(type_name: str) -> float:
    from pykvq import native  # loads the native library, which parsing a name does not need

    _, lib = native.load()
    raw_name = type_name.encode("ascii")
    bits = 8 * int(lib.pykvq_kv_type_block_bytes(raw_name))
    return bits / int(lib.pykvq_kv_type_block_size(raw_name))
