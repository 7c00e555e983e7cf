"""Contents in an SQLite database, for routers on one host: its log needs shared memory."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from extproc.adapters.stores.content import (
    MAX_CONTENT_BYTES,
    MAX_DECLARATIONS,
    StoreError,
    StoreFullError,
)

_BUSY_S = 5.0
"""Longest wait for another writer, which takes milliseconds."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS adapters (name TEXT PRIMARY KEY, content BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS lease (id INTEGER PRIMARY KEY CHECK (id = 1), holder TEXT NOT NULL,
    renewed_s REAL NOT NULL);
"""

# Kind and content, none if that is too large. SQLite counts the bytes of a blob without reading it;
# a text, which only people write, it reads for that, one at a time.
_CONTENT = """
typeof(content), CASE WHEN length(content) <= :most THEN
    CASE typeof(content) WHEN 'blob' THEN content WHEN 'text' THEN CAST(content AS BLOB) END
END
"""

T = TypeVar("T")


class Sqlite:
    """Rows of one database. All calls run in one thread, one after the other.

    Args:
        file: The database; made if it is not there at first, with mode 0600.
        interval_s: Between two looks at whether it has changed.
        clock: Monotonic seconds, the same for all processes of the host as on Linux.
    """

    keeps_deleted = True

    def __init__(self, file: Path, *, interval_s: float, clock: Callable[[], float]) -> None:
        self._file = file
        self._interval_s = interval_s
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, "store")
        self._connection: sqlite3.Connection | None = None
        self._identity: tuple[int, int] | None = None
        self._version: object = None
        self._contents: Mapping[str, bytes | StoreError] = {}
        self._swapped: dict[str, bytes | StoreError | None] = {}  # since they were read

    async def read(self) -> Mapping[str, bytes | StoreError]:
        """Return all contents by name; see `Medium`."""
        return await self._run(self._read)

    async def get(self, name: str) -> bytes | None:
        """Return the content about one adapter; see `Medium`."""
        return await self._run(lambda connection: _content(connection, name))

    async def swap(self, name: str, old: bytes | None, new: bytes | None) -> bool:
        """Replace a content if it is `old`; see `Medium`."""
        return await self._run(lambda connection: self._swap(connection, name, old, new))

    async def lease(self, holder: str, *, ttl_s: float) -> bool:
        """Take or renew the lease; see `Medium`."""
        return await self._run(lambda connection: self._take_lease(connection, holder, ttl_s))

    async def release(self, holder: str) -> None:
        """Give the lease up; see `Medium`."""
        await self._run(
            lambda connection: connection.execute("DELETE FROM lease WHERE holder = ?", (holder,))
        )

    async def changed(self) -> None:
        """Wait for the interval: SQLite does not tell."""
        await asyncio.sleep(self._interval_s)

    async def aclose(self) -> None:
        """Close the database."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, self._close)
        self._thread.shutdown(wait=False)

    async def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        def run() -> T:
            return work(self._connected())

        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, run)
        except (sqlite3.Error, OSError) as error:
            code = getattr(error, "sqlite_errorcode", None)
            kind = StoreFullError if code == sqlite3.SQLITE_FULL else StoreError
            raise kind(f"{self._file}: {error}") from error

    def _connected(self) -> sqlite3.Connection:
        """Return the connection to the file that is there now.

        Raises:
            StoreError: The file that was there is gone, or another one is there, which is empty.
        """
        try:
            status = os.stat(self._file)
        except FileNotFoundError:
            if self._identity is not None:
                raise StoreError(f"{self._file}: gone") from None
            os.close(os.open(self._file, os.O_CREAT | os.O_CLOEXEC, 0o600))
            status = os.stat(self._file)
        identity = (status.st_dev, status.st_ino)
        if self._connection is None or identity != self._identity:
            self._close()
            connection = _connect(self._file)
            if (self._contents or self._swapped) and not _num_rows(connection):
                # Nobody deletes declarations so. Who starts where a mount is gone makes a new one.
                connection.close()
                raise StoreError(f"{self._file}: another database, and empty: is it mounted?")
            self._connection = connection
            self._identity, self._version = identity, None
        return self._connection

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _read(self, connection: sqlite3.Connection) -> Mapping[str, bytes | StoreError]:
        # Others' changes. After ours nothing is read: 10,000 rows take 10 to 15 ms, in which the
        # event loop waits for the interpreter's lock.
        (version,) = connection.execute("PRAGMA data_version").fetchone()
        if version != self._version or len(self._contents) > MAX_DECLARATIONS:
            # One more than are allowed, so that the excess is noticed.
            rows = connection.execute(
                f"SELECT name, {_CONTENT} FROM adapters ORDER BY name LIMIT :num",
                {"most": MAX_CONTENT_BYTES, "num": MAX_DECLARATIONS + 1},
            )
            self._contents = {str(name): _checked(*found) for name, *found in rows}
            self._version = version
        elif self._swapped:
            both = {**self._contents, **self._swapped}
            found = ((name, both[name]) for name in sorted(both))
            self._contents = {name: content for name, content in found if content is not None}
        self._swapped = {}
        return self._contents

    def _swap(
        self, connection: sqlite3.Connection, name: str, old: bytes | None, new: bytes | None
    ) -> bool:
        connection.execute("BEGIN IMMEDIATE")
        with connection:  # commits, or rolls back after an error
            if _content(connection, name) != old:
                return False
            if new is None:
                connection.execute("DELETE FROM adapters WHERE name = ?", (name,))
            else:
                if old is None and _num_rows(connection) >= MAX_DECLARATIONS:
                    raise StoreFullError(f"{self._file}: {MAX_DECLARATIONS} declarations are there")
                connection.execute("REPLACE INTO adapters VALUES (?, ?)", (name, new))
        self._swapped[name] = None if new is None else _checked("blob", new)
        return True

    def _take_lease(self, connection: sqlite3.Connection, holder: str, ttl_s: float) -> bool:
        now = self._clock()
        connection.execute("BEGIN IMMEDIATE")
        with connection:
            row = connection.execute("SELECT holder, renewed_s FROM lease").fetchone()
            # A time to come is from before the host's last start.
            if row is not None and row[0] != holder and 0 <= now - row[1] <= ttl_s:
                return False
            connection.execute("REPLACE INTO lease VALUES (1, ?, ?)", (holder, now))
            return True


def _connect(file: Path) -> sqlite3.Connection:
    # Without `isolation_level` nothing begins transactions but ourselves.
    connection = sqlite3.connect(
        file, timeout=_BUSY_S, isolation_level=None, check_same_thread=False
    )
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.executescript(_SCHEMA)
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def _num_rows(connection: sqlite3.Connection) -> int:
    (num_rows,) = connection.execute("SELECT count(*) FROM adapters").fetchone()
    return num_rows  # type: ignore[no-any-return] # of `count`


def _content(connection: sqlite3.Connection, name: str) -> bytes | None:
    found = connection.execute(
        f"SELECT {_CONTENT} FROM adapters WHERE name = :name",
        {"most": MAX_CONTENT_BYTES, "name": name},
    ).fetchone()
    if found is None:
        return None
    content = _checked(*found)
    if isinstance(content, StoreError):
        raise content
    return content


def _checked(kind: str, content: bytes | None) -> bytes | StoreError:
    """Return what a row has, into which SQLite lets anybody write anything."""
    if kind not in ("blob", "text"):
        return StoreError("not text")
    if content is None or len(content) > MAX_CONTENT_BYTES:
        return StoreError("too large")
    return content
