"""Reading what a calibration needs of a model file."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from tiny_models import TinyModel

from pykvq.calibration.weights import read_tensors


@pytest.mark.parametrize("tensors_per_file", [0, 4])
def test_tensors_behind_a_vocabulary_are_as_in_the_file(tmp_path: Path, tensors_per_file: int) -> None:
    model = TinyModel(arch="llama", window=64)
    path = model.write(tmp_path / "tiny.gguf", tensors_per_file)
    kinds = {
        (field.types[0], field.types[-1]) for field in gguf.GGUFReader(path).fields.values() if len(field.types) > 1
    }
    assert {(gguf.GGUFValueType.ARRAY, gguf.GGUFValueType[kind]) for kind in ("STRING", "FLOAT32", "INT32")} <= kinds

    tensors = read_tensors(path)

    weights = model.weights()
    assert tensors.keys() == weights.keys()
    for name, values in weights.items():
        expected = values.astype(np.float16) if model.f16 and values.ndim == 2 else values
        np.testing.assert_array_equal(tensors[name].data, expected)
