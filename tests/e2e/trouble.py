"""Stacks in trouble that several tests look at: load, adapters beyond slots, sources that fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from extproc.lab.engine.profiles import INSTANT
from extproc.lab.fakepod.podserver import PodConfig, RunningPod
from extproc.stack.processes import free_port, has_page
from tests.e2e.conftest import behind_envoy, router_config
from tests.e2e.harness import Client, RouterProcess
from tests.fakepods import running_pods
from tests.waiting import beside


@asynccontextmanager
async def asked(
    client: Client, *models: str, num_clients: int = 4, pause_s: float = 0.05, **body: Any
) -> AsyncIterator[None]:
    """Clients that ask without an end, each for one of these models, whatever it is answered."""

    async def ask(number: int) -> None:
        while True:
            # A pod that is killed takes its responses with it, and one that hangs keeps them.
            with suppress(aiohttp.ClientError, TimeoutError):
                await client.chat(models[number % len(models)], **body)
            await asyncio.sleep(pause_s)

    async def all_ask() -> None:
        await asyncio.gather(*(ask(number) for number in range(num_clients)))

    async with beside(all_ask()):
        yield


@asynccontextmanager
async def thrashing(
    http: aiohttp.ClientSession,
) -> AsyncIterator[tuple[RouterProcess, RunningPod, AbstractAsyncContextManager[None]]]:
    """A router over a pod with one slot for eight adapters, and clients that ask for all."""
    adapters = [f"adapter-{number}" for number in range(8)]
    loads = replace(INSTANT, step_s=0.01, gpu_load_s=0.2)
    config = PodConfig(name="pod-0", adapters=adapters, max_loras=1, profile=loads)
    async with running_pods(config) as (pod,):
        policy = {"name": "random"}
        async with behind_envoy(router_config([pod], policy=policy), http, num_pods=1) as found:
            router, client = found
            yield router, pod, asked(client, *adapters, num_clients=8)


def unreachable_cluster(folder: Path) -> dict[str, Any]:
    """A source of endpoints whose API server does not answer."""
    cluster = {"server": f"http://127.0.0.1:{free_port()}"}
    document = {
        "current-context": "x",
        "clusters": [{"name": "x", "cluster": cluster}],
        "contexts": [{"name": "x", "context": {"cluster": "x", "user": "x"}}],
        "users": [{"name": "x", "user": {"token": "none"}}],
    }
    kubeconfig = folder / "kubeconfig"
    kubeconfig.write_text(yaml.safe_dump(document))
    return {
        "kubernetes": {
            "kubeconfig": str(kubeconfig),
            "namespace": "llm",
            "pod_selector": "app=vllm",
            "port": 8000,
        }
    }


@asynccontextmanager
async def never_ready(discovery: Mapping[str, Any]) -> AsyncIterator[RouterProcess]:
    """A router whose source of endpoints fails."""
    router = RouterProcess({"discovery": discovery})
    try:
        router.spawn(router.command)  # `start` would wait until it is ready
        await router.wait_until(lambda: has_page(f"{router.admin_url}/metrics"))
        yield router
    finally:
        await router.close()
