"""What clients see when something breaks: a clear status or their answer, and never a hang."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import yaml

from extproc.envoyconfig import BootstrapOptions, Mode, RequestBody, render
from extproc.sim.engine.profiles import INSTANT
from extproc.sim.fakepod.pod import RunningPod, start_pod
from tests.e2e.conftest import (
    MAX_BODY_BYTES,
    NUM_PODS,
    knows_pods,
    pod_config,
    router_config,
    running_envoy,
)
from tests.e2e.harness import (
    Answer,
    Client,
    EnvoyProcess,
    RouterProcess,
    chat,
    eventually,
    free_port,
)

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

PATH = "/v1/chat/completions"
TALKATIVE = replace(INSTANT, step_s=0.05)
"""An engine that needs 50 ms for a token."""

CLEAR = {"router_unavailable", "router_timeout", "endpoint_unavailable", "no_endpoints"}
"""Codes of the errors that a client may see while something is broken."""


def outcome(answer: Answer) -> str:
    """`served`, or the code of a clear error."""
    if answer.status == 200:
        return "served"
    assert answer.status in (500, 503, 504), answer
    code = str(answer.error_code)
    assert code in CLEAR, answer
    return code


class Load:
    """Clients that ask without pause, until told to stop."""

    def __init__(self, client: Client, models: list[str], num_clients: int = 8) -> None:
        self.answers: list[Answer] = []
        self._client = client
        self._models = models
        self._num_clients = num_clients
        self._stopped = False

    async def _ask(self, number: int) -> None:
        while not self._stopped:
            model = self._models[number % len(self._models)]
            async with asyncio.timeout(60):
                self.answers.append(await self._client.chat(model))
            number += 1

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Load]:
        async with asyncio.TaskGroup() as group:
            for number in range(self._num_clients):
                group.create_task(self._ask(number))
            try:
                yield self
            finally:
                self._stopped = True

    async def some(self, num: int = 50) -> list[Answer]:
        """The next `num` answers."""
        seen = len(self.answers)

        async def has_enough() -> bool:
            return len(self.answers) >= seen + num

        await eventually(has_enough)
        return self.answers[seen : seen + num]


@asynccontextmanager
async def streaming(
    envoy: EnvoyProcess, http: aiohttp.ClientSession, model: str, **body: Any
) -> AsyncIterator[aiohttp.ClientResponse]:
    """A streaming answer that has begun."""
    data = chat(model, stream=True, **body)
    headers = {"content-type": "application/json"}
    async with http.post(envoy.url + PATH, data=data, headers=headers) as answer:
        yield answer


@asynccontextmanager
async def own_pods(**more: Any) -> AsyncIterator[list[RunningPod]]:
    pods = [await start_pod(pod_config(number, **more)) for number in range(NUM_PODS)]
    try:
        yield pods
    finally:
        for pod in pods:
            await pod.stop()


# --- the router ------------------------------------------------------------------------------


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def router(pods: list[RunningPod]) -> AsyncIterator[RouterProcess]:
    """One that tests kill or stop, and leave as they found it."""
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
    # And nothing else: what listens again and has not asked the pods yet turns requests away.
    assert {outcome(answer) for answer in load.answers} == {"served", "router_unavailable"}


async def test_with_override_host_everybody_is_served_while_the_router_is_gone(
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

    assert Counter(map(outcome, load.answers)) == {"served": len(load.answers)}
    assert {answer.served_by for answer in without} == {f"pod-{n}" for n in range(NUM_PODS)}


@pytest.mark.parametrize(
    ("mode", "expected"),
    [(Mode.ORIGINAL_DST, "router_timeout"), (Mode.OVERRIDE_HOST, "served")],
)
async def test_a_router_that_hangs_costs_the_message_timeout(
    mode: Mode, expected: str, router: RouterProcess, http: aiohttp.ClientSession
) -> None:
    async with (
        running_envoy(mode, router, message_timeout_s=0.5) as envoy,
    ):
        client = Client(envoy.url, http)
        await eventually(lambda: is_served(client))
        router.send(signal.SIGSTOP)
        answer = await client.chat("shared")
        router.send(signal.SIGCONT)
        await eventually(lambda: is_served(client))

    assert outcome(answer) == expected


async def test_in_full_duplex_a_router_that_hangs_costs_the_pings_to_it(
    router: RouterProcess, http: aiohttp.ClientSession
) -> None:
    """No message timer runs there: Envoy gives the connection up, as often as it may retry."""
    async with (
        running_envoy(Mode.FULL_DUPLEX, router, router_ping_s=0.5) as envoy,
    ):
        client = Client(envoy.url, http)
        await eventually(lambda: is_served(client))
        router.send(signal.SIGSTOP)
        answer = await client.chat("shared")
        router.send(signal.SIGCONT)
        given_up = await envoy.stats("cluster.router.http2.keepalive_timeout")
        await eventually(lambda: is_served(client))

    assert outcome(answer) == "router_unavailable"
    assert sum(given_up.values()) >= 3


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


async def test_a_running_answer_does_not_need_the_router(http: aiohttp.ClientSession) -> None:
    async with (
        own_pods(profile=TALKATIVE) as pods,
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
    """Not ready at once, the request whose body is still coming is served, and then it ends."""
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
    # One is the access log's stream, if it is open already.
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
"""What the router's configuration must say, so that Envoy has other addresses."""

SEES_NO_KILL = {"scrape": {"interval_s": 60}, "policy": {"name": "random"}}
"""By chance, as the founding rule stays with a pod. Of forty requests, one run in millions sends
none to the dead one of three."""

KNOW_OTHERS = pytest.mark.parametrize("mode", list(FALLBACKS), ids=str)
CAUSE = "cause="


