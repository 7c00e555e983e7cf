"""The endpoint picker protocol as a table: one row, one clause, over gRPC and without a gateway.

`extproc epp` as charts start it, on a real API server: an InferencePool, three pods that are ready
and one that is not. Pod N has the adapter `only-N`, and all have `shared`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from grpc import aio

from tests.e2e.charts import HEALTH_NAMES, SERVING, EppProcess, health
from tests.e2e.conftest import pod_config
from tests.e2e.harness import free_port
from tests.fakepods import running_pods
from tests.kubernetes.apiserver import ApiServer
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.replay import (
    DROPPED_REASON,
    ENVOY,
    MAX_CHUNK_BYTES,
    Asks,
    Exchange,
    Replies,
    Spelling,
)
from tests.kubernetes.replayrows import (
    DRAINING,
    IN_VALUE,
    NOBODY,
    READY,
    REFUSALS,
    SELECTION,
    SPELLINGS,
    SUBSETS,
    Row,
)
from tests.request import ext_proc
from tests.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="session")

NUM_PODS = 4
MAX_PENDING = 4
"""Requests on one pod from which on it gets no more."""
SESSION = "x-session"


@dataclass(frozen=True)
class Fleet:
    """A router and the pods of its pool.

    Attributes:
        channel: To its ext_proc port.
        health: To its health port.
        pods: Addresses.
        router: The process.
    """

    channel: Any
    health: Any
    pods: list[str]
    router: EppProcess


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def fleet(api_server: ApiServer, crds: Path) -> AsyncIterator[Fleet]:
    namespace, port = "replay", free_port()
    api_server.kubectl("create", "namespace", namespace)
    kubeconfig = api_server.kubeconfig_for(api_server.admin_token, namespace=namespace)
    config: dict[str, Any] = {
        "discovery": {"kubernetes": {"kubeconfig": str(kubeconfig)}},
        "destination": {"num_fallbacks": 2},
        "policy": {"name": "founding"},  # its choices do not depend on how long a load takes
        "admission": {"max_pending_per_endpoint": MAX_PENDING},
        "request": {"session_header": SESSION, "max_body_bytes": 1_000_000, "max_hold_s": 0.5},
        "scrape": {"interval_s": 1.0},
    }
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(Cluster(api_server, namespace))
        ips = [f"127.0.0.{number + 2}" for number in range(NUM_PODS)]
        pods = running_pods(*map(pod_config, range(NUM_PODS)), hosts=ips, port=port)
        for number, pod in enumerate(await stack.enter_async_context(pods)):
            await cluster.create_pod(pod.name, {"app": "llm"})
            await cluster.set_pod(pod.name, ip=ips[number], is_ready=number != DRAINING)
        await cluster.put_pool("replayed", {"app": "llm"}, [port])
        flags = ("--pool-name", "replayed", "--pool-namespace", namespace)
        process = EppProcess(config, *flags, "--secure-serving=false", "--health-checking")
        router = await stack.enter_async_context(process)
        channel = await stack.enter_async_context(aio.insecure_channel(router.address))
        health_channel = await stack.enter_async_context(
            aio.insecure_channel(router.health_address)
        )
        addresses = [f"{ip}:{port}" for ip in ips]
        yield Fleet(channel, health_channel, addresses, router)


@pytest_asyncio.fixture(loop_scope="session")
async def exchange(fleet: Fleet) -> AsyncIterator[Exchange]:
    async with Exchange(fleet.channel) as made:
        yield made


# --- requests --------------------------------------------------------------------------------


def parameters() -> list[Any]:
    """All rows by their names."""
    rows = (*SELECTION, *SUBSETS, *REFUSALS, *SPELLINGS)
    return [pytest.param(row, id=row.name) for row in rows]


@pytest.mark.parametrize("row", parameters())
async def test_a_request_is_routed_or_refused_as_the_protocol_says(
    row: Row, fleet: Fleet, exchange: Exchange
) -> None:
    replies = await exchange.ask(row.asks, fleet.pods)

    if row.pods:
        is_routed(replies, row.asks, {fleet.pods[number] for number in row.pods})
    else:
        is_refused(replies, *row.error)
    assert await exchange.end() == 0


def is_routed(replies: Replies, asks: Asks, allowed: set[str]) -> None:
    """Headers, then the whole body, then the trailers; one destination or several, each once."""
    assert replies.destinations[0] in allowed
    assert len(set(replies.destinations)) == len(replies.destinations) == min(3, len(allowed))
    assert set(replies.destinations) <= allowed
    num_trailers = int(asks.has_trailers)
    if asks.mode == ext_proc.BUFFERED:
        assert replies.phases == ["request_headers", "request_body"]
        return
    bodies = ["request_body"] * len(replies.chunks)
    assert replies.phases == ["request_headers", *bodies, *["request_trailers"] * num_trailers]
    assert b"".join(replies.chunks) == b"".join(asks.body)
    assert max(map(len, replies.chunks)) <= MAX_CHUNK_BYTES
    assert replies.ends == [False] * (len(replies.chunks) - 1) + [not asks.has_trailers]


def is_refused(replies: Replies, status: int, code: str) -> None:
    """One reply ends it, before anything was let through."""
    assert replies.phases == ["immediate_response"]
    assert (replies.status, replies.code) == (status, code)
    assert replies.headers["content-type"] == "application/json"
    is_to_be_tried_again = status in (429, 503)
    assert (replies.headers.get("retry-after") == "1") is is_to_be_tried_again
    assert (DROPPED_REASON in replies.headers) is is_to_be_tried_again


async def test_a_request_is_429_where_every_pod_that_could_serve_it_is_full(fleet: Fleet) -> None:
    async with AsyncExitStack() as stack:
        for _ in range(MAX_PENDING):
            held = await stack.enter_async_context(Exchange(fleet.channel))
            is_routed(await held.ask(Asks("only-1"), fleet.pods), Asks("only-1"), {fleet.pods[1]})
        last = await stack.enter_async_context(Exchange(fleet.channel))

        replies = await last.ask(Asks("only-1"), fleet.pods)

    is_refused(replies, 429, "saturated")
    assert replies.headers[DROPPED_REASON] == "rejected-saturated"
    await eventually(fleet.router.has_none_in_flight)


async def test_an_adapter_stays_where_it_is_in_flight(fleet: Fleet) -> None:
    async with Exchange(fleet.channel) as held, Exchange(fleet.channel) as other:
        await held.ask(Asks("shared", subset=(2,)), fleet.pods)
        replies = await other.ask(Asks("shared"), fleet.pods)

    assert replies.destinations[0] == fleet.pods[2]
    await eventually(fleet.router.has_none_in_flight)


# --- requests without a body -----------------------------------------------------------------


def get(path: str, subset: tuple[int | str, ...] | None = None, **headers: str) -> Asks:
    return Asks(method="GET", path=path, has_body=False, subset=subset, headers=headers)


OWN = [f"only-{number}" for number in READY]


@pytest.mark.parametrize(
    ("asks", "names"),
    [
        pytest.param(get("/v1/models"), [*OWN, "shared"], id="all-models-without-a-hint"),
        pytest.param(get("/v1/models", (1,)), ["only-1", "shared"], id="those-of-the-subset"),
        pytest.param(get("/v1/models", ()), 503, id="none-with-an-empty-hint"),
        pytest.param(get("/v1/models", (NOBODY,)), 503, id="none-of-strangers"),
        pytest.param(get("/v1/models", (DRAINING,)), 503, id="none-of-a-pod-that-drains"),
        pytest.param(get("/v1/models/only-1", (1,)), "only-1", id="one-of-the-subset"),
        pytest.param(get("/v1/models/only-1", (0,)), 503, id="one-outside-the-subset"),
        pytest.param(get("/v1/models/only-3"), 503, id="one-of-a-pod-that-drains"),
        pytest.param(get("/v1/models/only-99"), 404, id="one-that-nobody-has"),
        pytest.param(get("/metrics"), 404, id="a-path-of-the-pods-own"),
        pytest.param(get("/v1/responses/r"), 400, id="a-stored-response-without-a-session"),
    ],
)
async def test_a_get_is_served_by_the_router(
    asks: Asks, names: object, fleet: Fleet, exchange: Exchange
) -> None:
    replies = await exchange.ask(asks, fleet.pods)

    assert replies.phases == ["immediate_response"]
    if isinstance(names, int):
        assert replies.status == names
    else:
        assert replies.status == 200
        listed = replies.body.get("data")
        found = replies.body["id"] if listed is None else [card["id"] for card in listed]
        assert found == names or found[1:] == names, "the base model comes first"
    assert await exchange.end() == 0


async def test_a_get_goes_where_its_session_is_as_long_as_the_hint_allows(fleet: Fleet) -> None:
    session = {SESSION: "s-1"}
    asked = Asks("shared", path="/v1/responses", headers=session, subset=(1,))
    results = []
    for asks in (
        asked,
        get("/v1/responses/r", (1,), **session),
        get("/v1/responses/r", (0,), **session),
        get("/v1/responses/r", (), **session),
    ):
        async with Exchange(fleet.channel) as exchange:
            replies = await exchange.ask(asks, fleet.pods)
            results.append(replies.destinations[:1] or replies.status)

    assert results == [[fleet.pods[1]], [fleet.pods[1]], 400, 503]


# --- responses -------------------------------------------------------------------------------


def answered(*chunks: bytes, has_trailers: bool = False, **headers: str) -> list[bytes]:
    """The messages of a response."""
    lines = {":status": "200", **headers}
    last = len(chunks) - 1
    bodies = [
        ext_proc.response_body(chunk, number == last and not has_trailers)
        for number, chunk in enumerate(chunks)
    ]
    trailers = [ext_proc.response_trailers()] if has_trailers else []
    return [ext_proc.response_headers(lines, end_of_stream=not chunks), *bodies, *trailers]


TOKENS = (b'data: {"choices": []}\n\n', b"data: [DONE]\n\n", b"")


@pytest.mark.parametrize(
    ("chunks", "has_trailers"),
    [
        pytest.param(TOKENS, False, id="tokens-one-by-one"),
        pytest.param(TOKENS[:2], True, id="tokens-and-trailers"),
        pytest.param((b'{"id": "a', b'bc"}'), False, id="json-in-two-chunks"),
        pytest.param((b'{"id": "abc"}', b""), False, id="json-and-an-empty-end"),
        pytest.param((b"kein JSON",), False, id="no-json-at-all"),
        pytest.param((), False, id="headers-alone"),
    ],
)
@pytest.mark.parametrize("has_request", [True, False], ids=["routed", "unasked"])
async def test_a_response_passes_as_it_comes(
    chunks: tuple[bytes, ...], has_trailers: bool, has_request: bool, fleet: Fleet,
    exchange: Exchange,
) -> None:  # fmt: skip
    """Also one whose request the router did not see: another filter's response."""
    if has_request:
        await exchange.ask(Asks("shared"), fleet.pods)
    replies = await exchange.respond(*answered(*chunks, has_trailers=has_trailers))

    assert replies.phases == [
        "response_headers",
        *["response_body"] * len(chunks),
        *["response_trailers"] * has_trailers,
    ]
    assert replies.chunks == list(chunks)
    assert replies.ends == [False] * (len(chunks) - 1) + [not has_trailers] * bool(chunks)
    assert await exchange.end() == 0


