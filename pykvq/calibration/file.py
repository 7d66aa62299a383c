"""Calibration files: where they are, which model each belongs to, reading and writing."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from pykvq.calibration.transforms import LayerTransform
from pykvq.catalog import cache_dir
from pykvq.errors import CalibrationError, ModelFileError
from pykvq.file_names import CALIBRATION_SUFFIX, calibration_path
from pykvq.files import written_at_once

FORMAT = 2
# what is hashed of a model file: its start, where the metadata is, its size, and windows spread over the weights
_HASH_HEAD = 1 << 20
_HASH_WINDOW = 1 << 16
_HASH_WINDOWS = 64
# what reading a damaged GGUF may raise
_READ_ERRORS = (OSError, ValueError, KeyError, IndexError, TypeError, UnicodeDecodeError, OverflowError)


@dataclass(frozen=True)
class LayerSensitivity:
    """How much an error in a layer's keys and values costs, see ``LayerTransform``; n_k, n_v: elements of a token."""

    layer: int
    k: float
    v: float
    n_k: int
    n_v: int


@dataclass(frozen=True)
class CalibrationInfo:
    """What a calibration file says of itself."""

    path: Path
    model_hash: str
    model_name: str
    spectral_keys: bool
    n_tokens: int
    n_positions: int
    text: str
    version: str
    sensitivity: tuple[LayerSensitivity, ...]  # of layers that see all tokens


def model_hash(path: str | os.PathLike[str]) -> str:
    """SHA-256 of a model file's size, its first MiB and 64 windows of 64 KiB spread over the rest.

    It tells models and quantizations apart without reading gigabytes at each load.
    """
    size = os.path.getsize(path)
    digest = hashlib.sha256(size.to_bytes(8, "little"))
    with open(path, "rb") as file:
        digest.update(file.read(_HASH_HEAD))
        for i in range(_HASH_WINDOWS):
            file.seek(max(0, size - _HASH_WINDOW) * (i + 1) // _HASH_WINDOWS)
            digest.update(file.read(_HASH_WINDOW))
    return digest.hexdigest()


def candidates(model_path: str | os.PathLike[str], hash_: str) -> list[Path]:
    """Where a model's calibration may be: beside it, and in the user's cache folder."""
    return [calibration_path(model_path), cache_dir() / "calibrations" / (hash_[:32] + CALIBRATION_SUFFIX)]


def read_info(path: Path, expected_hash: str | None = None) -> CalibrationInfo:
    """Reads and checks a file's header.

    Raises:
        CalibrationError: it is missing, damaged, of another format or (with ``expected_hash``) of another model.
    """
    if not path.is_file():
        raise CalibrationError(f"calibration not found: '{path}'; make one with pykvq-calibrate MODEL")
    try:
        reader = gguf.GGUFReader(path)
        values: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
        format_ = int(values["kvq.format"])
        if format_ != FORMAT:
            raise CalibrationError(
                f"the calibration '{path}' has format {format_} and this version reads format {FORMAT}: "
                "make a new one with pykvq-calibrate MODEL"
            )
        info = CalibrationInfo(
            path=path,
            model_hash=str(values["kvq.model_hash"]),
            model_name=str(values["kvq.model_name"]),
            spectral_keys=bool(values["kvq.spectral_keys"]),
            n_tokens=int(values["kvq.n_tokens"]),
            n_positions=int(values["kvq.n_positions"]),
            text=str(values["kvq.text"]),
            version=str(values["kvq.version"]),
            sensitivity=_sensitivity(reader, values),
        )
    except _READ_ERRORS as error:
        raise CalibrationError(
            f"the calibration '{path}' is damaged ({type(error).__name__}: {error}): "
            "make a new one with pykvq-calibrate MODEL"
        ) from error
    if expected_hash is not None and info.model_hash != expected_hash:
        raise CalibrationError(
            f"the calibration '{path}' is of another model ({info.model_name}): make one with pykvq-calibrate MODEL"
        )
    return info


def _sensitivity(reader: gguf.GGUFReader, values: Mapping[str, Any]) -> tuple[LayerSensitivity, ...]:
    sizes = {tensor.name: int(tensor.shape[0] * tensor.shape[2]) for tensor in reader.tensors if len(tensor.shape) == 3}
    layers = [int(name.split(".")[1]) for name in sizes if name.endswith(".k")]
    columns = [values[f"kvq.{name}"] for name in ("k_sensitivity", "v_sensitivity", "windowed")]
    if not layers or any(len(column) != len(layers) for column in columns):
        raise ValueError(f"{len(layers)} layers, and sensitivities of {', '.join(str(len(c)) for c in columns)}")
    return tuple(
        LayerSensitivity(layer, float(k), float(v), sizes[f"blk.{layer}.k"], sizes[f"blk.{layer}.v"])
        for layer, k, v, windowed in zip(layers, *columns, strict=True)
        if not windowed
    )


def write(paths: Sequence[Path], layers: Sequence[LayerTransform], header: Mapping[str, str | int | bool]) -> Path:
    """Writes a calibration to the first of ``paths`` whose folder takes it, all at once, and returns where.

    Raises:
        CalibrationError: none of them is writable.
    """
    reasons = []
    for path in paths:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with written_at_once(path) as temporary:
                _write(temporary, layers, header)
            return path
        except (OSError, ModelFileError) as error:
            reasons.append(str(error))
    raise CalibrationError(f"cannot write the calibration ({'; '.join(reasons)}): give a path with --output")


def _write(path: Path, layers: Sequence[LayerTransform], header: Mapping[str, str | int | bool]) -> None:
    writer = gguf.GGUFWriter(path, "kvq")
    writer.add_uint32("kvq.format", FORMAT)
    for name, value in header.items():
        if isinstance(value, bool):
            writer.add_bool(f"kvq.{name}", value)
        elif isinstance(value, int):
            writer.add_uint32(f"kvq.{name}", value)
        else:
            writer.add_string(f"kvq.{name}", value)
    for name in ("k_sensitivity", "v_sensitivity"):
        writer.add_array(f"kvq.{name}", [float(getattr(layer, name)) for layer in layers])
    writer.add_array("kvq.windowed", [layer.windowed for layer in layers])
    for layer in layers:
        for name in ("k", "q", "v", "out", "k_mean", "v_mean"):
            writer.add_tensor(f"blk.{layer.layer}.{name}", np.asarray(getattr(layer, name), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
