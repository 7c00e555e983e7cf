"""The largest body: one setting in Envoy and in the router, exact to the byte."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
import pytest

from extproc.envoyconfig import Mode, RequestBody
from tests.e2e.conftest import MAX_BODY_BYTES, running_envoy
from tests.e2e.harness import Answer, Client, RouterProcess, chat, h2_request

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

PATH = "/v1/chat/completions"
EDGE = [
    pytest.param(-1, 200, id="limit-1"),
    pytest.param(0, 200, id="limit"),
    pytest.param(1, 413, id="limit+1"),
]


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


@pytest.mark.parametrize(("over_bytes", "status"), EDGE)
@pytest.mark.parametrize("mode", list(Mode))
async def test_the_limit_is_exact_over_http1_and_http2(
    mode: Mode,
    over_bytes: int,
    status: int,
    router: RouterProcess,
    http: aiohttp.ClientSession,
) -> None:
    async with running_envoy(mode, router) as envoy:
        body = body_of(MAX_BODY_BYTES + over_bytes)
        check(await Client(envoy.url, http).request("POST", PATH, body), status)
        check(await h2_request(envoy.port, body), status)


@pytest.mark.parametrize(("over_bytes", "status"), EDGE)
@pytest.mark.parametrize(
    "body", [RequestBody.BUFFERED, RequestBody.STREAMED, RequestBody.FULL_DUPLEX]
)
async def test_without_a_content_length_the_limit_is_exact_where_the_whole_body_is_read(
    body: RequestBody,
    over_bytes: int,
    status: int,
    router: RouterProcess,
    http: aiohttp.ClientSession,
) -> None:
    """With the model at the end, so that no prefix decides."""
    async with running_envoy(Mode.ORIGINAL_DST, router, request_body=body) as envoy:
        content = chunked(body_of(MAX_BODY_BYTES + over_bytes, is_model_last=True))
        check(await Client(envoy.url, http).request("POST", PATH, content), status)


async def test_a_partial_body_with_the_model_behind_the_limit_is_too_large(
    router: RouterProcess, http: aiohttp.ClientSession
) -> None:
    async with running_envoy(
        Mode.ORIGINAL_DST,
        router,
        request_body=RequestBody.BUFFERED_PARTIAL,
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
