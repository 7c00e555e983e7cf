"""Fake pods in the process of the test, for as long as a block lasts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from extproc.lab.fakepod.podserver import PodConfig, RunningPod, start_pod


@asynccontextmanager
async def running_pod(
    config: PodConfig | None = None, host: str = "127.0.0.1", port: int = 0
) -> AsyncIterator[RunningPod]:
    pod = await start_pod(config or PodConfig(), host, port)
    try:
        yield pod
    finally:
        await pod.stop()


@asynccontextmanager
async def running_pods(
    *configs: PodConfig, hosts: Sequence[str] = (), port: int = 0
) -> AsyncIterator[list[RunningPod]]:
    """One for each configuration, on loopback or at these addresses."""
    async with AsyncExitStack() as stack:
        places = hosts or ["127.0.0.1"] * len(configs)
        pods = [running_pod(*each, port) for each in zip(configs, places, strict=True)]
        yield [await stack.enter_async_context(pod) for pod in pods]
