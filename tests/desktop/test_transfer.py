"""Export, import and attachments."""

import io
import json
import time
import zlib

import pytest

from pykvq.desktop.attachments import MAX_BYTES, read_attachment, with_attachments
from pykvq.desktop.conversations import Attachment, Conversations
from pykvq.desktop.database import Database
from pykvq.desktop.transfer import from_json, to_json, to_markdown
from pykvq.errors import ChatFileError, InvalidArgumentError, StorageError


@pytest.fixture
def chats(tmp_path):
    database = Database(tmp_path)
    yield Conversations(database)
    database.close()


@pytest.fixture
def chat(chats):
    chat = chats.create(system_prompt="Be brief.", folder="Work", sampling={"temperature": 0})
    one = chats.add(chat.id, "user", "one", parent=None, attachments=[Attachment("a.txt", "text of a")])
    chats.add(chat.id, "assistant", "two", parent=one.id, details={"n_tokens": 1})
    chats.add(chat.id, "assistant", "zwei", parent=one.id)
    return chats.get(chat.id)


def test_json_brings_everything_back(chats, chat):
    copy = from_json(chats, to_json(chat, chats.tree(chat.id)))
    assert copy.id != chat.id
    for name in ("title", "folder", "system_prompt", "sampling"):
        assert getattr(copy, name) == getattr(chat, name)
    assert [(m.role, m.content, m.details, m.attachments) for m in chats.tree(copy.id)] == [
        (m.role, m.content, m.details, m.attachments) for m in chats.tree(chat.id)
    ]
    assert [m.content for m in chats.branch(copy.id)] == ["one", "zwei"]


def test_markdown_has_the_branch_that_is_shown(chats, chat):
    text = to_markdown(chat, chats.branch(chat.id))
    assert text == "# one\n\n## System\n\nBe brief.\n\n## You\n\none\n\n*Attached: a.txt*\n\n## Model\n\nzwei\n"


def test_files_that_are_no_conversations_are_refused_and_nothing_is_stored(chats, chat):
    good = json.loads(to_json(chat, chats.tree(chat.id)))
    wrong = [b"", b"[]", b"{}", b"\xff", b"[" * 100_000, json.dumps({**good, "version": 2})]
    wrong += [json.dumps({**good, name: value}) for name, value in (("head", 99), ("title", 1), ("sampling", []))]
    wrong += [json.dumps({**good, "sampling": value}) for value in ({"top_k": "x"}, {"top_p": float("nan")})]
    for change in (
        {"parent": 77},
        {"role": "system"},
        {"state": "odd"},
        {"content": None},
        {"id": "x"},
        {"details": 1},
        {"details": {"n_tokens": 10**30}},
        {"attachments": [{"name": 1, "content": "a"}]},
    ):
        wrong.append(json.dumps({**good, "messages": [{**good["messages"][0], **change}, *good["messages"][1:]]}))
    for name in ("messages", "head", "sampling", "title"):
        wrong.append(json.dumps({key: value for key, value in good.items() if key != name}))
    for data in wrong:
        with pytest.raises(ChatFileError, match=r"choose a \.json file"):
            from_json(chats, data)
    assert chats.count() == 1


def test_an_import_keeps_only_what_the_pages_can_show(chats, chat):
    data = json.loads(to_json(chat, chats.tree(chat.id)))
    data["sampling"] = {"temperature": 7, "stream": False, "model": "other", "messages": []}
    data["messages"][1]["details"] = {"n_tokens": "many", "model": "m", "first_token_seconds": 0.5, "html": "<b>"}
    data["messages"][2]["state"] = "streaming"
    data["messages"][0]["content"] = data["title"] = "half a character: \ud83d"
    copy = from_json(chats, json.dumps(data))
    assert copy.sampling == {"temperature": 2.0}
    messages = chats.tree(copy.id)
    assert messages[1].details == {"model": "m", "first_token_seconds": 0.5}
    assert messages[2].state == "stopped"
    assert messages[0].content == copy.title == "half a character: ?"


def test_an_import_that_the_disk_does_not_take_leaves_nothing(chats, chat):
    text = to_json(chat, chats.tree(chat.id))
    pages = chats._database.row("PRAGMA page_count")[0]
    chats._database.rows(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(StorageError, match="full"):
        from_json(chats, text.replace("zwei", "zwei" * 50_000))
    assert chats.count() == 1


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "C:\\x.txt", "a\0b"])
def test_names_in_an_import_stay_texts(chats, chat, tmp_path, name):
    before = set(tmp_path.rglob("*"))
    data = json.loads(to_json(chat, chats.tree(chat.id)))
    data["title"] = data["folder"] = data["messages"][0]["attachments"][0]["name"] = name
    copy = from_json(chats, json.dumps(data))
    assert (copy.title, copy.folder) == (name, name)
    assert set(tmp_path.rglob("*")) == before


