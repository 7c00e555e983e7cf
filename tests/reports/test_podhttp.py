from __future__ import annotations

import asyncio
import contextlib
import gzip
import itertools
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing, contextmanager

import pytest
from aiohttp import web
from aiohttp.test_utils import unused_port
from yarl import URL

from extproc.reports.podclient import Answer, PodClient
from extproc.reports.podhttp import (
    FAILURES,
    MAX_HEADS,
    ResponseError,
    TooLargeError,
    base_url,
    describe,
    describe_status,
)
from extproc.types import Endpoint
from tests.servers import tcp_server, web_server

Get = Callable[..., Awaitable[tuple[int, bytes]]]
Open = Callable[..., AbstractAsyncContextManager[Get]]


@asynccontextmanager
async def own(headers: Mapping[str, str] | None = None) -> AsyncIterator[Get]:
    async def posted(url: URL, *, max_bytes: int) -> tuple[int, bytes]:
        status, _, body = await PodClient(headers).ask("POST", url, {}, max_bytes=max_bytes)
        return status, body

    yield posted


@asynccontextmanager
async def kept(headers: Mapping[str, str] | None = None) -> AsyncIterator[Get]:
    with closing(PodClient(headers)) as client:
        yield client.get


both = pytest.mark.parametrize("opening", [own, kept])
"""Calls on a connection of their own, and what is read again and again."""


@asynccontextmanager
async def serving(handler: Callable[[web.Request], web.Response]) -> AsyncIterator[URL]:
    async def answer(request: web.Request) -> web.Response:
        return handler(request)

    async with web_server(answer) as url:
        yield URL(url)


async def test_calls_to_a_pod_do_not_wait_for_each_other() -> None:
    have_come = asyncio.Barrier(10)

    async def answer(_request: web.Request) -> web.Response:
        await have_come.wait()
        return web.Response()

    client = PodClient()
    async with web_server(answer) as url, asyncio.timeout(60):
        calls = [client.ask("POST", URL(url), {}, max_bytes=10) for _ in range(10)]
        assert [each.status for each in await asyncio.gather(*calls)] == [200] * 10


async def test_a_document_is_sent_as_json_and_the_type_of_the_answer_returned() -> None:
    seen: list[tuple[str, str, object]] = []

    async def answer(request: web.Request) -> web.Response:
        document = await request.json() if request.can_read_body else None
        seen.append((request.method, request.content_type, document))
        return web.Response(body=b"", content_type="Text/Event-Stream", charset="utf-8")

    client = PodClient()
    async with web_server(answer) as url:
        answers = [
            await client.ask(method, URL(url), document, max_bytes=10)
            for method, document in (("POST", {"a": "ü"}), ("GET", None))
        ]

    assert seen == [
        ("POST", "application/json", {"a": "ü"}),
        ("GET", "application/octet-stream", None),
    ]
    assert answers == [Answer(200, "text/event-stream", b"")] * 2


@both
async def test_get_returns_status_and_body_up_to_the_limit(opening: Open) -> None:
    async with (
        serving(lambda _: web.Response(status=418, body=b"x" * 1000)) as url,
        opening() as fetch,
    ):
        assert await fetch(url, max_bytes=1000) == (418, b"x" * 1000)
        with pytest.raises(TooLargeError, match="longer than 999 bytes"):
            await fetch(url, max_bytes=999)


@both
async def test_get_does_not_follow_redirects(opening: Open) -> None:
    def redirect(_: web.Request) -> web.Response:
        return web.Response(status=307, headers={"Location": "http://127.0.0.1:1/"})

    async with serving(redirect) as url, opening() as fetch:
        assert (await fetch(url, max_bytes=10))[0] == 307


@both
async def test_a_session_sends_its_headers_and_asks_for_no_compression(opening: Open) -> None:
    seen: list[web.Request] = []

    def remember(request: web.Request) -> web.Response:
        seen.append(request)
        return web.Response(headers={"Set-Cookie": "a=b"})

    async with (
        serving(remember) as url,
        opening({"Authorization": "Bearer secret"}) as fetch,
    ):
        await fetch(url, max_bytes=10)
        await fetch(url, max_bytes=10)

    assert seen[1].headers["Authorization"] == "Bearer secret"
    assert seen[1].headers["Accept-Encoding"] == "identity"
    assert "Cookie" not in seen[1].headers


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        (Endpoint("10.0.0.1:8000"), "http://10.0.0.1:8000"),
        (Endpoint("[::1]:8000"), "http://[::1]:8000"),
        (Endpoint("10.0.0.1:8000", url="https://pod/"), "https://pod"),
    ],
)
def test_own_calls_go_to_the_url_or_else_to_the_address(endpoint: Endpoint, url: str) -> None:
    assert base_url(endpoint) == url


