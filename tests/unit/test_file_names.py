"""How model files are named, and pieces of a text."""

from pathlib import Path

import pytest

from pykvq import ModelFileError
from pykvq.file_names import calibration_path, is_model, model_stem, part_paths
from pykvq.sample_text import sample_text, spread_starts

SPLIT = "models/m-00002-of-00003.gguf"


def test_the_parts_of_a_split_model_are_told_from_any_of_them():
    assert part_paths(SPLIT) == [Path(f"models/m-0000{i}-of-00003.gguf") for i in (1, 2, 3)]
    for whole in ("m.gguf", "m-00002-of-00003", "m-2-of-3.gguf"):
        assert part_paths(whole) == [Path(whole)]


@pytest.mark.parametrize("name", ["m-00000-of-00003.gguf", "m-00004-of-00003.gguf", "m-00001-of-99999.gguf"])
def test_an_impossible_part_is_refused(name):
    with pytest.raises(ModelFileError, match="is named as part"):
        part_paths(name)


def test_the_calibration_of_a_split_model_is_that_of_its_first_part():
    assert calibration_path("a/m.Q4_1.gguf") == Path("a/m.Q4_1.kvq.gguf")
    assert calibration_path(SPLIT) == Path("models/m-00001-of-00003.kvq.gguf")
    assert calibration_path("a/no_suffix") == Path("a/no_suffix.kvq.gguf")


def test_stems_have_no_number_of_a_part():
    assert [model_stem(name) for name in ("m.gguf", "m-00002-of-00003.gguf", "dir/m.v1")] == ["m", "m", "dir/m.v1"]


def test_what_is_no_model():
    assert is_model("m.gguf")
    assert not any(is_model(name) for name in ("m.kvq.gguf", "mmproj-m.gguf", ".m.gguf", "m.safetensors"))


def test_pieces_reach_from_the_start_to_the_end():
    assert spread_starts(100, 10, 4) == [0, 30, 60, 90]
    assert spread_starts(10, 10, 1) == [0]
    assert len(sample_text()) > 300_000