def test_texts_are_attached():
    attached = read_attachment("a.txt", "\ufeffÄ text".encode())
    assert attached == Attachment("a.txt", "Ä text")
    assert with_attachments("question", [attached]) == "File a.txt:\n\nÄ text\n\n---\n\nquestion"
    assert with_attachments("question", []) == "question"


def pdf_with(text):
    stream = b"BT /F1 24 Tf 72 720 Td (%s) Tj ET" % text.encode()
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R"
        b" /Resources << /Font << /F1 << /Type /Font /Subtype /Type1 /BaseFont /Helvetica >> >> >> >>",
        b"<< /Length %d >>\nstream\n%s\nendstream" % (len(stream), stream),
    ]
    data, offsets = b"%PDF-1.4\n", []
    for i, body in enumerate(objects):
        offsets.append(len(data))
        data += b"%d 0 obj\n%s\nendobj\n" % (i + 1, body)
    rows = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    trailer = b"trailer << /Root 1 0 R /Size 5 >>\nstartxref\n%d\n%%%%EOF\n" % len(data)
    return data + b"xref\n0 5\n0000000000 65535 f \n" + rows + trailer


def test_a_pdf_is_attached():
    pytest.importorskip("pypdf")
    assert read_attachment("a.pdf", pdf_with("Hello from a PDF")).content.strip() == "Hello from a PDF"


def written(n_pages=1, **encryption):
    """A PDF from pypdf with blank pages."""
    writer = pytest.importorskip("pypdf").PdfWriter(io.BytesIO(pdf_with("Hello from a PDF")))
    for _ in range(n_pages - 1):
        writer.add_blank_page(width=10, height=10)
    if encryption:
        writer.encrypt(**encryption)
    output = io.BytesIO()
    writer.write(output)
    return output.getvalue()


@pytest.mark.parametrize("algorithm", ["RC4-128", "AES-256"])
def test_a_pdf_with_a_password_is_named_and_one_with_mere_restrictions_is_read(algorithm):
    with pytest.raises(InvalidArgumentError, match="locked with a password"):
        read_attachment("a.pdf", written(user_password="secret", algorithm=algorithm))
    open_to_all = written(user_password="", owner_password="secret", algorithm=algorithm)
    assert "Hello from a PDF" in read_attachment("a.pdf", open_to_all).content


def test_a_pdf_with_too_many_pages_or_too_much_text_or_work_is_refused(monkeypatch):
    pytest.importorskip("pypdf")
    with pytest.raises(InvalidArgumentError, match="2,001 pages: attach at most 2,000"):
        read_attachment("a.pdf", written(n_pages=2001))
    monkeypatch.setattr("pykvq.desktop.attachments._MAX_SECONDS", 0)
    with pytest.raises(InvalidArgumentError, match=r"longer than 0 s to read \(1 of 1 pages\)"):
        read_attachment("a.pdf", pdf_with("Hello"))
    monkeypatch.setattr("pykvq.desktop.attachments._MAX_CHARACTERS", 4)
    with pytest.raises(InvalidArgumentError, match="more than 4 characters on its first 1 pages"):
        read_attachment("a.pdf", pdf_with("Hello"))


def test_a_pdf_that_unpacks_to_gigabytes_is_refused_soon():
    pytest.importorskip("pypdf")
    packed = zlib.compress(zlib.compress(bytes(1 << 30), 1), 9)
    data = pdf_with("x").replace(b"<< /Length", b"<< /Filter [/FlateDecode /FlateDecode] /Length")
    start, end = data.index(b"stream\n") + 7, data.index(b"\nendstream")
    started = time.monotonic()
    with pytest.raises(InvalidArgumentError):
        read_attachment("bomb.pdf", data[:start] + packed + data[end:])
    assert time.monotonic() - started < 20


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\x89PNG\xff", "neither text"),
        (b"a\0b", "binary"),
        (b"  \n", "no text"),
        (b"%PDF-1.4 rubbish", "PDF"),
        (b"x" * (MAX_BYTES + 1), "at most 8 MiB"),
        (b"x" * 2_000_001, "2,000,001 characters"),
    ],
)
def test_other_files_are_refused(data, text):
    with pytest.raises(InvalidArgumentError, match=text):
        read_attachment("file", data)
