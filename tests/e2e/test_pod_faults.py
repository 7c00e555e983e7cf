"""When a pod fails, clients get their response or a clear error, and never a hang."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import pytest
import yaml

from extproc.envoy.bootstrap import BodyDelivery, BootstrapOptions, Mode, render
from extproc.lab.fakepod.podserver import RunningPod
from tests.e2e.conftest import (
    MAX_BODY_BYTES,
    NUM_PODS,
    SLOW,
    behind_envoy,
    knows_pods,
    own_pods,
    pages_of,
    pod_config,
    router_config,
    running_envoy,
    server_that_says,
)
from tests.e2e.harness import (
    Client,
    EnvoyProcess,
    RouterProcess,
    chat,
    connection_manager,
    free_port,
)
from tests.e2e.load import CHAT, RESPONSES, Load, killed_by, outcome, with_requests
from tests.fakepods import running_pods
from tests.waiting import eventually

NUM_CLIENTS = 8


FALLBACKS = {
    Mode.ORIGINAL_DST: {},
    Mode.OVERRIDE_HOST: {"destination": {"num_fallbacks": 2}},
}
"""The router's configuration with which Envoy has other addresses to dial."""

UNASKED = {"interval_s": 60, "models_interval_s": 60, "expiry_s": 600}
"""Pods that the router asks nothing meanwhile."""

RARE_SCRAPES = {"scrape": UNASKED, "policy": {"name": "random"}}
"""At random, because the founding policy stays with a pod. Of forty requests, one run in millions
sends none to the dead one of three."""

IN_BOTH_MODES = pytest.mark.parametrize("mode", list(FALLBACKS), ids=str)
CAUSE = "cause="


@asynccontextmanager
async def pods_read_elsewhere() -> AsyncIterator[tuple[list[RunningPod], dict[str, Any]]]:
    """Pods, and the configuration by which a server that goes on has their pages."""
    async with own_pods() as pods, running_pods(pod_config(len(pods))) as (server,):
        yield pods, {"pods": pages_of(server)}


def with_causes(text: str) -> str:
    """A bootstrap whose Envoy also writes each request's response flags to its log."""
    bootstrap = yaml.safe_load(text)
    kind = "type.googleapis.com/envoy.extensions.access_loggers.stream.v3.StdoutAccessLog"
    line = f"{CAUSE}%RESPONSE_CODE%/%RESPONSE_FLAGS%\n"
    log_format = {"text_format_source": {"inline_string": line}}
    config = {"@type": kind, "log_format": log_format}
    log = {"name": "envoy.access_loggers.stdout", "typed_config": config}
    connection_manager(bootstrap)["access_log"].append(log)
    return yaml.safe_dump(bootstrap)


def causes(envoy: EnvoyProcess) -> Counter[str]:
    """How many requests ended with which status and response flags."""
    lines = envoy.log.splitlines()
    return Counter(line.removeprefix(CAUSE) for line in lines if line.startswith(CAUSE))


@asynccontextmanager
async def envoy_with_causes(mode: Mode, router: RouterProcess) -> AsyncIterator[EnvoyProcess]:
    options = BootstrapOptions(mode, max_body_bytes=MAX_BODY_BYTES, routers=(router.address,))
    async with EnvoyProcess(with_causes(render(options))) as envoy:
        if mode is Mode.OVERRIDE_HOST:
            await knows_pods(envoy, NUM_PODS)
        yield envoy


@pytest.mark.few(1)
@IN_BOTH_MODES
async def test_a_killed_pod_costs_no_request_that_has_no_byte_of_its_answer(
    mode: Mode, http: aiohttp.ClientSession
) -> None:
    """Neither what it was working on, nor what the router still sends there."""
    async with (
        own_pods(profile=SLOW) as pods,
        RouterProcess(router_config(pods, **FALLBACKS[mode])) as router,
        envoy_with_causes(mode, router) as envoy,
        Load(
            Client(envoy.url, http), ["shared", "base"], num_clients=NUM_CLIENTS
        ).running() as load,
    ):
        await load.some()
        await pods[0].kill()
        await load.some(200)
        await eventually(lambda: has_logged(envoy, len(load.answers)))

    assert load.outcomes == load.all_served, causes(envoy)


