"""Reading what a calibration needs of a model file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tiny_models import TinyModel

from pykvq.calibration.weights import Weight, read_tensors
from pykvq.gguf_header import TensorInfo


@pytest.mark.parametrize("tensors_per_file", [0, 4])
def test_tensors_are_read_as_they_were_written(tmp_path: Path, tensors_per_file: int) -> None:
    model = TinyModel(arch="llama", window=64)
    path = model.write(tmp_path / "tiny.gguf", tensors_per_file)

    tensors = read_tensors(path)

    weights = model.weights()
    assert tensors.keys() == weights.keys()
    for name, values in weights.items():
        expected = values.astype(np.float16) if model.f16 and values.ndim == 2 else values
        np.testing.assert_array_equal(tensors[name].read(), expected)


@pytest.mark.parametrize("type_name", ["q4_ve", "q2_0"])
def test_a_type_that_gguf_does_not_know(tmp_path: Path, type_name: str) -> None:
    with pytest.raises(NotImplementedError):
        Weight(tmp_path, TensorInfo("blk.0.attn_output.weight", (64, 2), type_name, 0, 64)).read()