async def test_a_long_chunk_of_a_response_is_echoed_in_parts(
    fleet: Fleet, exchange: Exchange
) -> None:
    data = b"x" * 100_000
    await exchange.ask(Asks("shared"), fleet.pods)
    await exchange.respond(*answered())
    replies = await exchange.respond(ext_proc.response_body(data, end_of_stream=True))
    await exchange.next()

    assert b"".join(replies.chunks) == data
    assert max(map(len, replies.chunks)) <= MAX_CHUNK_BYTES
    assert replies.ends == [False, True]


@pytest.mark.parametrize(
    "spelling",
    [
        pytest.param(ENVOY, id="raw-value"),
        pytest.param(IN_VALUE, id="value"),
    ],
)
async def test_the_pod_that_served_is_counted_as_busy_until_the_status_comes(
    spelling: Spelling, fleet: Fleet
) -> None:
    """The data plane went on to the second of the list, and reports it."""
    completed = "extproc_completions_total"
    before = await outcomes(fleet, completed)
    async with Exchange(fleet.channel) as exchange:
        replies = await exchange.ask(Asks("shared"), fleet.pods)
        first, second = replies.destinations[:2]
        served = {"envoy.lb": {"x-gateway-destination-endpoint-served": second}}
        message = ext_proc.response_headers({":status": "200"}, end_of_stream=True, metadata=served)
        then = await fleet.router.in_flight()
        await exchange.respond(spelling.respelled(message))
        now = await fleet.router.in_flight()
        await exchange.end()

    assert (then[first], then[second]) == (1, 0)
    assert (now[first], now[second]) == (0, 1)
    await eventually(fleet.router.has_none_in_flight)
    after = await outcomes(fleet, completed)
    assert {key: after[key] - before[key] for key in after if after[key] != before[key]} == {
        "completed": 1.0
    }


async def outcomes(fleet: Fleet, name: str) -> dict[str, float]:
    """How often requests ended in which way."""
    lines = [line for line in (await fleet.router.metrics()).splitlines() if line.startswith(name)]
    return {line.split('"')[1]: float(line.rpartition(" ")[2]) for line in lines}


# --- health ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HEALTH_NAMES)
async def test_health_is_served_by_every_name(name: str, fleet: Fleet) -> None:
    statuses = [await health(channel, name) for channel in (fleet.channel, fleet.health)]

    assert statuses == [SERVING, SERVING]
