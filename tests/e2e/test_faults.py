"""When something breaks, clients get their response or a clear error, and never a hang."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import yaml

from extproc.envoyconfig import BootstrapOptions, Mode, RequestBody, render
from extproc.sim.fakepod.pod import RunningPod
from tests.e2e.conftest import (
    MAX_BODY_BYTES,
    NUM_PODS,
    SLOW,
    knows_pods,
    own_pods,
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
    eventually,
    free_port,
)
from tests.e2e.load import Load, outcome

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

PATH = "/v1/chat/completions"
NUM_CLIENTS = 8


@asynccontextmanager
async def streaming(
    envoy: EnvoyProcess, http: aiohttp.ClientSession, model: str, **body: Any
) -> AsyncIterator[aiohttp.ClientResponse]:
    """A response that streams."""
    data = chat(model, stream=True, **body)
    headers = {"content-type": "application/json"}
    async with http.post(envoy.url + PATH, data=data, headers=headers) as answer:
        yield answer


# --- the router ------------------------------------------------------------------------------


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


async def test_with_override_host_every_request_is_served_while_the_router_is_gone(
    router: RouterProcess, http: aiohttp.ClientSession
) -> None:
    async with (
        running_envoy(Mode.OVERRIDE_HOST, router) as envoy,
        Load(Client(envoy.url, http), ["shared", "base"]).running() as load,
    ):
        await load.some()
        await router.kill()
        without = await load.some(200)
        await router.start()
        await load.some()

    assert load.outcomes == load.all_served
    assert {answer.served_by for answer in without} == {f"pod-{n}" for n in range(NUM_PODS)}


@pytest.mark.parametrize(
    ("mode", "options", "expected"),
    [
        (Mode.ORIGINAL_DST, {"message_timeout_s": 0.5}, "router_timeout"),
        (Mode.OVERRIDE_HOST, {"message_timeout_s": 0.5}, "served"),
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
        streaming(envoy, http, "only-1", max_tokens=20) as answer,
    ):
        await answer.content.readline()
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


# --- pods ------------------------------------------------------------------------------------


FALLBACKS = {
    Mode.ORIGINAL_DST: {},
    Mode.OVERRIDE_HOST: {"destination": {"num_fallbacks": 2}},
}
"""The router's configuration with which Envoy has other addresses to dial."""

SEES_NO_KILL = {"scrape": {"interval_s": 60}, "policy": {"name": "random"}}
"""At random, because the founding policy stays with a pod. Of forty requests, one run in millions
sends none to the dead one of three."""

KNOW_OTHERS = pytest.mark.parametrize("mode", list(FALLBACKS), ids=str)
CAUSE = "cause="


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


@KNOW_OTHERS
async def test_a_killed_pod_costs_at_most_its_running_requests(
    mode: Mode, http: aiohttp.ClientSession
) -> None:
    """No client sees a refused connection, not even while the router still chooses the pod."""
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

    assert set(load.outcomes) <= {"served", "endpoint_unavailable"}
    assert len(load.lost_s) <= NUM_CLIENTS, causes(envoy)
    # UC: the connection broke while the pod had the request. UF would be one that was refused.
    assert causes(envoy).keys() <= {"200/-", "503/UC"}


async def has_logged(envoy: EnvoyProcess, num_requests: int) -> bool:
    return sum(causes(envoy).values()) >= num_requests


@KNOW_OTHERS
async def test_a_fallback_is_dialled_where_the_first_address_refuses(
    mode: Mode, http: aiohttp.ClientSession
) -> None:
    """The router still chooses pods that were just killed, one and then two of three."""
    async with (
        own_pods() as pods,
        RouterProcess(router_config(pods, **SEES_NO_KILL, **FALLBACKS[mode])) as router,
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
        RouterProcess(router_config(pods, scrape={"interval_s": 60})) as router,
        running_envoy(Mode.ORIGINAL_DST, router) as envoy,
    ):
        client = Client(envoy.url, http)
        await pods[0].kill()
        answer = await client.chat("only-0")
        refused = await envoy.stats("cluster.pods.upstream_cx_connect_fail$")

    assert outcome(answer) == "endpoint_unavailable"
    assert list(refused.values()) == [3]


@pytest.mark.parametrize("body", list(RequestBody), ids=str)
async def test_the_whole_body_goes_to_a_fallback_in_every_body_mode(
    body: RequestBody, http: aiohttp.ClientSession
) -> None:
    asks_for_body = body is RequestBody.STREAMED_STRICT
    config = {**SEES_NO_KILL, "request": {"allow_mode_override": asks_for_body}}
    async with (
        own_pods() as pods,
        RouterProcess(router_config(pods, **config)) as router,
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


@KNOW_OTHERS
async def test_a_request_that_a_pod_has_begun_is_not_sent_to_another(
    mode: Mode, http: aiohttp.ClientSession
) -> None:
    async with (
        own_pods(profile=SLOW) as pods,
        RouterProcess(router_config(pods, **FALLBACKS[mode])) as router,
        running_envoy(mode, router) as envoy,
        asyncio.TaskGroup() as group,
    ):
        client = Client(envoy.url, http)
        request = group.create_task(client.chat("base", max_tokens=200))
        [busy] = await eventually(lambda: _that_have_requests(pods))
        await busy.kill()
        answer = await request
        seen = [len(pod.pod.last_requests) for pod in pods]

    assert outcome(answer) == "endpoint_unavailable"
    assert sum(seen) == 1


async def _that_have_requests(pods: list[RunningPod]) -> list[RunningPod]:
    return [pod for pod in pods if pod.pod.last_requests]


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
        await eventually(lambda: _are_served_at_once(envoy, load), every_s=0)


async def _are_served_at_once(envoy: EnvoyProcess, load: Load) -> bool:
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
            router_config(pods, destination={"num_fallbacks": 2}, scrape={"interval_s": 60})
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
        Mode.OVERRIDE_HOST, router, num_pods=len(pods), static_pods=pods
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
        answers = [await client.request("POST", PATH, chat("shared")) for _ in range(100)]
        ejected = (await envoy.stats(EJECTED))[EJECTED]

    # The pods' own responses, and not Envoy's that there is no pod.
    assert {(answer.status, answer.body) for answer in answers} == {(503, b"")}
    assert 1 <= ejected <= 2


# --- many at once ----------------------------------------------------------------------------


async def test_more_than_1024_requests_can_be_under_decision_at_once(
    pods: list[RunningPod],
) -> None:
    """Envoy's default limit of streams to the router turns the rest into errors."""
    num_requests, body = 1500, chat("only-1")
    head = (
        f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    ).encode()
    async with (
        RouterProcess(router_config(pods)) as router,
        running_envoy(Mode.ORIGINAL_DST, router) as envoy,
    ):
        connections = [
            await asyncio.open_connection("127.0.0.1", envoy.port) for _ in range(num_requests)
        ]
        for _, writer in connections:
            writer.write(head + body[:10])
        await eventually(lambda: _has_open(envoy, num_requests), within_s=60)
        for _, writer in connections:
            writer.write(body[10:])
        lines = await asyncio.gather(*(reader.readline() for reader, _ in connections))
        for _, writer in connections:
            writer.close()
        await eventually(router.has_none_in_flight)

    assert Counter(lines) == {b"HTTP/1.1 200 OK\r\n": num_requests}


async def _has_open(envoy: EnvoyProcess, num_streams: int) -> bool:
    name = "cluster.router.upstream_rq_active"
    return (await envoy.stats(f"{name}$"))[name] >= num_streams
