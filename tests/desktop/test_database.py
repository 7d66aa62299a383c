"""The desktop app's database file: checks at the start, migrations, and readable errors."""

import os
import shutil
import sqlite3
import subprocess

import pytest

from pykvq.desktop.conversations import Conversations
from pykvq.desktop.database import FILE_NAME, Database
from pykvq.desktop.schema import MIGRATIONS
from pykvq.errors import StorageError


def test_a_new_database_is_in_wal_mode_with_foreign_keys_and_private(tmp_path):
    database = Database(tmp_path / "new" / "folder")
    assert database.row("PRAGMA journal_mode")[0] == "wal"
    assert database.row("PRAGMA foreign_keys")[0] == 1
    assert database.row("PRAGMA user_version")[0] == len(MIGRATIONS)
    if os.name == "posix":
        assert (tmp_path / "new" / "folder").stat().st_mode & 0o77 == 0
    database.close()
    database.close()
    with pytest.raises(StorageError, match="closed"):
        database.rows("SELECT 1")


def test_a_migration_is_preceded_by_a_backup(tmp_path):
    first = Database(tmp_path)
    chat = Conversations(first).create("kept")
    first.close()
    second = Database(tmp_path, (*MIGRATIONS, "CREATE TABLE more (id INTEGER PRIMARY KEY);"))
    assert second.row("SELECT count(*) FROM more")[0] == 0
    assert Conversations(second).get(chat.id).title == "kept"
    second.close()
    (backup,) = tmp_path.glob("pykvq-v1-*.sqlite")
    assert sqlite3.connect(backup).execute("SELECT title FROM conversation").fetchone() == ("kept",)


def test_a_migration_that_fails_changes_nothing(tmp_path):
    Database(tmp_path).close()
    with pytest.raises(StorageError, match="no such table"):
        Database(tmp_path, (*MIGRATIONS, "CREATE TABLE half (id); INSERT INTO missing VALUES (1);"))
    database = Database(tmp_path)
    assert database.row("PRAGMA user_version")[0] == 1
    assert database.row("SELECT count(*) FROM sqlite_master WHERE name = 'half'")[0] == 0
    database.close()


def test_a_newer_database_is_refused(tmp_path):
    Database(tmp_path, (*MIGRATIONS, "SELECT 1;")).close()
    with pytest.raises(StorageError, match="newer pykvq"):
        Database(tmp_path)


@pytest.mark.parametrize("damage", ["text", "middle"])
def test_a_damaged_database_is_named(tmp_path, damage):
    database = Database(tmp_path)
    chats = Conversations(database)
    for i in range(200):
        chats.create(f"chat {i} " + "x" * 500)
    database.close()
    path = tmp_path / FILE_NAME
    data = bytearray(path.read_bytes())
    if damage == "text":
        data = bytearray(b"this is no database, but a text of some length" * 100)
    else:
        data[4096:-4096] = os.urandom(len(data) - 8192)
    path.write_bytes(data)
    with pytest.raises(StorageError, match="damaged"):
        Database(tmp_path)


def test_a_full_disk_is_told_and_loses_nothing(tmp_path):
    database = Database(tmp_path)
    chats = Conversations(database)
    chat = chats.create()
    with database.transaction() as connection:
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
    database.rows(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(StorageError, match="the disk is full; free some space"):
        chats.add(chat.id, "user", "x" * 100_000, parent=None)
    assert chats.branch(chat.id) == []
    database.rows("PRAGMA max_page_count = 1000000")
    chats.add(chat.id, "user", "x" * 100_000, parent=None)
    database.close()


def test_an_old_sqlite_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr("sqlite3.sqlite_version_info", (3, 33, 0))
    monkeypatch.setattr("sqlite3.sqlite_version", "3.33.0")
    with pytest.raises(StorageError, match=r"need SQLite 3\.34\.0 or newer, .* has 3\.33\.0: use a newer Python"):
        Database(tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_a_folder_that_is_in_use_is_told(tmp_path):
    first = Database(tmp_path)
    with pytest.raises(StorageError, match="in use by another pykvq-desktop: use its window"):
        Database(tmp_path)
    first.close()
    Database(tmp_path).close()


@pytest.fixture
def small_disk(tmp_path):
    """A file system of a megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("needs to mount a file system")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_disk_that_is_really_full_or_read_only_is_told_and_loses_nothing(small_disk):
    database = Database(small_disk)
    chats = Conversations(database)
    chat, last = chats.create(), None
    try:
        for _ in range(100):
            last = chats.add(chat.id, "user", "x" * 50_000, parent=last and last.id)
    except StorageError as error:
        assert "the disk is full; free some space" in str(error)  # noqa: PT017
    kept = len(chats.branch(chat.id))
    assert 0 < kept < 100
    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
    chats.add(chat.id, "user", "x" * 50_000, parent=last.id)
    database.close()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(StorageError, match=r"Read-only file system.*--data-dir"):
        Database(small_disk)
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    database = Database(small_disk)
    assert len(Conversations(database).branch(chat.id)) == kept + 1
    database.close()


def test_a_disk_that_is_full_at_the_start_is_told(small_disk):
    (small_disk / "filler").write_bytes(bytes((1 << 20) - 4096))
    with pytest.raises(StorageError, match=r"full|No space left"):
        Database(small_disk)


@pytest.fixture
def not_root():
    """Root may write anywhere."""
    if os.name != "posix":
        pytest.skip("needs POSIX permissions")
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    yield
    if is_root:
        os.seteuid(0)


def test_a_folder_that_cannot_be_written_is_told(tmp_path, not_root):
    with pytest.raises(StorageError, match="--data-dir"):
        Database(tmp_path / "below")


def test_a_folder_that_is_a_file_is_told(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="--data-dir"):
        Database(tmp_path / "file" / "data")
