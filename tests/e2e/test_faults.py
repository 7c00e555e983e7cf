"""When the router fails, clients get their response or a clear error, and never a hang."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from extproc.envoy.bootstrap import Mode
from extproc.lab.fakepod.podserver import RunningPod
from tests.e2e.conftest import (
    NUM_PODS,
    SLOW,
    knows_pods,
    own_pods,
    router_config,
    running_envoy,
)
from tests.e2e.harness import Client, EnvoyProcess, RouterProcess, chat
from tests.e2e.load import Load, outcome
from tests.waiting import eventually

PATH = "/v1/chat/completions"
NUM_CLIENTS = 8


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def router(pods: list[RunningPod]) -> AsyncIterator[RouterProcess]:
    """A router that tests kill or stop, and leave running."""
    async with RouterProcess(router_config(pods)) as running:
        yield running


async def test_a_killed_router_costs_clear_errors_until_it_is_back(
    router: RouterProcess, http: aiohttp.ClientSession
) -> None:
    async with (
        running_envoy(Mode.ORIGINAL_DST, router) as envoy,
        Load(Client(envoy.url, http), ["only-0", "only-1"]).running() as load,
    ):
        before = await load.some()
        await router.kill()
        without = await load.some()
        await router.start()
        await load.some()
        after = await load.some()

    assert {outcome(answer) for answer in before} == {"served"}
    assert "router_unavailable" in {outcome(answer) for answer in without}
    assert {outcome(answer) for answer in after} == {"served"}
    # And nothing else: a router that has not scraped the pods yet turns requests away.
    assert set(load.outcomes) == {"served", "router_unavailable"}


async def test_where_envoy_fails_open_every_request_is_served_while_the_router_is_gone(
    router: RouterProcess, http: aiohttp.ClientSession
) -> None:
    async with (
        running_envoy(Mode.OVERRIDE_HOST, router, failure_mode_allow=True) as envoy,
        Load(Client(envoy.url, http), ["shared", "base"]).running() as load,
    ):
        await load.some()
        await router.kill()
        without = await load.some(200)
        await router.start()
        await load.some()

    assert load.outcomes == load.all_served
    assert {answer.served_by for answer in without} == {f"pod-{n}" for n in range(NUM_PODS)}


async def test_where_envoy_fails_open_an_adapter_that_one_pod_has_is_a_404_of_the_others(
    router: RouterProcess, http: aiohttp.ClientSession
) -> None:
    async with running_envoy(Mode.OVERRIDE_HOST, router, failure_mode_allow=True) as envoy:
        client = Client(envoy.url, http)
        await eventually(lambda: is_served(client))
        await router.kill()
        answers = [await client.chat("only-0") for _ in range(40)]
        await router.start()

    served = {answer.served_by for answer in answers if answer.status == 200}
    assert {answer.status for answer in answers} == {200, 404}
    assert served == {"pod-0"}


@pytest.mark.parametrize(
    ("mode", "options", "expected"),
    [
        (Mode.ORIGINAL_DST, {"message_timeout_s": 0.5}, "router_timeout"),
        (Mode.OVERRIDE_HOST, {"message_timeout_s": 0.5}, "router_timeout"),
        (Mode.OVERRIDE_HOST, {"message_timeout_s": 0.5, "failure_mode_allow": True}, "served"),
        # No message timer runs here: pings fail, and Envoy retries on new connections.
        (Mode.FULL_DUPLEX, {"router_ping_s": 0.5}, "router_unavailable"),
    ],
    ids=str,
)
async def test_a_router_that_hangs_costs_envoys_time_limit(
    mode: Mode,
    options: dict[str, Any],
    expected: str,
    router: RouterProcess,
    http: aiohttp.ClientSession,
) -> None:
    async with running_envoy(mode, router, **options) as envoy:
        client = Client(envoy.url, http)
        await eventually(lambda: is_served(client))
        router.send(signal.SIGSTOP)
        answer = await client.chat("shared")
        router.send(signal.SIGCONT)
        await eventually(lambda: is_served(client))

    assert outcome(answer) == expected


async def is_served(client: Client) -> bool:
    return outcome(await client.chat("shared")) == "served"


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", list(Mode))
async def test_envoy_comes_up_before_the_router(
    mode: Mode, pods: list[RunningPod], http: aiohttp.ClientSession
) -> None:
    router = RouterProcess(router_config(pods))
    async with running_envoy(mode, router, num_pods=0) as envoy:
        client = Client(envoy.url, http)
        early = await client.chat("only-1")
        async with router:
            if mode is Mode.OVERRIDE_HOST:
                await knows_pods(envoy, NUM_PODS)
            answer = await client.chat("only-1")

    assert outcome(early) in ("router_unavailable", "endpoint_unavailable")
    assert answer.served_by == "pod-1"


async def test_a_running_response_does_not_need_the_router(http: aiohttp.ClientSession) -> None:
    async with (
        own_pods(profile=SLOW) as pods,
        RouterProcess(router_config(pods)) as router,
        running_envoy(Mode.ORIGINAL_DST, router) as envoy,
        Client(envoy.url, http).streaming("only-1", max_tokens=20) as answer,
    ):
        await router.kill()
        rest = await answer.content.read()

    assert rest.endswith(b"data: [DONE]\n\n")


async def test_a_router_that_drains_finishes_what_it_has_begun(
    pods: list[RunningPod], http: aiohttp.ClientSession
) -> None:
    """It is not ready at once, serves the request whose body is still coming, and then ends."""
    half_sent, drained = asyncio.Event(), asyncio.Event()

    async def slow_body() -> AsyncIterator[bytes]:
        body = chat("only-1")
        yield body[:20]
        half_sent.set()
        await drained.wait()
        yield body[20:]

    router = RouterProcess(router_config(pods, server={"drain_timeout_s": 10}))
    async with router, running_envoy(Mode.ORIGINAL_DST, router) as envoy:
        client = Client(envoy.url, http)
        async with asyncio.TaskGroup() as group:
            request = group.create_task(client.request("POST", PATH, slow_body()))
            await half_sent.wait()
            await eventually(lambda: _is_deciding(envoy))
            router.send(signal.SIGTERM)
            await eventually(lambda: is_unready(router))
            drained.set()
        status = await router.wait()

    assert request.result().served_by == "pod-1"
    assert status == 0


async def _is_deciding(envoy: EnvoyProcess) -> bool:
    name = "cluster.router.upstream_rq_active"
    # One may be the access log's stream.
    started = await envoy.stats("http.openai.ext_proc.streams_started")
    return (await envoy.stats(f"{name}$"))[name] >= 1 and sum(started.values()) >= 1


async def is_unready(router: RouterProcess) -> bool:
    try:
        return await router.admin_status("/healthz") == 503
    except aiohttp.ClientError:
        return False