def with_causes(config: str) -> str:
    """A bootstrap whose Envoy also writes each request's response flags to its log."""
    bootstrap = yaml.safe_load(config)
    listener = bootstrap["static_resources"]["listeners"][0]
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    kind = "type.googleapis.com/envoy.extensions.access_loggers.stream.v3.StdoutAccessLog"
    line = f"{CAUSE}%RESPONSE_CODE%/%RESPONSE_FLAGS%\n"
    log_format = {"text_format_source": {"inline_string": line}}
    manager["access_log"].append(
        {
            "name": "envoy.access_loggers.stdout",
            "typed_config": {"@type": kind, "log_format": log_format},
        }
    )
    return yaml.safe_dump(bootstrap)


def causes(envoy: EnvoyProcess) -> Counter[str]:
    """How many requests ended with which status and response flags."""
    lines = envoy.log.splitlines()
    return Counter(line.removeprefix(CAUSE) for line in lines if line.startswith(CAUSE))


@asynccontextmanager
async def telling_envoy(mode: Mode, router: RouterProcess) -> AsyncIterator[EnvoyProcess]:
    options = BootstrapOptions(mode, max_body_bytes=MAX_BODY_BYTES, routers=(router.address,))
    async with EnvoyProcess(with_causes(render(options))) as envoy:
        if mode is Mode.OVERRIDE_HOST:
            await knows_pods(envoy, NUM_PODS)
        yield envoy


@KNOW_OTHERS
async def test_a_killed_pod_costs_at_most_what_it_was_running(
    mode: Mode, http: aiohttp.ClientSession
) -> None:
    """No client hears of a refused connection, also while the router believes in the pod."""
    num_clients = 8
    async with (
        own_pods(profile=TALKATIVE) as pods,
        RouterProcess(router_config(pods, **FALLBACKS[mode])) as router,
        telling_envoy(mode, router) as envoy,
        Load(Client(envoy.url, http), ["shared", "base"], num_clients).running() as load,
    ):
        await load.some()
        await pods[0].kill()
        await load.some(200)
        is_over = await eventually(lambda: _is_told(envoy, len(load.answers)))

    assert is_over
    lost = [answer for answer in load.answers if outcome(answer) != "served"]
    assert len(lost) <= num_clients, causes(envoy)
    # UC: the connection broke while the pod had the request. UF would be one that was refused.
    assert causes(envoy).keys() <= {"200/-", "503/UC"}


async def _is_told(envoy: EnvoyProcess, num_requests: int) -> bool:
    return sum(causes(envoy).values()) >= num_requests


@KNOW_OTHERS
async def test_a_fallback_is_dialled_where_the_first_address_refuses(
    mode: Mode, http: aiohttp.ClientSession
) -> None:
    """The router still believes in the pods that have just gone, one and then two of three."""
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


async def test_where_there_is_no_other_pod_the_same_is_dialled_again(
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
async def test_the_whole_body_goes_to_an_alternate_however_it_came(
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
        own_pods(profile=TALKATIVE) as pods,
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


async def test_a_killed_pod_is_no_longer_chosen_once_it_gives_no_report(
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
    """Whether the next requests need no second attempt; as a third of them would."""
    before = await envoy.stats("cluster.pods.upstream_rq_retry$")
    answers = await load.some(50)
    after = await envoy.stats("cluster.pods.upstream_rq_retry$")
    return after == before and all(answer.status == 200 for answer in answers)


async def test_a_pod_that_the_router_names_is_dialled_though_envoy_has_ejected_it(
    http: aiohttp.ClientSession,
) -> None:
    """Ejections are for Envoy's own choice. Each dial costs a retry, and nothing else."""
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


async def failing_pod(status: bytes) -> asyncio.Server:
    """A pod that answers everything with this error."""

    async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await reader.read(65536):
            writer.write(b"HTTP/1.1 %s\r\ncontent-length: 0\r\n\r\n" % status)
        writer.close()

    return await asyncio.start_server(on_connection, "127.0.0.1", 0)


@asynccontextmanager
async def without_router(*pods: str) -> AsyncIterator[EnvoyProcess]:
    """An Envoy that chooses among these pods itself."""
    router = f"127.0.0.1:{free_port()}"
    async with running_envoy(
        Mode.OVERRIDE_HOST, router, num_pods=len(pods), static_pods=pods
    ) as envoy:
        yield envoy


async def test_a_pod_that_answers_nothing_but_errors_is_left_out_where_envoy_chooses(
    pods: list[RunningPod], http: aiohttp.ClientSession
) -> None:
    broken = await failing_pod(b"500 Internal Server Error")
    host, port = broken.sockets[0].getsockname()
    async with broken, without_router(f"{host}:{port}", pods[0].address) as envoy:
        client = Client(envoy.url, http)
        while not (await envoy.stats(EJECTED))[EJECTED]:
            await client.chat("shared")
        answers = [await client.chat("shared") for _ in range(20)]

    assert {answer.served_by for answer in answers} == {"pod-0"}


async def test_half_of_the_pods_stay_where_all_answer_that_they_are_full(
    http: aiohttp.ClientSession,
) -> None:
    full = [await failing_pod(b"503 Service Unavailable") for _ in range(4)]
    addresses = ["{}:{}".format(*server.sockets[0].getsockname()) for server in full]
    async with without_router(*addresses) as envoy:
        client = Client(envoy.url, http)
        answers = [await client.request("POST", PATH, chat("shared")) for _ in range(100)]
        ejected = (await envoy.stats(EJECTED))[EJECTED]
    for server in full:
        server.close()

    # The pods' own words, and not Envoy's that there is none.
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
