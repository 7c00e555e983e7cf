"""Pods, routers and Envoys that the end-to-end tests share.

All tests here are marked e2e and run in one event loop. Pods run in this process, routers and
Envoys in their own. Tests that break something start their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from extproc.envoy.bootstrap import BootstrapOptions, Mode, render
from extproc.lab.engine.profiles import INSTANT
from extproc.lab.fakepod.podserver import PodConfig, RunningPod
from tests.e2e.harness import Client, EnvoyProcess, RouterProcess
from tests.fakepods import running_pods
from tests.servers import tcp_server
from tests.waiting import eventually

NUM_PODS = 3
MAX_BODY_BYTES = 2 * 1024 * 1024
PATIENCE_S = 60.0
SLOW = replace(INSTANT, step_s=0.05)
"""An engine that needs 50 ms for a token."""
_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder, and run them in the session's event loop."""
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.e2e)
            if pytest_asyncio.is_async_test(item):
                item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


def pod_config(number: int, **more: Any) -> PodConfig:
    """Pod N has an adapter of its own, `only-N`, and one that all have, `shared`."""
    return PodConfig(name=f"pod-{number}", adapters=[f"only-{number}", "shared"], **more)


def own_pods(
    num_pods: int = NUM_PODS, **more: Any
) -> AbstractAsyncContextManager[list[RunningPod]]:
    """Pods like the shared ones, for a test that breaks them or needs another engine."""
    return running_pods(*(pod_config(number, **more) for number in range(num_pods)))


def pages_of(server: RunningPod) -> dict[str, Any]:
    """A configuration of pods whose metrics pages this server has: no connection for them closes
    with a pod, so only requests tell that it is dead."""
    return {"metrics_port": int(server.address.rpartition(":")[2])}


def server_that_says(words: bytes) -> AbstractAsyncContextManager[str]:
    """The address of a server that sends these bytes to every request."""

    async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await reader.read(65536):
            writer.write(words)
        writer.close()

    return tcp_server(on_connection)


def router_config(pods: Sequence[RunningPod], /, **sections: Any) -> dict[str, Any]:
    """Configuration of a router over these pods."""
    request = {"max_body_bytes": MAX_BODY_BYTES, **sections.pop("request", {})}
    # The pods share this process with the test: a busy machine may keep them from answering.
    scrape = {"timeout_s": 5.0, "expiry_s": 30.0, **sections.pop("scrape", {})}
    static = [{"address": pod.address, "name": pod.name} for pod in pods]
    return {"discovery": {"static": static}, "request": request, "scrape": scrape, **sections}


@asynccontextmanager
async def running_envoy(
    mode: Mode, *routers: RouterProcess | str, num_pods: int = NUM_PODS, **options: Any
) -> AsyncIterator[EnvoyProcess]:
    """An Envoy that asks these routers (or addresses); with override-host it knows the pods."""
    options.setdefault("max_body_bytes", MAX_BODY_BYTES)
    addresses = tuple(each if isinstance(each, str) else each.address for each in routers)
    config = render(BootstrapOptions(mode=mode, routers=addresses, **options))
    envoy = EnvoyProcess(config)
    try:
        await envoy.start(within_s=PATIENCE_S)
        if mode is Mode.OVERRIDE_HOST:
            await knows_pods(envoy, num_pods)
        yield envoy
    finally:
        await envoy.close()


@asynccontextmanager
async def behind_envoy(
    config: Mapping[str, Any],
    http: aiohttp.ClientSession,
    mode: Mode = Mode.ORIGINAL_DST,
    **options: Any,
) -> AsyncIterator[tuple[RouterProcess, Client]]:
    """A router behind an Envoy of its own, and a client of that."""
    async with RouterProcess(config) as router, running_envoy(mode, router, **options) as envoy:
        yield router, Client(envoy.url, http)


async def knows_pods(envoy: EnvoyProcess, num_pods: int) -> None:
    """Wait until Envoy has learned of `num_pods` pods by endpoint discovery."""

    async def check() -> bool:
        stats = await envoy.stats("cluster.pods.membership_total")
        return stats["cluster.pods.membership_total"] == num_pods

    await eventually(check, within_s=PATIENCE_S)


def seen_by(pod: RunningPod) -> dict[str, str]:
    """The headers of the last request that a pod received."""
    headers = pod.pod.last_requests[-1]["headers"]
    assert isinstance(headers, list)
    return dict(headers)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def pods() -> AsyncIterator[list[RunningPod]]:
    """Three pods that respond at once."""
    async with own_pods() as running:
        yield running


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def router(pods: list[RunningPod]) -> AsyncIterator[RouterProcess]:
    """A router with the founding preset: one destination."""
    async with RouterProcess(router_config(pods, preset="founding")) as running:
        yield running


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def fallback_router(pods: list[RunningPod]) -> AsyncIterator[RouterProcess]:
    """A router that names fallbacks, which override-host clusters can use."""
    config = router_config(pods, destination={"num_fallbacks": 2})
    async with RouterProcess(config) as running:
        yield running


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def asking_router(pods: list[RunningPod]) -> AsyncIterator[RouterProcess]:
    """A router that asks for the body where Envoy would not send it in time."""
    config = router_config(pods, request={"allow_mode_override": True})
    async with RouterProcess(config) as running:
        yield running


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    """A session with unlimited connections."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        yield session
