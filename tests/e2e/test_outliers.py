"""One bad pod among three: a few requests fail, and then none."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from extproc.envoy.bootstrap import Mode
from extproc.lab.fakepod.podserver import PodConfig, build_app
from extproc.learned.ejections import NUM_TRIALS
from tests.e2e.conftest import (
    SLOW,
    behind_envoy,
    own_pods,
    pod_config,
    router_config,
    running_envoy,
)
from tests.e2e.harness import Answer, Client, RouterProcess
from tests.servers import host_and_port, serving_app
from tests.waiting import eventually

NUM_CLIENTS = 8
NUM_REQUESTS = 400
MODELS = ("shared", "base")


@asynccontextmanager
async def failing_pod(config: PodConfig, how: str) -> AsyncIterator[str]:
    """A pod that responds to scrapes and to no request: 400 to 503 at once, or a reset.

    Beside slow pods it looks idle.
    """

    @web.middleware
    async def fail(request: web.Request, handler: web.Handler) -> web.StreamResponse:  # type: ignore[name-defined]
        if request.method != "POST":
            answer: web.StreamResponse = await handler(request)
            return answer
        if how == "reset" and request.transport is not None:
            request.transport.abort()
        status = {"full": 503, "404": 404, "400": 400}.get(how, 500)
        return web.json_response({"error": {"message": "broken"}}, status=status)

    app = build_app(config)
    app.middlewares.insert(0, fail)
    async with serving_app(app) as url:
        yield host_and_port(url)


def router_over(addresses: list[str], policy: str) -> RouterProcess:
    config = router_config([], policy={"name": policy})
    return RouterProcess({**config, "discovery": {"static": addresses}})


def num_failed(answers: list[Answer]) -> int:
    return sum(answer.status != 200 for answer in answers)


async def is_shown_as(router: RouterProcess, address: str, field: str) -> bool:
    endpoints = (await router.admin("/debug/snapshot"))["endpoints"]
    return bool({each["address"]: each for each in endpoints}[address][field])


@pytest.mark.few(2)
@pytest.mark.parametrize("how", ["400", "500", "reset"])
@pytest.mark.parametrize("policy", ["founding", "least_pending"])
async def test_a_pod_that_fails_at_once_attracts_no_traffic(
    policy: str, how: str, http: aiohttp.ClientSession
) -> None:
    async with (
        own_pods(2, profile=SLOW) as pods,
        failing_pod(pod_config(2, profile=SLOW), how) as bad,
        router_over([*(pod.address for pod in pods), bad], policy) as router,
        running_envoy(Mode.ORIGINAL_DST, router) as envoy,
    ):
        client = Client(envoy.url, http)
        answers = await client.ask(NUM_REQUESTS, *MODELS)
        after = await client.ask(NUM_REQUESTS // 4, *MODELS)
        await eventually(router.has_none_in_flight)

    # Otherwise a third to more than a half fail. It is a suspect after three, and out after six.
    assert num_failed(answers) < NUM_REQUESTS // 20, Counter(each.status for each in answers)
    # Only trials may fail, on a machine slow enough that there is one.
    assert num_failed(after) <= NUM_TRIALS


async def test_a_pod_that_lists_models_and_answers_404_for_them_attracts_no_traffic(
    http: aiohttp.ClientSession,
) -> None:
    async with (
        own_pods(2, profile=SLOW) as pods,
        failing_pod(pod_config(2, profile=SLOW), "404") as bad,
        router_over([*(pod.address for pod in pods), bad], "least_pending") as router,
        running_envoy(Mode.ORIGINAL_DST, router) as envoy,
    ):
        client = Client(envoy.url, http)
        while not await router.counter("extproc_ejections_total"):
            await client.ask(NUM_CLIENTS, *MODELS)  # its list is read once a second at most
        after = await client.ask(NUM_REQUESTS // 4, *MODELS)

    assert num_failed(after) <= NUM_TRIALS


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", [Mode.ORIGINAL_DST, Mode.OVERRIDE_HOST])
async def test_no_client_sees_that_a_pod_is_full_while_another_has_room(
    mode: Mode, http: aiohttp.ClientSession
) -> None:
    destination = {"num_fallbacks": 2} if mode is Mode.OVERRIDE_HOST else {}
    async with (
        own_pods(2, profile=SLOW) as pods,
        failing_pod(pod_config(2, profile=SLOW), "full") as full,
        RouterProcess(
            {
                **router_config([], policy={"name": "least_pending"}),
                "discovery": {"static": [*(pod.address for pod in pods), full]},
                "destination": destination,
            }
        ) as router,
        running_envoy(mode, router) as envoy,
    ):
        answers = await Client(envoy.url, http).ask(NUM_REQUESTS // 4, *MODELS)
        num_full = await router.counter("extproc_full_answers_total")
        num_ejected = await router.counter("extproc_ejections_total")

    assert num_failed(answers) == 0, Counter(each.status for each in answers)
    assert num_full >= 1
    assert num_ejected == 0


@pytest.mark.few(1)
@pytest.mark.parametrize("policy", ["founding", "least_pending"])
async def test_a_pod_that_refuses_connections_attracts_no_traffic(
    policy: str, http: aiohttp.ClientSession
) -> None:
    async with (
        own_pods(profile=SLOW) as pods,
        router_over([pod.address for pod in pods], policy) as router,
        running_envoy(Mode.ORIGINAL_DST, router) as envoy,
    ):
        client = Client(envoy.url, http)
        await client.ask(NUM_CLIENTS, *MODELS)
        await pods[0].kill()
        answers = await client.ask(NUM_REQUESTS, *MODELS)
        await eventually(lambda: is_shown_as(router, pods[0].address, "unreachable"))
        after = await client.ask(NUM_REQUESTS // 4, *MODELS)

    assert num_failed(answers) < NUM_REQUESTS // 10, Counter(each.status for each in answers)
    assert num_failed(after) == 0


async def test_a_router_that_was_frozen_does_not_try_dead_pods_again(
    http: aiohttp.ClientSession,
) -> None:
    """When it goes on, every report has expired, and requests have queued up."""
    scrape = {"interval_s": 0.4, "expiry_s": 0.5}
    async with (
        own_pods(profile=SLOW) as pods,
        behind_envoy(router_config(pods, scrape=scrape), http) as (router, client),
    ):
        await pods[0].kill()
        await eventually(lambda: is_unknown(router, pods[0].address))
        router.send(signal.SIGSTOP)
        asked = [asyncio.create_task(client.chat("shared")) for _ in range(100)]
        await asyncio.sleep(1.0)  # twice as long as a report is trusted
        router.send(signal.SIGCONT)
        answers = await asyncio.gather(*asked)

    assert Counter(each.status for each in answers) == {200: 100}


async def is_unknown(router: RouterProcess, address: str) -> bool:
    return not await is_shown_as(router, address, "known")
