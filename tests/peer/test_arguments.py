"""Every argument of llama_cpp.Llama is there, or is refused by name; and the migration page says so."""

import importlib.util
import inspect
import json

import pytest
from argument_table import HERE, peer_methods, table, written_table

from pykvq import Llama, UnsupportedArgumentError, peer_arguments


def test_the_migration_page_lists_every_argument():
    assert written_table() == table(), "run python tests/peer/argument_table.py"


@pytest.mark.parametrize("method", peer_methods())
def test_arguments_are_in_the_peers_order(method):
    """So that calls with positional arguments mean the same."""
    parameters = inspect.signature(getattr(Llama, method)).parameters.values()
    own = [each.name for each in parameters if each.kind == each.POSITIONAL_OR_KEYWORD]
    both = [name for name in peer_methods()[method] if name in own]
    assert [name for name in own if name in both] == both


def test_the_peers_public_names_are_there_or_listed():
    names = set(json.loads((HERE / "signatures.json").read_text())["names"])
    missing = {name for name in names if not hasattr(Llama, name)}
    assert missing == {"ctx", "model", "eval_logits", "tokenizer"}


@pytest.mark.parametrize(
    ("method", "name"), [(method, name) for method, names in peer_arguments.UNSUPPORTED.items() for name in names]
)
def test_unsupported_arguments_are_refused_unless_they_change_nothing(method, name):
    neutral, advice = peer_arguments.UNSUPPORTED[method][name]
    peer_arguments.refuse(method, {name: neutral})
    with pytest.raises(UnsupportedArgumentError, match=name) as caught:
        peer_arguments.refuse(method, {name: "something else"})
    assert advice in str(caught.value)
    assert repr(neutral) == peer_methods()[method][name]


@pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="llama_cpp is not installed")
def test_the_recorded_signatures_are_those_of_the_installed_peer(tmp_path):
    import record_signatures

    record_signatures.main(str(tmp_path / "now.json"))
    assert json.loads((tmp_path / "now.json").read_text()) == json.loads((HERE / "signatures.json").read_text())
