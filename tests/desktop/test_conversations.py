"""The desktop app's storage: branches, search, undo, and what happens to an answer that was cut off."""

import time

import pytest

from desktop.running import add_a_thousand_conversations
from pykvq.desktop.conversations import NEW_TITLE, Attachment, Conversations
from pykvq.desktop.database import Database
from pykvq.desktop.records import Records
from pykvq.errors import StorageError


@pytest.fixture
def database(tmp_path):
    database = Database(tmp_path)
    yield database
    database.close()


@pytest.fixture
def chats(database):
    return Conversations(database)


def texts(messages):
    return [message.content for message in messages]


def two_turns(chats):
    chat = chats.create()
    last = None
    for role, text in (("user", "one"), ("assistant", "two"), ("user", "three"), ("assistant", "four")):
        last = chats.add(chat.id, role, text, parent=last and last.id)
    return chat.id


def test_a_conversation_takes_its_title_from_the_first_message(chats):
    chat = chats.create()
    assert chat.title == NEW_TITLE
    chats.add(chat.id, "user", "  Why is\nthe sky blue? " + "x" * 100, parent=None)
    title = chats.get(chat.id).title
    assert title.startswith("Why is the sky blue? xx")
    assert len(title) <= 60


def test_editing_the_first_message_makes_a_branch_and_keeps_the_other(chats):
    chat = two_turns(chats)
    first = chats.branch(chat)[0]
    edited = chats.add(chat, "user", "ONE", parent=first.parent)
    chats.add(chat, "assistant", "TWO", parent=edited.id)
    assert texts(chats.branch(chat)) == ["ONE", "TWO"]
    assert chats.branch(chat)[0].siblings == (first.id, edited.id)
    chats.show(first.id)
    assert texts(chats.branch(chat)) == ["one", "two", "three", "four"]
    chats.show(edited.id)
    assert texts(chats.branch(chat)) == ["ONE", "TWO"]


def test_first_messages_of_other_conversations_are_no_siblings(chats):
    first, second = two_turns(chats), two_turns(chats)
    assert len(chats.branch(first)[0].siblings) == 1
    assert len(chats.branch(second)[0].siblings) == 1


def test_delete_and_undo(chats):
    chat = two_turns(chats)
    chats.delete(chat)
    assert chats.listed() == []
    with pytest.raises(StorageError, match="does not exist"):
        chats.get(chat)
    with pytest.raises(StorageError, match="does not exist"):
        chats.add(chat, "user", "more", parent=None)
    chats.restore(chat)
    assert texts(chats.branch(chat)) == ["one", "two", "three", "four"]
    chats.delete(chat)
    chats.purge(older_than=-1)
    assert chats.tree(chat) == []


def test_a_copy_has_all_branches_and_is_independent(chats):
    chat = two_turns(chats)
    first = chats.branch(chat)[0]
    chats.add(chat, "user", "ONE", parent=None, attachments=[Attachment("a.txt", "text")])
    copy = chats.duplicate(chat)
    assert copy.title.endswith("(copy)")
    assert texts(chats.tree(copy.id)) == texts(chats.tree(chat))
    assert chats.branch(copy.id)[0].attachments == (Attachment("a.txt", "text"),)
    chats.delete(chat)
    chats.purge(older_than=-1)
    assert len(chats.tree(copy.id)) == 5
    assert first.id not in [message.id for message in chats.tree(copy.id)]


@pytest.mark.parametrize("search", ["hre", "THREE", "th", 'say "hi"', "%", "50%_", "日本語", "日本"])
def test_search_finds_parts_of_words_and_any_characters(chats, search):
    chat = chats.create("a title")
    chats.add(chat.id, "user", 'three: say "hi" 50%_off 日本語です', parent=None)
    chats.create("unlike")
    assert [found.id for found in chats.listed(search)] == [chat.id]
    assert chats.listed("no such words") == []


def test_search_finds_titles(chats):
    chat = chats.create("Plans for Rome")
    assert [found.id for found in chats.listed("rome")] == [chat.id]


def test_an_answer_is_found_once_it_has_ended_and_interrupted_ones_end_at_the_next_start(chats, database, tmp_path):
    chat = chats.create()
    question = chats.add(chat.id, "user", "question", parent=None)
    answer = chats.add(chat.id, "assistant", "", parent=question.id, state="streaming")
    chats.write(answer.id, "partial elephant", "streaming", {"n_tokens": 2})
    assert chats.listed("elephant") == []
    database.close()
    again = Database(tmp_path)
    chats = Conversations(again)
    assert chats.end_interrupted() == 1
    partial = chats.message(answer.id)
    assert (partial.content, partial.state) == ("partial elephant", "stopped")
    assert partial.details == {"n_tokens": 2, "interrupted": True}
    assert [found.id for found in chats.listed("elephant")] == [chat.id]
    assert chats.end_interrupted() == 0
    again.close()


def test_fields_that_do_not_exist_are_refused(chats):
    with pytest.raises(TypeError, match="colour"):
        chats.update(chats.create().id, colour="red")


def test_settings_and_fidelity_runs_are_kept(database, tmp_path):
    records = Records(database)
    assert records.setting("dark") is None
    records.set("dark", True)
    assert records.setting("dark") is True
    model = tmp_path / "m.gguf"
    assert records.fidelity_rows(model) == {}
    records.add_fidelity(model, {"presets": [{"name": "q8_0", "kld": 1}, {"name": "f16", "kld": 0}]})
    records.add_fidelity(model, {"presets": [{"name": "q8_0", "kld": 2}]})
    assert {name: row["kld"] for name, row in records.fidelity_rows(model).items()} == {"q8_0": 2, "f16": 0}


def test_a_thousand_conversations_of_a_hundred_messages_are_listed_and_searched_quickly(chats, database):
    add_a_thousand_conversations(database)
    for search in ("", "chat 77", "word1999", "word", "wo", "zz", "nowhere at all"):
        started = time.perf_counter()
        found = chats.listed(search)
        seconds = time.perf_counter() - started
        print(f"{search!r}: {len(found)} found in {1000 * seconds:.1f} ms")
        assert seconds < 0.2, search
    started = time.perf_counter()
    assert len(chats.branch(500)) == 100
    assert time.perf_counter() - started < 0.2
