"""All pods are killed behind a real Envoy: what is held is not sent to the dead, and waits."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from extproc.envoy.bootstrap import Mode
from extproc.lab.fakepod.podserver import PodConfig
from extproc.stack.stack import FakePod
from tests.e2e.conftest import SLOW, behind_envoy, running_envoy
from tests.e2e.harness import Answer, Client, RouterProcess
from tests.waiting import eventually

NUM_PODS, NUM_HELD, NUM_NEW = 2, 120, 10
ROOM = {"name": "tests.e2e.room:Room", "args": {"num": 1}}
POLICIES = {"least_harm": {"name": "least_harm"}, "room": ROOM}


@asynccontextmanager
async def pods_of_their_own() -> AsyncIterator[list[FakePod]]:
    """Pods with one slot each, as processes that can be killed and come back on their ports."""
    async with AsyncExitStack() as stack:
        pods = []
        for number in range(NUM_PODS):
            config = PodConfig(
                name=f"pod-{number}", adapters=["a", "b", "c"], max_loras=1, profile=SLOW
            )
            pods.append(await stack.enter_async_context(FakePod(config.name, config)))
        yield pods


def router_over(pods: list[FakePod], **sections: Any) -> RouterProcess:
    static = [{"address": pod.address, "name": pod.name} for pod in pods]
    limits = {"max_loras": 1}
    return RouterProcess({"discovery": {"static": static}, "pods": limits, **sections})


async def ended(router: RouterProcess) -> dict[str, int]:
    queue = (await router.admin("/debug/snapshot"))["queue"]
    return {end: num for end, num in queue["ended"].items() if num}


async def until_held(router: RouterProcess, num: int) -> None:
    async def are_held() -> bool:
        return bool((await router.admin("/debug/snapshot"))["queue"]["num_held"] == num)

    await eventually(are_held)


async def are_gone(router: RouterProcess) -> bool:
    views = (await router.admin("/debug/snapshot"))["endpoints"]
    return all(view["unreachable"] for view in views)


def send(client: Client, model: str, num: int) -> list[asyncio.Task[Answer]]:
    loop = asyncio.get_running_loop()
    return [loop.create_task(client.chat(model)) for _ in range(num)]


@pytest.mark.few(1)
@pytest.mark.timeout(180)
@pytest.mark.parametrize("policy", POLICIES)
async def test_when_all_pods_die_what_is_held_waits_and_is_answered_once_they_are_back(
    policy: str, http: aiohttp.ClientSession
) -> None:
    async with (
        pods_of_their_own() as pods,
        router_over(pods, policy=POLICIES[policy]) as router,
        running_envoy(Mode.ORIGINAL_DST, router) as envoy,
    ):
        client = Client(envoy.url, http)
        async with AsyncExitStack() as running:
            for model in ("a", "b"):
                await running.enter_async_context(client.streaming(model, max_tokens=4000))
            held = send(client, "c", NUM_HELD)
            await until_held(router, NUM_HELD)
            for pod in pods:
                pod.send(signal.SIGKILL)
            for pod in pods:
                await pod.wait()
            await eventually(lambda: are_gone(router))
            held += send(client, "c", NUM_NEW)
            await until_held(router, NUM_HELD + NUM_NEW)
            before = await ended(router)
        for pod in pods:
            await pod.start()
        answers = await asyncio.gather(*held)

        assert before == {}  # nobody was sent to the dead, and nobody given up
        assert [answer.status for answer in answers] == [200] * (NUM_HELD + NUM_NEW)
        assert await ended(router) == {"picked": NUM_HELD + NUM_NEW}
        await eventually(router.has_none_in_flight)


async def test_a_request_to_an_empty_pool_gets_503_once_its_patience_ends_or_at_once(
    http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    (tmp_path / "pods.yaml").write_text("[]")
    config = {
        "discovery": {"file": str(tmp_path / "pods.yaml")},
        "routes": [{"name": "now", "models": ["b"], "on_unavailable": "reject"}],
        "request": {"max_hold_s": 1.0},
    }
    async with behind_envoy(config, http) as (router, client):
        waits, rejected = await asyncio.gather(client.chat("a"), client.chat("b"))

        for answer in (waits, rejected):
            assert (answer.status, answer.error_code) == (503, "no_endpoints")
            assert answer.headers["retry-after"] == "1"
        assert await ended(router) == {"no_endpoints": 1}  # the one that waited
