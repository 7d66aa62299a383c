"""The SQLite file of the desktop app: opened with checks, brought up to date, written in transactions."""

from __future__ import annotations

import sqlite3
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from pykvq.desktop.schema import MIGRATIONS
from pykvq.errors import StorageError

FILE_NAME = "pykvq.sqlite"
_BUSY_SECONDS = 5.0
# full-text search in parts of words came with it
_MIN_SQLITE = (3, 34, 0)


class Database:
    """The database in a folder, which is made if need be. One connection, which any thread may use.

    Args:
        migrations: SQL scripts, of which those that the file has not seen are run, after a backup.

    Raises:
        StorageError: the folder cannot be written, the disk is full, the file is damaged or of a newer version, or
            Python's SQLite is too old.
    """

    def __init__(self, folder: Path, migrations: Sequence[str] = MIGRATIONS) -> None:
        self.path = folder / FILE_NAME
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._in_use = FileLock(folder / "lock")
        _require_sqlite()
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._claim(folder)
            with self._readable():
                self._connection = sqlite3.connect(
                    self.path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
                )
                self._connection.row_factory = sqlite3.Row
                self._check()
                self._configure()
                self._migrate(migrations)
        except OSError as error:
            self.close()
            if isinstance(error, StorageError):
                raise
            raise StorageError(
                f"cannot use the data folder {folder} ({error.strerror}): check its permissions, or give another one "
                "with --data-dir"
            ) from error

    def rows(self, sql: str, *values: Any) -> list[sqlite3.Row]:
        """The rows of a query."""
        with self._lock, self._readable():
            return self._open.execute(sql, values).fetchall()

    def row(self, sql: str, *values: Any) -> sqlite3.Row | None:
        """The first row of a query."""
        found = self.rows(sql, *values)
        return found[0] if found else None

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """A connection to write with: all of the block is written, or nothing. Blocks may be nested."""
        with self._lock, self._readable():
            connection = self._open
            if connection.in_transaction:
                yield connection
                return
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:  # SQLite has rolled back itself where the disk is full
                    connection.execute("ROLLBACK")
                raise

    def close(self) -> None:
        """Closes the file; again does nothing."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None
            self._in_use.release()

    @property
    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            raise StorageError(f"{self.path} is closed")
        return self._connection

    def _claim(self, folder: Path) -> None:
        try:
            self._in_use.acquire(timeout=0)
        except Timeout as error:
            raise StorageError(
                f"the data folder {folder} is in use by another pykvq-desktop: use its window, or give another folder "
                "with --data-dir"
            ) from error

    def _check(self) -> None:
        problem = self._open.execute("PRAGMA quick_check(1)").fetchone()[0]
        if problem != "ok":
            raise sqlite3.DatabaseError(problem)

    def _configure(self) -> None:
        for setting in ("journal_mode = WAL", "synchronous = NORMAL", "foreign_keys = ON"):
            self._open.execute(f"PRAGMA {setting}")

    def _migrate(self, migrations: Sequence[str]) -> None:
        version = int(self._open.execute("PRAGMA user_version").fetchone()[0])
        if version > len(migrations):
            raise StorageError(
                f"{self.path} was written by a newer pykvq (version {version} of its tables; this one knows "
                f"{len(migrations)}): update pykvq, or give another folder with --data-dir"
            )
        if 0 < version < len(migrations):
            self._back_up(version)
        for number in range(version, len(migrations)):
            script = f"BEGIN IMMEDIATE;\n{migrations[number]}\nPRAGMA user_version = {number + 1};\nCOMMIT;"
            try:
                self._open.executescript(script)
            except sqlite3.Error:
                if self._open.in_transaction:
                    self._open.execute("ROLLBACK")
                raise

    def _back_up(self, version: int) -> None:
        path = self.path.with_name(f"{self.path.stem}-v{version}-{time.strftime('%Y%m%d-%H%M%S')}.sqlite")
        with closing(sqlite3.connect(path)) as copy:
            self._open.backup(copy)

    @contextmanager
    def _readable(self) -> Iterator[None]:
        """SQLite's errors, told so that one knows what to do."""
        try:
            yield
        except sqlite3.Error as error:
            raise StorageError(self._explained(error)) from error

    def _explained(self, error: sqlite3.Error) -> str:
        text = str(error)
        if "disk is full" in text:
            return f"cannot save to {self.path}: the disk is full; free some space, and try again"
        if "readonly" in text or "unable to open" in text:
            return f"cannot write {self.path} ({text}): check the folder's permissions, or give another with --data-dir"
        if "locked" in text:
            return f"{self.path} is in use by another program ({text}): close it, or give another with --data-dir"
        if type(error) is sqlite3.DatabaseError:  # the others are subclasses
            return (
                f"{self.path} is damaged ({text}): move it away to begin anew, or put a backup (*-v*.sqlite beside it) "
                "in its place"
            )
        return f"{self.path}: {text}"


def _require_sqlite() -> None:
    if sqlite3.sqlite_version_info < _MIN_SQLITE:
        raise StorageError(
            f"conversations need SQLite {'.'.join(map(str, _MIN_SQLITE))} or newer, and this Python ({sys.executable}) "
            f"has {sqlite3.sqlite_version}: use a newer Python, or one that was built with a newer SQLite"
        )
