"""Sampling presets: those of the app and the user's own."""

import pytest

from pykvq.desktop.database import Database
from pykvq.desktop.records import Records
from pykvq.desktop.sampling import NO_PRESET, PRESETS, Presets, cleaned
from pykvq.errors import InvalidArgumentError

VALUES = {"temperature": 0.3, "top_k": 20}


@pytest.fixture
def presets(tmp_path):
    database = Database(tmp_path)
    yield Presets(Records(database))
    database.close()


def test_a_preset_is_kept_until_it_is_deleted(presets, tmp_path):
    assert presets.name_of(VALUES) == NO_PRESET
    assert presets.save("  My   own ", VALUES) == "My own"
    again = Presets(presets._records)
    assert list(again.all()) == [*PRESETS, "My own"]
    assert again.all()["My own"] == VALUES
    assert again.name_of({"temperature": 0.3, "top_k": 20.0, "top_p": None}) == "My own"
    assert again.is_own("My own")
    assert not again.is_own("Precise")
    again.save("My own", {"temperature": 0.4})
    assert again.all()["My own"] == {"temperature": 0.4}
    again.delete("My own")
    assert presets.all() == PRESETS


@pytest.mark.parametrize("name", ["", "  ", "x" * 61, "Precise", NO_PRESET])
def test_names_that_cannot_be_had_are_refused(presets, name):
    with pytest.raises(InvalidArgumentError, match="preset"):
        presets.save(name, VALUES)
    assert presets.all() == PRESETS


def test_values_are_brought_within_their_limits():
    assert cleaned({"temperature": 9, "top_k": -1.0, "max_tokens": 0, "seed": None, "model": "x"}) == {
        "temperature": 2.0,
        "top_k": 0,
        "max_tokens": 1,
    }
