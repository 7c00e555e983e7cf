"""A policy may hold requests far beyond Envoy's message timeout, in every body mode."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import aiohttp
import pytest
import pytest_asyncio

from extproc.envoyconfig import Mode, RequestBody
from extproc.sim.fakepod.pod import RunningPod
from tests.e2e.conftest import router_config, running_envoy
from tests.e2e.harness import Client, EnvoyProcess, RouterProcess, eventually

MESSAGE_TIMEOUT_S = 0.5
HOLD_S = 3 * MESSAGE_TIMEOUT_S
NUM_AT_ONCE = 50


def hold_config(
    pods: list[RunningPod], transport: str, hold_s: float = HOLD_S
) -> dict[str, object]:
    policy = {"name": "tests.e2e.policies:Hold", "args": {"hold_s": hold_s}}
    server = {"transport": transport, "drain_timeout_s": 1}
    return router_config(pods, policy=policy, server=server)


@pytest_asyncio.fixture(
    scope="module", loop_scope="session", params=["wire", "grpcio"], ids=["wire", "grpcio"]
)
async def holder(
    request: pytest.FixtureRequest, pods: list[RunningPod]
) -> AsyncIterator[RouterProcess]:
    async with RouterProcess(hold_config(pods, request.param)) as router:
        yield router


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
async def test_every_held_request_is_served_late(
    holder: RouterProcess, http: aiohttp.ClientSession, mode: Mode, body: RequestBody
) -> None:
    async with running_envoy(
        mode, holder, request_body=body, message_timeout_s=MESSAGE_TIMEOUT_S
    ) as envoy:
        client = Client(envoy.url, http)
        answers = await asyncio.gather(*(client.chat("shared") for _ in range(NUM_AT_ONCE)))

        assert [answer.status for answer in answers] == [200] * NUM_AT_ONCE
        assert await has_no_errors(envoy)


async def test_a_client_that_leaves_during_a_hold_is_forgotten_at_once(
    pods: list[RunningPod], http: aiohttp.ClientSession
) -> None:
    """Not when the hold would have ended."""

    async def holds(router: RouterProcess, count: int) -> bool:
        return await router.counter("extproc_streams_active") == count

    router = RouterProcess(hold_config(pods, "wire", hold_s=50.0))
    async with router, running_envoy(Mode.ORIGINAL_DST, router) as envoy:
        client = Client(envoy.url, http)
        requests = [asyncio.ensure_future(client.chat("shared")) for _ in range(NUM_AT_ONCE)]
        await eventually(lambda: holds(router, NUM_AT_ONCE))
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)

        await eventually(lambda: holds(router, 0))
        assert (await router.admin("/debug/decisions?n=1"))["decisions"] == []
        assert await has_no_errors(envoy)
