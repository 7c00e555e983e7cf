"""Pods, routers and Envoys that the end-to-end tests share.

Everything of a session runs in one event loop. Pods are in this process; routers and Envoys are
processes. Tests that break something start their own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest_asyncio

from extproc.envoyconfig import BootstrapOptions, Mode, render
from extproc.sim.fakepod.pod import PodConfig, RunningPod, start_pod
from tests.e2e.harness import EnvoyProcess, RouterProcess, eventually

NUM_PODS = 3
MAX_BODY_BYTES = 2 * 1024 * 1024
PATIENCE_S = 60.0


def pod_config(number: int, **more: Any) -> PodConfig:
    """Pod N has an adapter of its own, `only-N`, and one that all have, `shared`."""
    return PodConfig(name=f"pod-{number}", adapters=[f"only-{number}", "shared"], **more)


def router_config(pods: Sequence[RunningPod], **sections: Any) -> dict[str, Any]:
    """Configuration of a router over these pods."""
    request = {"max_body_bytes": MAX_BODY_BYTES, **sections.pop("request", {})}
    # The pods share this process with the test: a busy machine may keep them from answering.
    scrape = {"expiry_s": 30.0, **sections.pop("scrape", {})}
    static = [{"address": pod.address, "name": pod.name} for pod in pods]
    return {"discovery": {"static": static}, "request": request, "scrape": scrape, **sections}


@asynccontextmanager
async def running_envoy(
    mode: Mode, *routers: RouterProcess | str, num_pods: int = NUM_PODS, **options: Any
) -> AsyncIterator[EnvoyProcess]:
    """An Envoy that asks these routers (or addresses), and knows the pods where it has to."""
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


async def knows_pods(envoy: EnvoyProcess, num_pods: int) -> None:
    """Wait until endpoint discovery has told Envoy of so many pods."""

    async def check() -> bool:
        stats = await envoy.stats("cluster.pods.membership_total")
        return stats["cluster.pods.membership_total"] == num_pods

    await eventually(check, within_s=PATIENCE_S)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def pods() -> AsyncIterator[list[RunningPod]]:
    """Three pods that answer at once."""
    running = [await start_pod(pod_config(number)) for number in range(NUM_PODS)]
    yield running
    for pod in running:
        await pod.stop()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def router(pods: list[RunningPod]) -> AsyncIterator[RouterProcess]:
    """The founding preset: one destination."""
    async with RouterProcess(router_config(pods, preset="founding")) as running:
        yield running


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def fallback_router(pods: list[RunningPod]) -> AsyncIterator[RouterProcess]:
    """One that names fallbacks, as override-host clusters take them."""
    config = router_config(pods, destination={"num_fallbacks": 2})
    async with RouterProcess(config) as running:
        yield running


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def asking_router(pods: list[RunningPod]) -> AsyncIterator[RouterProcess]:
    """One that asks for the body where Envoy would not send it in time."""
    config = router_config(pods, request={"allow_mode_override": True})
    async with RouterProcess(config) as running:
        yield running


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    """Connections without limit, and no timeout shorter than a test's."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        yield session
