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
from pykvq.files import temporary_beside, written_at_once

FORMAT = 3
# what is hashed of a model file: its start, where the metadata is, its size, and windows spread over the weights
_HASH_HEAD = 1 << 20
_HASH_WINDOW = 1 << 16
_HASH_WINDOWS = 64
# in the place of the file's own hash while that is computed
_NO_CHECKSUM = "0" * 64
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
        if _checksum(path, str(values["kvq.checksum"])) != values["kvq.checksum"]:
            raise ValueError("its checksum is wrong")
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
    except CalibrationError:
        raise
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


def _checksum(path: Path, found: str) -> str:
    """The SHA-256 of the file as it was before its checksum was put in."""
    return hashlib.sha256(path.read_bytes().replace(found.encode(), _NO_CHECKSUM.encode(), 1)).hexdigest()


def writable(paths: Sequence[Path]) -> Path:
    """The first of ``paths`` whose folder takes a file; found out before anything is computed.

    Raises:
        CalibrationError: none of them is writable.
    """
    reasons = []
    for path in paths:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists() and not path.is_file():
                raise ModelFileError(f"'{path}' exists and is no file")
            with temporary_beside(path):
                return path
        except (OSError, ModelFileError) as error:
            reasons.append(str(error))
    raise CalibrationError(f"cannot write the calibration ({'; '.join(reasons)}): give a path with --output")


def write(path: Path, layers: Sequence[LayerTransform], header: Mapping[str, str | int | bool]) -> None:
    """Writes a calibration, all at once.

    Raises:
        CalibrationError: it cannot be written.
    """
    try:
        with written_at_once(path) as temporary:
            _write(temporary, layers, {**header, "checksum": _NO_CHECKSUM})
            data = temporary.read_bytes()
            checksum = hashlib.sha256(data).hexdigest()
            temporary.write_bytes(data.replace(_NO_CHECKSUM.encode(), checksum.encode(), 1))
    except (OSError, ModelFileError) as error:
        raise CalibrationError(f"cannot write the calibration ({error}): give a path with --output") from error


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