def test_an_error_without_a_text_is_described_by_its_name() -> None:
    assert describe(ConnectionResetError()) == "ConnectionResetError"
    assert describe(TimeoutError()) == "timed out"
    assert describe(ResponseError("HTTP 503")) == "HTTP 503"


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (503, "HTTP 503 Service Unavailable"),
        (401, "HTTP 401 Unauthorized: pods.api_key_file?"),
        (403, "HTTP 403 Forbidden: pods.api_key_file?"),
        (799, "HTTP 799"),
    ],
)
def test_a_status_is_described_by_its_meaning(status: int, said: str) -> None:
    assert describe_status(status) == said


@both
async def test_a_refused_connection_is_described_by_its_cause(opening: Open) -> None:
    async with opening() as fetch:
        with pytest.raises(OSError) as error:  # noqa: PT011 # whichever kind
            await fetch(URL(f"http://127.0.0.1:{unused_port()}/"), max_bytes=1)

    assert describe(error.value) == "connection refused"


# --- what a server that means ill answers ---------------------------------------------------------

MIB = 1024 * 1024


@contextmanager
def ending(writer: asyncio.StreamWriter) -> Iterator[None]:
    """Close a connection after the block, whether or not the client or the server has gone."""
    try:
        yield
        writer.close()
    except (ConnectionError, asyncio.IncompleteReadError):
        writer.transport.abort()
    except asyncio.CancelledError:
        writer.transport.abort()
        raise


@asynccontextmanager
async def answering(*parts: bytes) -> AsyncIterator[URL]:
    """A server that answers with these bytes, the last ones again and again."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with ending(writer):
            await reader.readuntil(b"\r\n\r\n")
            for part in (*parts[:-1], *itertools.repeat(parts[-1], 10_000)):
                writer.write(part)
                await writer.drain()

    async with tcp_server(answer) as address:
        yield URL(f"http://{address}/")


@pytest.mark.parametrize(
    "parts",
    [
        (b"HTTP/1.1 ", b"2" * 1000),
        (b"HTTP/1.1 200 OK\r\n", b"x-a: b\r\n" * 100),
        (b"HTTP/1.1 200 OK\r\nx-a: ", b"b" * 1000),
        (b"HTTP/1.1 200 OK\r\n", b"b" * 1000),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1;", b"a" * 1000),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n", b"x-a: b\r\n" * 100),
    ],
    ids=["status", "headers", "value", "name", "chunk", "trailers"],
)
@both
async def test_a_head_without_an_end_is_given_up(opening: Open, parts: tuple[bytes, ...]) -> None:
    """Ten megabytes of each are there; they must not all be taken."""
    tracemalloc.start()
    try:
        async with answering(*parts) as url, opening() as fetch:
            with pytest.raises((ResponseError, TimeoutError)):
                async with asyncio.timeout(5):
                    await fetch(url, max_bytes=1000)
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert most_bytes < 2 * MIB


@pytest.mark.parametrize("head", [b"100 ", b"200 \r\ncontent-length: 0", b"204 "])
@both
async def test_endless_responses_are_not_read_to_their_end(opening: Open, head: bytes) -> None:
    """A read of the socket brings 10,000 of them: the event loop's time, and no await between."""
    flood = (b"HTTP/1.1 " + head + b"\r\n\r\n") * 10_000
    tracemalloc.start()
    try:
        async with answering(flood) as url, opening() as fetch:
            for _ in range(2):  # one answer may be taken, and what follows it is nobody's
                with contextlib.suppress(*FAILURES):
                    await asyncio.wait_for(fetch(url, max_bytes=1000), 30)
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert most_bytes < 3 * MIB


@both
async def test_a_few_provisional_responses_per_request_are_skipped(opening: Open) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with ending(writer):
            for _ in range(3):
                await reader.readuntil(b"\r\n\r\n")
                writer.write(b"HTTP/1.1 100 Continue\r\n\r\n" * (MAX_HEADS - 1))
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\npage")

    async with tcp_server(answer) as address, opening() as fetch:
        url = URL(f"http://{address}/")
        pages = [await fetch(url, max_bytes=1000) for _ in range(3)]

    assert pages == [(200, b"page")] * 3


@both
async def test_a_compressed_response_is_refused_unread(opening: Open) -> None:
    bomb = gzip.compress(bytes(64 * MIB))
    head = b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(bomb)
    tracemalloc.start()
    try:
        async with answering(head, bomb, b"") as url, opening() as fetch:
            with pytest.raises(ResponseError, match="compressed"):
                await fetch(url, max_bytes=100 * MIB)
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert most_bytes < 8 * MIB
