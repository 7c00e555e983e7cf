"""Stores of every kind for tests, on temporary files and on a real Redis server."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from copy import copy
from pathlib import Path

import pytest

from extproc.adapters.declared import Declaration
from extproc.adapters.stores.content import Medium, Stored
from extproc.adapters.stores.directory import Directory
from extproc.adapters.stores.sqlite import Sqlite
from extproc.adapters.stores.store import Store
from extproc.stack.processes import free_port
from tests.builders import Clock

KINDS = ("directory", "sqlite", "redis")
STRICT_KINDS = ("sqlite", "redis")
"""Those where writers take turns, one has the lease, and what is deleted is kept."""
KEY = "extproc:test"


def declared(name: str = "org/a", source: str = "/adapters/a", **fields: object) -> Declaration:
    return Declaration(name=name, source=source, origin="store", **fields)  # type: ignore[arg-type]


def shown(store: Store) -> dict[str, str]:
    """What a store shows: each source by name, and `deleted` for those that are."""
    return {
        name: "deleted" if stored.is_deleted else stored.declaration.source
        for name, stored in store.entries.items()
    }


class RedisServer:
    """A real server that keeps its data in a folder, on a port of its own."""

    def __init__(self, folder: Path) -> None:
        program = shutil.which("valkey-server") or shutil.which("redis-server")
        if program is None:
            pytest.skip("no redis-server, no valkey-server on PATH (Debian package redis-server)")
        self._program = program
        self._folder = folder
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *options: str) -> None:
        self._process = subprocess.Popen(
            [
                *(self._program, "--port", str(self.port), "--bind", "127.0.0.1"),
                *("--dir", str(self._folder), "--save", "", "--appendonly", "yes"),
                *("--appendfsync", "always", *options),
            ],
            stdout=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 60
        while True:
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1) as link:
                link.sendall(b"PING\r\n")
                if link.recv(5) in (b"+PONG", b"-NOAU"):
                    return
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def for_others(self) -> RedisServer:
        """Return what another process needs to use the server."""
        other = copy(self)
        other._process = None
        return other

    def empty(self) -> None:
        with socket.create_connection(("127.0.0.1", self.port), 60) as link:
            link.sendall(b"FLUSHALL\r\n")
            assert link.recv(3) == b"+OK"

    def kill(self, *, loses_data: bool = False) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait(60)
            self._process = None
        if loses_data:
            shutil.rmtree(self._folder)
            self._folder.mkdir()


def make_medium(kind: str, folder: Path, server: RedisServer | None, clock: Clock) -> Medium:
    if kind == "directory":
        return Directory(folder, interval_s=0.01)
    if kind == "sqlite":
        return Sqlite(folder / "adapters.db", interval_s=0.01, clock=clock)
    from extproc.adapters.stores.redis import Redis

    assert server is not None
    return Redis(server.url, key=KEY, password=None, ca_file=None, interval_s=0.01)


class Opened:
    """Routers' stores on one medium.

    Attributes:
        make: Makes another medium on the same contents.
        clock: Of the media that have one.
    """

    def __init__(self, make: Callable[[], Medium], clock: Clock) -> None:
        self.make = make
        self.clock = clock
        self._stores: list[Store] = []

    async def store(self, medium: Medium | None = None) -> Watched:
        """Return a store of one more router, which has looked once."""
        watched = Watched(self.make() if medium is None else medium)
        self._stores.append(watched)
        await watched.poll()
        return watched

    async def aclose(self) -> None:
        for store in self._stores:
            await store.aclose()


class Watched(Store):
    """A store that notes what it hands on."""

    def __init__(self, medium: Medium) -> None:
        self.seen: list[Mapping[str, Stored]] = []
        self.failures: list[str] = []
        self.num_recoveries = 0
        super().__init__(
            medium,
            on_entries=self.seen.append,
            on_failure=self.failures.append,
            on_recovery=self._note_recovery,
        )

    def _note_recovery(self) -> None:
        self.num_recoveries += 1


@asynccontextmanager
async def opened(kind: str, folder: Path, server: RedisServer | None) -> AsyncIterator[Opened]:
    clock = Clock(1000.0)
    all_of_them = Opened(lambda: make_medium(kind, folder, server, clock), clock)
    try:
        yield all_of_them
    finally:
        await all_of_them.aclose()


@asynccontextmanager
async def following(store: Store) -> AsyncIterator[None]:
    running = asyncio.ensure_future(store.run())
    try:
        yield
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


def is_root() -> bool:
    return os.geteuid() == 0
