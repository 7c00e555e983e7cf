"""One empty store of each kind."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.shell.stores.media import KINDS, Opened, RedisServer, opened


@pytest.fixture(scope="package")
def running_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    pytest.importorskip("redis")
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.kill()


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    kind: str = request.param
    return kind


@pytest.fixture
def server(kind: str, request: pytest.FixtureRequest) -> RedisServer | None:
    """The running server, emptied, for the kind that needs one."""
    if kind != "redis":
        return None
    server: RedisServer = request.getfixturevalue("running_server")
    empty(server)
    return server


def empty(server: RedisServer) -> None:
    with suppress(OSError), socket.create_connection(("127.0.0.1", server.port), 60) as link:
        link.sendall(b"FLUSHALL\r\n")
        assert link.recv(3) == b"+OK"


@pytest.fixture
async def media(kind: str, tmp_path: Path, server: RedisServer | None) -> AsyncIterator[Opened]:
    async with opened(kind, tmp_path, server) as all_of_them:
        yield all_of_them
