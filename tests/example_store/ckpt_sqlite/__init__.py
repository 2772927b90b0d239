"""Checkpoints in SQLite: `sqlite://NAME/run` is the folder `run` in `NAME.db` in CKPT_SQLITE; a row is an object."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt.errors import CorruptError, StorageError
from ckpt.stores.objects import Entry

if TYPE_CHECKING:
    from ckpt.testing.stores import StoreDeclaration

_TABLE = "CREATE TABLE IF NOT EXISTS objects (key TEXT PRIMARY KEY, version INT, modified_ns INT, content BLOB)"
_PUT = (
    "INSERT INTO objects VALUES (?, 1, ?, ?) ON CONFLICT (key) DO UPDATE "
    "SET version = version + 1, modified_ns = excluded.modified_ns, content = excluded.content"
)


class SqliteStore:
    """Store in one database; each thread and process opens it anew."""

    def __init__(self, root: str) -> None:
        self._url = f"sqlite://{root}"
        self._path = Path(os.environ.get("CKPT_SQLITE", "."), f"{root}.db")

    @contextmanager
    def _database(self) -> Iterator[sqlite3.Connection]:
        """Open the database in a transaction and roll back on an error."""
        try:
            with closing(sqlite3.connect(self._path, timeout=60)) as database, database:
                database.execute(_TABLE)
                yield database
        except sqlite3.Error as error:
            raise StorageError("the database could not be used", path=self._url, found=str(error)) from error

    def _rows(self, key: str, question: str, *values: Any) -> list[tuple[Any, ...]]:
        begin = f"{key}/" if key else ""
        with self._database() as database:
            return database.execute(question, (len(begin), begin, *values)).fetchall()

    def below(self, key: str) -> Iterator[Entry]:
        question = "SELECT key, length(content), modified_ns, version FROM objects WHERE substr(key, 1, ?) = ?"
        for name, size, modified_ns, version in self._rows(key, question):
            yield Entry(name, size, modified_ns, str(version))

    def directly_in(self, key: str) -> Iterator[Entry]:
        begin = f"{key}/" if key else ""
        return (entry for entry in self.below(key) if "/" not in entry.key.removeprefix(begin))

    def read(self, entry: Entry, start: int, stop: int) -> memoryview:
        with self._database() as database:
            question = "SELECT version, substr(content, ?, ?) FROM objects WHERE key = ?"
            found = database.execute(question, (start + 1, stop - start, entry.key)).fetchone()
        if found is None or str(found[0]) != entry.identity:
            what = "the object was replaced, or has gone, while it was being read"
            raise CorruptError(what, path=f"{self._url}/{entry.key}")
        return memoryview(found[1])

    def put(self, key: str, chunks: Iterator[memoryview], size: int, part: int) -> None:
        content = b"".join(chunks)  # before the transaction: nobody waits for content still being computed
        with self._database() as database:
            database.execute(_PUT, (key, time.time_ns(), content))

    def claim(self, key: str) -> bool:
        with self._database() as database:
            values = (key, time.time_ns(), b"")
            return database.execute("INSERT OR IGNORE INTO objects VALUES (?, 1, ?, ?)", values).rowcount == 1

    def remove(self, key: str) -> None:
        with self._database() as database:
            database.execute("DELETE FROM objects WHERE key = ?", (key,))


def declaration() -> StoreDeclaration:
    """Declare an empty database for the suite, inspected with SQLite alone."""
    from ckpt.testing.stores import Served, StoreDeclaration

    @contextmanager
    def serve(folder: Path) -> Iterator[Served]:
        before = os.environ.get("CKPT_SQLITE")
        os.environ["CKPT_SQLITE"] = str(folder)

        def execute(question: str, *values: Any) -> list[tuple[Any, ...]]:
            with closing(sqlite3.connect(folder / "runs.db")) as database, database:
                database.execute(_TABLE)
                return database.execute(question, values).fetchall()

        def put(key: str, content: bytes) -> None:
            execute(_PUT, key, time.time_ns(), content)

        def get(key: str) -> bytes | None:
            rows = execute("SELECT content FROM objects WHERE key = ?", key)
            return bytes(rows[0][0]) if rows else None

        def remove(key: str) -> None:
            execute("DELETE FROM objects WHERE key = ?", key)

        try:
            yield Served("runs", put, get, remove)
        finally:
            del os.environ["CKPT_SQLITE"]
            if before is not None:
                os.environ["CKPT_SQLITE"] = before

    return StoreDeclaration("sqlite", serve)
