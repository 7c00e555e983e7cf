"""Requests may be held far beyond Envoy's message timeout, in every body mode."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
import pytest_asyncio

from extproc.envoy.bootstrap import Mode, RequestBody
from extproc.lab.fakepod.pod import RunningPod
from tests.e2e.conftest import SLOW, own_pods, router_config, running_envoy
from tests.e2e.harness import Answer, Client, EnvoyProcess, RouterProcess
from tests.waiting import eventually

MESSAGE_TIMEOUT_S = 0.5
HOLD_S = 3 * MESSAGE_TIMEOUT_S
NUM_AT_ONCE = 50
RARELY = {"interval_s": 60.0, "expiry_s": 600.0}
"""Not a report, but the end of a request is to tell that there is room."""


def hold_config(pods: list[RunningPod]) -> dict[str, object]:
    """A policy that names no time."""
    return router_config(
        pods,
        policy={"name": "tests.e2e.policies:Gate", "args": {"adapter": "only-0"}},
        server={"drain_timeout_s": 1},
        scrape=RARELY,
    )


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def slow_pods() -> AsyncIterator[list[RunningPod]]:
    async with own_pods(profile=SLOW) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def holder(slow_pods: list[RunningPod]) -> AsyncIterator[RouterProcess]:
    async with RouterProcess(hold_config(slow_pods)) as router:
        yield router


async def num_held_so_far(router: RouterProcess) -> float:
    page: str = await router.admin("/metrics")
    lines = [each for each in page.splitlines() if each.startswith("extproc_waits_total{")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


@asynccontextmanager
async def held(router: RouterProcess, client: Client) -> AsyncIterator[list[asyncio.Task[Answer]]]:
    """Requests that are held until the context ends, for longer than any message timeout."""
    num_before = await num_held_so_far(router)

    async def are_held() -> bool:
        return await num_held_so_far(router) == num_before + NUM_AT_ONCE

    async with client.streaming("only-0", max_tokens=4000):
        requests = [asyncio.ensure_future(client.chat("shared")) for _ in range(NUM_AT_ONCE)]
        await eventually(are_held)
        await asyncio.sleep(HOLD_S)
        assert not any(each.done() for each in requests)
        yield requests


async def has_no_errors(envoy: EnvoyProcess) -> bool:
    stats = await envoy.stats("http.openai.ext_proc")
    names = ("streams_failed", "spurious_msgs_received", "message_timeouts")
    return all(count == 0 for name, count in stats.items() if name.endswith(names))


@pytest.mark.parametrize(
    ("mode", "body"),
    [
        (Mode.ORIGINAL_DST, RequestBody.BUFFERED),
        (Mode.ORIGINAL_DST, RequestBody.BUFFERED_PARTIAL),
        (Mode.ORIGINAL_DST, RequestBody.STREAMED),
        (Mode.ORIGINAL_DST, RequestBody.HEADERS_ONLY),
        (Mode.FULL_DUPLEX, RequestBody.FULL_DUPLEX),
    ],
)
async def test_every_held_request_is_served_once_what_it_waits_for_has_ended(
    holder: RouterProcess, http: aiohttp.ClientSession, mode: Mode, body: RequestBody
) -> None:
    async with running_envoy(
        mode, holder, request_body=body, message_timeout_s=MESSAGE_TIMEOUT_S
    ) as envoy:
        async with held(holder, Client(envoy.url, http)) as requests:
            pass  # and now the request ends that they wait for
        answers = await asyncio.gather(*requests)

        assert [answer.status for answer in answers] == [200] * NUM_AT_ONCE
        assert await has_no_errors(envoy)
        await eventually(holder.has_none_in_flight)


async def test_a_request_waits_for_the_only_slot_and_is_sent_when_that_is_free(
    http: aiohttp.ClientSession,
) -> None:
    """With the default policy."""
    async with own_pods(1, max_loras=1, profile=SLOW) as pods:
        config = {**router_config(pods, scrape=RARELY), "pods": {"max_loras": 1}}
        router = RouterProcess(config)
        async with router, running_envoy(Mode.ORIGINAL_DST, router) as envoy:
            client = Client(envoy.url, http)
            async with client.streaming("only-0", max_tokens=4000):
                held = asyncio.ensure_future(client.chat("shared"))
                await eventually(lambda: num_held_so_far(router))
                assert list((await router.in_flight()).values()) == [1]
                assert not held.done()

            assert (await held).status == 200
            await eventually(router.has_none_in_flight)


async def test_clients_that_leave_while_held_are_forgotten_and_nothing_is_sent_for_them(
    slow_pods: list[RunningPod], http: aiohttp.ClientSession
) -> None:
    """At once, while what they wait for still runs."""
    router = RouterProcess(hold_config(slow_pods))
    async with router, running_envoy(Mode.ORIGINAL_DST, router) as envoy:

        async def are_forgotten() -> bool:
            return await router.counter("extproc_streams_active") == 0

        async with held(router, Client(envoy.url, http)) as requests:
            for request in requests:
                request.cancel()
            await asyncio.gather(*requests, return_exceptions=True)
            await eventually(are_forgotten)
            assert sum((await router.in_flight()).values()) == 1

        await eventually(router.has_none_in_flight)
        decisions = (await router.admin("/debug/decisions?n=9"))["decisions"]
        assert len(decisions) == 1  # of the one that they waited for
        assert await has_no_errors(envoy)
