"""One empty store of each kind."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.adapters.stores.media import KINDS, Opened, RedisServer, opened


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
    server.empty()
    return server


@pytest.fixture
async def media(kind: str, tmp_path: Path, server: RedisServer | None) -> AsyncIterator[Opened]:
    async with opened(kind, tmp_path, server) as all_of_them:
        yield all_of_them
