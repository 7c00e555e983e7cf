"""The largest body, to the byte, the most headers, and many requests at once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import aiohttp
import pytest

from extproc.envoy.bootstrap import BodyDelivery, Mode
from extproc.lab.fakepod.podserver import RunningPod
from tests.e2e.conftest import MAX_BODY_BYTES, router_config, running_envoy
from tests.e2e.harness import (
    Answer,
    Client,
    EnvoyProcess,
    RouterProcess,
    chat,
    h2_request,
    raw_request,
)
from tests.waiting import eventually

PATH = "/v1/chat/completions"
EDGE = {-1: 200, 0: 200, 1: 413}
"""Statuses by the bytes over the limit."""


def body_of(size_bytes: int, *, is_model_last: bool = False) -> bytes:
    """A request of exactly this size."""
    empty = len(chat("only-1"))
    body = chat("only-1", padding_bytes=size_bytes - empty, is_model_last=is_model_last)
    assert len(body) == size_bytes
    return body


async def chunked(body: bytes) -> AsyncIterator[bytes]:
    """The body without a content-length, so that its size is unknown before the end."""
    for start in range(0, len(body), 60_000):
        yield body[start : start + 60_000]


def check(answer: Answer, status: int) -> None:
    assert answer.status == status, answer.body[:200]
    if status == 200:
        assert answer.served_by == "pod-1"
    else:
        assert answer.error_code == "body_too_large"


@pytest.mark.parametrize("mode", list(Mode))
async def test_the_limit_is_exact_over_http1_and_http2(
    mode: Mode, router: RouterProcess, http: aiohttp.ClientSession
) -> None:
    async with running_envoy(mode, router) as envoy:
        for over_bytes, status in EDGE.items():
            body = body_of(MAX_BODY_BYTES + over_bytes)
            check(await Client(envoy.url, http).request("POST", PATH, body), status)
            check(await h2_request(envoy.port, body), status)


@pytest.mark.parametrize(
    "body", [BodyDelivery.BUFFERED, BodyDelivery.STREAMED, BodyDelivery.FULL_DUPLEX]
)
async def test_without_a_content_length_the_limit_is_exact_where_the_whole_body_is_read(
    body: BodyDelivery, router: RouterProcess, http: aiohttp.ClientSession
) -> None:
    """With the model at the end, so that no prefix decides."""
    async with running_envoy(Mode.ORIGINAL_DST, router, request_body=body) as envoy:
        for over_bytes, status in EDGE.items():
            content = chunked(body_of(MAX_BODY_BYTES + over_bytes, is_model_last=True))
            check(await Client(envoy.url, http).request("POST", PATH, content), status)


async def test_a_partial_body_with_the_model_behind_the_limit_is_too_large(
    router: RouterProcess, http: aiohttp.ClientSession
) -> None:
    async with running_envoy(
        Mode.ORIGINAL_DST,
        router,
        request_body=BodyDelivery.BUFFERED_PARTIAL,
        max_body_bytes=64 * 1024,
    ) as envoy:
        client = Client(envoy.url, http)
        first = await client.request("POST", PATH, chunked(body_of(300_000)))
        last = await client.request("POST", PATH, chunked(body_of(300_000, is_model_last=True)))

    check(first, 200)
    check(last, 413)


async def test_a_body_far_over_the_limit_is_refused_before_it_is_sent(
    router: RouterProcess, http: aiohttp.ClientSession
) -> None:
    """By Envoy where its limit is below the router's, in the same shape."""
    async with running_envoy(Mode.ORIGINAL_DST, router, max_body_bytes=1000) as envoy:
        answer = await Client(envoy.url, http).request("POST", PATH, body_of(100_000))

    check(answer, 413)


def request_of(num_lines: int) -> bytes:
    """A request with `num_lines` header lines; Envoy and the router add theirs."""
    body = chat("base")
    own = {"host": "x", "content-type": "application/json", "connection": "close"}
    own["content-length"] = str(len(body))
    more = {f"x-more-{number}": "1" for number in range(num_lines - len(own))}
    lines = "".join(f"{name}: {value}\r\n" for name, value in (own | more).items())
    return f"POST {PATH} HTTP/1.1\r\n{lines}\r\n".encode() + body


@pytest.mark.parametrize("mode", list(Mode))
async def test_a_request_with_any_number_of_header_lines_is_served_or_refused_with_431(
    mode: Mode, router: RouterProcess
) -> None:
    async with running_envoy(mode, router) as envoy:
        answers = [await raw_request(envoy.port, request_of(count)) for count in range(88, 104)]
    statuses = [answer.status for answer in answers]

    assert set(statuses) == {200, 431}
    assert statuses == sorted(statuses)
    assert {each.error_code for each in answers if each.status == 431} == {"headers_too_large"}
    await eventually(router.has_none_in_flight)


@pytest.mark.long
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
        await eventually(lambda: _has_open(envoy, num_requests))
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
