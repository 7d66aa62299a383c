"""What the desktop app keeps besides conversations: settings, and the fidelity runs of models."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from pykvq.desktop.database import Database


class Records:
    """Settings by name, and fidelity runs by model.

    Raises:
        StorageError: it cannot be written.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def setting(self, name: str, default: Any = None) -> Any:
        """A setting's value."""
        row = self._database.row("SELECT value FROM setting WHERE name = ?", name)
        return default if row is None else json.loads(row["value"])

    def set(self, name: str, value: Any) -> None:
        """Keeps a value that JSON can hold."""
        with self._database.transaction() as connection:
            connection.execute("INSERT OR REPLACE INTO setting (name, value) VALUES (?, ?)", (name, json.dumps(value)))

    def add_fidelity(self, model: Path, result: dict[str, Any]) -> None:
        """Keeps what ``pykvq.fidelity`` returned for a model."""
        with self._database.transaction() as connection:
            connection.execute(
                "INSERT INTO fidelity_run (model, created, result) VALUES (?, ?, ?)",
                (str(model), time.time(), json.dumps(result)),
            )

    def fidelity_rows(self, model: Path) -> dict[str, dict[str, Any]]:
        """The newest row for each KV format that was measured on a model, by the format's name."""
        rows: dict[str, dict[str, Any]] = {}
        for run in self._database.rows(
            "SELECT result FROM fidelity_run WHERE model = ? ORDER BY created, id", str(model)
        ):
            rows |= {row["name"]: row for row in json.loads(run["result"])["presets"]}
        return rows