def has_logged(envoy: EnvoyProcess, num_requests: int) -> bool:
    return sum(causes(envoy).values()) >= num_requests


@IN_BOTH_MODES
async def test_a_fallback_is_dialled_where_the_first_address_refuses(
    mode: Mode, http: aiohttp.ClientSession
) -> None:
    """The router still chooses pods that were just killed, one and then two of three."""
    async with (
        pods_read_elsewhere() as (pods, page),
        RouterProcess(router_config(pods, **page, **RARE_SCRAPES, **FALLBACKS[mode])) as router,
        running_envoy(mode, router) as envoy,
    ):
        client = Client(envoy.url, http)
        await pods[0].kill()
        answers = [await client.chat("base") for _ in range(20)]
        await pods[1].kill()
        more = [await client.chat("base") for _ in range(20)]
        retries = await envoy.stats("cluster.pods.upstream_rq_retry_success")
        await eventually(router.has_none_in_flight)
        completed = await router.counter("extproc_completions_total")
        unmatched = await router.counter("extproc_completions_unmatched_total")

    assert Counter(map(outcome, answers + more)) == {"served": 40}
    assert {answer.served_by for answer in more} == {"pod-2"}
    assert sum(retries.values()) >= 1
    assert (completed, unmatched) == (40, 0)


async def test_without_another_pod_the_same_one_is_dialled_again(
    http: aiohttp.ClientSession,
) -> None:
    async with (
        own_pods() as pods,
        # Else the retry waits for the pod: its closed connection may be noticed in time.
        RouterProcess(router_config(pods, scrape=UNASKED, request={"max_hold_s": 0})) as router,
        running_envoy(Mode.ORIGINAL_DST, router) as envoy,
    ):
        client = Client(envoy.url, http)
        await pods[0].kill()
        answer = await client.chat("only-0")
        refused = await envoy.stats("cluster.pods.upstream_cx_connect_fail$")

    assert outcome(answer) == "endpoint_unavailable"
    assert list(refused.values()) == [2]


@pytest.mark.few(3)
@pytest.mark.parametrize("body", list(BodyDelivery), ids=str)
async def test_the_whole_body_goes_to_a_fallback_in_every_body_mode(
    body: BodyDelivery, http: aiohttp.ClientSession
) -> None:
    asks_for_body = body is BodyDelivery.STREAMED_STRICT
    config = {**RARE_SCRAPES, "request": {"allow_mode_override": asks_for_body}}
    async with (
        pods_read_elsewhere() as (pods, page),
        RouterProcess(router_config(pods, **page, **config)) as router,
        running_envoy(
            Mode.ORIGINAL_DST, router, request_body=body, allow_mode_override=asks_for_body
        ) as envoy,
    ):
        client = Client(envoy.url, http)
        await pods[0].kill()
        answers = [await client.chat("base", padding_bytes=300_000) for _ in range(40)]
        refused = await envoy.stats("cluster.pods.upstream_cx_connect_fail$")

    assert Counter(map(outcome, answers)) == {"served": 40}
    assert sum(refused.values()) >= 1


@pytest.mark.few(3)
@IN_BOTH_MODES
@pytest.mark.parametrize(
    ("path", "num_deaths", "expected", "num_pods"),
    [
        (CHAT, 1, "served", 2),
        (CHAT, 3, "endpoint_unavailable", 2),  # it kills engines: not the others, too
        (RESPONSES, 1, "endpoint_unavailable", 1),  # it may have had side effects
    ],
)
async def test_a_request_whose_pod_dies_before_it_answers_is_tried_on_one_other(
    mode: Mode,
    path: str,
    num_deaths: int,
    expected: str,
    num_pods: int,
    http: aiohttp.ClientSession,
) -> None:
    async with (
        own_pods(4, profile=SLOW) as pods,
        behind_envoy(router_config(pods, **FALLBACKS[mode]), http, mode, num_pods=4) as (_, client),
    ):
        answer = await killed_by(client, path, pods, at_most=num_deaths)

    assert outcome(answer) == expected
    assert len(with_requests(pods)) == num_pods


