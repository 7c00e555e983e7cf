"""Real servers behind a real Envoy and the real router, and the questions that tests ask them.

Which server a request was served by is read from the servers' counters, and which adapters they
hold from the probe in their workers, never from the router.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from extproc.envoy.bootstrap import BootstrapOptions, Mode, render
from tests.e2e.harness import Answer, Client, EnvoyProcess, RouterProcess
from tests.vllm.server import BASE_MODEL, MAX_CPU_LORAS, MAX_LORAS, VllmClient, VllmServer
from tests.vllm.test_residency import assert_caches
from tests.waiting import eventually

PATH = "/v1/completions"
PROMPT = "the fox"
NUM_TOKENS = 16
PATIENCE_S = 60.0
"""For a request, or until a change is noticed: longer is a hang, however busy the machine is."""

JSON = {"content-type": "application/json"}


def completion(model: str, max_tokens: int = NUM_TOKENS, **more: Any) -> bytes:
    """A request for greedy text of exactly so many tokens."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0}
    return json.dumps({**body, "ignore_eos": True, **more}).encode()


def text_of(answer: Answer) -> str:
    """The text of an answer that must be one."""
    assert answer.status == 200, answer
    text: str = answer.json["choices"][0]["text"]
    return text


@dataclass
class Gateway:
    """A running gateway. Servers are named by their number."""

    servers: list[VllmClient]
    router: RouterProcess
    envoy: EnvoyProcess
    http: aiohttp.ClientSession

    async def ask(self, model: str, max_tokens: int = NUM_TOKENS) -> Answer:
        """Ask for a completion through Envoy.

        Raises:
            TimeoutError: It hangs.
        """
        client = Client(self.envoy.url, self.http)
        async with asyncio.timeout(PATIENCE_S):
            return await client.request("POST", PATH, completion(model, max_tokens))

    async def views(self) -> list[dict[str, Any]]:
        """Return the router's view of each server."""
        snapshot = await self.router.admin("/debug/snapshot")
        by_address = {view["address"]: view for view in snapshot["endpoints"]}
        return [by_address[client.server.address] for client in self.servers]

    async def knows(self, adapters: Collection[str], *, on: int) -> None:
        """Wait until the router sees exactly these adapters registered on a server."""
        wanted = {BASE_MODEL, *adapters}

        async def check() -> bool:
            view = (await self.views())[on]
            return view["known"] and set(view["registered"] or ()) == wanted

        await eventually(check, within_s=PATIENCE_S)

    async def settle(self, cached: Sequence[Collection[str]]) -> None:
        """Fill each server's CPU cache with exactly these adapters, by requests past the router.

        There must be as many as the cache holds.
        """
        for client, adapters in zip(self.servers, cached, strict=True):
            for adapter in adapters:
                await client.complete(adapter, max_tokens=8)

        async def check() -> bool:
            pairs = zip(await self.views(), cached, strict=True)
            return all(set(view["cpu_adapters"]) == set(adapters) for view, adapters in pairs)

        await eventually(check, within_s=PATIENCE_S)

    async def become_quiet(self, servers: Collection[int] = (0, 1)) -> None:
        """Wait until the router has seen every request end, and has scraped since."""
        ended_s = time.monotonic()

        async def check() -> bool:
            asked_s = time.monotonic()
            views = await self.views()
            return not sum(view["num_in_flight"] for view in views) and all(
                views[number]["num_pending"] == 0
                and views[number]["report_age_s"] < asked_s - ended_s
                for number in servers
            )

        await eventually(check, within_s=PATIENCE_S)

    async def num_served(self) -> list[int]:
        """Return how many requests each server has finished."""
        return [await _num_served(client) for client in self.servers]

    async def served_since(self, before: Sequence[int], num: int) -> list[int]:
        """Return how many of the `num` requests since `before` each server has finished."""

        async def check() -> list[int] | None:
            counts = zip(await self.num_served(), before, strict=True)
            since = [now - earlier for now, earlier in counts]
            return since if sum(since) >= num else None

        since: list[int] = await eventually(check, within_s=PATIENCE_S)
        assert sum(since) == num
        return since

    async def assert_residency_equals(self) -> None:
        """The router's view of GPU slots and CPU caches is what the workers hold."""
        for client, view in zip(self.servers, await self.views(), strict=True):
            await assert_caches(client, view["gpu_adapters"], view["cpu_adapters"])


async def knows_models(router: RouterProcess) -> bool:
    """Whether a router has a report and a list of models of every pod."""
    snapshot = await router.admin("/debug/snapshot")
    return all(view["known"] and view["registered"] for view in snapshot["endpoints"])


async def _num_served(client: VllmClient) -> int:
    page = (await client.get("/metrics/?name[]=vllm:request_success_total")).decode()
    return sum(
        int(sample.value)
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == "vllm:request_success_total"
    )


@asynccontextmanager
async def running_gateway(
    servers: Sequence[VllmServer], *, policy: str = ""
) -> AsyncIterator[Gateway]:
    """A policy, or the founding preset, over these servers, once the router knows their models."""
    pods = [{"address": s.address, "name": f"vllm-{n}"} for n, s in enumerate(servers)]
    config = {
        **({"policy": {"name": policy}} if policy else {"preset": "founding"}),
        "discovery": {"static": pods},
        "pods": {"max_loras": MAX_LORAS, "max_cpu_loras": MAX_CPU_LORAS},
        # A server that starves for a moment on a busy machine is not one that is gone.
        "scrape": {"timeout_s": 5.0, "expiry_s": 6.0},
    }
    async with (
        RouterProcess(config) as router,
        EnvoyProcess(
            render(BootstrapOptions(mode=Mode.ORIGINAL_DST, routers=(router.address,)))
        ) as envoy,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http,
    ):
        gateway = Gateway([VllmClient(s, http) for s in servers], router, envoy, http)
        for number, server in enumerate(servers):
            await gateway.knows(server.adapters, on=number)
        yield gateway