async def test_a_killed_pod_is_no_longer_chosen_once_its_report_has_expired(
    http: aiohttp.ClientSession,
) -> None:
    async with (
        own_pods() as pods,
        RouterProcess(router_config(pods, scrape={"expiry_s": 0.5})) as router,
        running_envoy(Mode.ORIGINAL_DST, router) as envoy,
        Load(Client(envoy.url, http), ["shared", "base"]).running() as load,
    ):
        await load.some()
        await pods[0].kill()
        await eventually(lambda: are_served_at_once(envoy, load), every_s=0)


async def are_served_at_once(envoy: EnvoyProcess, load: Load) -> bool:
    """Return whether the next requests need no retry; with the dead pod a third would."""
    before = await envoy.stats("cluster.pods.upstream_rq_retry$")
    answers = await load.some(50)
    after = await envoy.stats("cluster.pods.upstream_rq_retry$")
    return after == before and all(answer.status == 200 for answer in answers)


async def test_a_chosen_pod_is_dialled_even_if_envoy_has_ejected_it(
    http: aiohttp.ClientSession,
) -> None:
    """Ejections are for Envoy's own choice; each dial costs a retry and nothing else."""
    async with (
        own_pods() as pods,
        RouterProcess(
            router_config(
                pods,
                destination={"num_fallbacks": 2},
                request={"max_hold_s": 0},
                scrape=UNASKED,
            )
        ) as router,
        running_envoy(Mode.OVERRIDE_HOST, router) as envoy,
    ):
        client = Client(envoy.url, http)
        await pods[0].kill()
        while not (await envoy.stats(EJECTED))[EJECTED]:
            await client.chat("only-0")
        failures = "cluster.pods.upstream_cx_connect_fail"
        before = (await envoy.stats(failures))[failures]
        answer = await client.chat("only-0")
        after = (await envoy.stats(failures))[failures]

    assert after == before + 1
    assert answer.served_by in ("pod-1", "pod-2")  # which do not have the adapter: a 404


EJECTED = "cluster.pods.outlier_detection.ejections_active"


def status_line(status: str) -> bytes:
    """A whole HTTP response without a body."""
    return f"HTTP/1.1 {status}\r\ncontent-length: 0\r\n\r\n".encode()


@asynccontextmanager
async def without_router(*pods: str) -> AsyncIterator[EnvoyProcess]:
    """An Envoy that chooses among these pods itself."""
    router = f"127.0.0.1:{free_port()}"
    async with running_envoy(
        Mode.OVERRIDE_HOST,
        router,
        num_pods=len(pods),
        static_pods=pods,
        failure_mode_allow=True,
    ) as envoy:
        yield envoy


async def test_a_pod_that_returns_nothing_but_errors_is_left_out_where_envoy_chooses(
    pods: list[RunningPod], http: aiohttp.ClientSession
) -> None:
    async with (
        server_that_says(status_line("500 Internal Server Error")) as broken,
        without_router(broken, pods[0].address) as envoy,
    ):
        client = Client(envoy.url, http)
        while not (await envoy.stats(EJECTED))[EJECTED]:
            await client.chat("shared")
        answers = [await client.chat("shared") for _ in range(20)]

    assert {answer.served_by for answer in answers} == {"pod-0"}


async def test_half_of_the_pods_stay_where_all_respond_that_they_are_full(
    http: aiohttp.ClientSession,
) -> None:
    async with AsyncExitStack() as stack:
        full = status_line("503 Service Unavailable")
        addresses = [await stack.enter_async_context(server_that_says(full)) for _ in range(4)]
        envoy = await stack.enter_async_context(without_router(*addresses))
        client = Client(envoy.url, http)
        answers = [await client.request("POST", CHAT, chat("shared")) for _ in range(100)]
        ejected = (await envoy.stats(EJECTED))[EJECTED]

    # Mostly the pods' own responses. Where Envoy has asked all that are left it may be Envoy's own.
    assert {answer.status for answer in answers} == {503}
    assert sum(answer.body == b"" for answer in answers) > 50
    assert 1 <= ejected <= 2
