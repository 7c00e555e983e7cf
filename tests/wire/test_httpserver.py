"""Limits on the resources of stalled clients of an HTTP port, on both event loops."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import inspect
import logging
import socket
import tracemalloc
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, ParamSpec

import pytest
import uvloop
from aiohttp import ClientSession, TCPConnector, web

from extproc.wire.httpserver import HttpLimit, HttpLimits, HttpListener
from tests.conftest import IS_THOROUGH
from tests.waiting import eventually

NUM_CLIENTS = 20
PATIENCE_S = 60.0
NEVER_S = 3600.0
LARGE_BYTES = 8 * 1024 * 1024
"""More than the kernel keeps for a socket."""
PATIENT = HttpLimits(request_s=NEVER_S, idle_s=NEVER_S, answer_s=NEVER_S, tick_s=0.02)
"""The limits; each test shortens the one that it tries."""

P = ParamSpec("P")
LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


def on_each_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test that runs on an event loop of each kind."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        make_loop = LOOPS[str(kwargs.pop("kind_of_loop"))]
        with asyncio.Runner(loop_factory=make_loop) as runner:
            runner.run(asyncio.wait_for(test(*args, **kwargs), 3 * PATIENCE_S))

    own = inspect.signature(test)
    kind = inspect.Parameter("kind_of_loop", inspect.Parameter.KEYWORD_ONLY)
    run.__signature__ = own.replace(parameters=[*own.parameters.values(), kind])  # type: ignore[attr-defined]
    on_each: Callable[..., None] = pytest.mark.parametrize("kind_of_loop", LOOPS)(run)
    return on_each


class Served:
    """A listener with a small answer, a large one, and one that goes on."""

    def __init__(self, **limits: Any) -> None:
        self.dropped: Counter[HttpLimit] = Counter()
        self.num_large = 0
        self.listener = HttpListener("127.0.0.1", 0, replace(PATIENT, **limits), self.dropped)
        self.app = web.Application()
        self.app.router.add_route("*", "/small", self._small)
        self.app.router.add_post("/length", self._length)
        self.app.router.add_get("/large", self._large)
        self.app.router.add_get("/stream", self._stream)

    async def _small(self, request: web.Request) -> web.Response:
        return web.Response(text="small")

    async def _length(self, request: web.Request) -> web.Response:
        return web.Response(text=str(len(await request.content.read())))

    async def _large(self, request: web.Request) -> web.Response:
        self.num_large += 1
        return web.Response(body=bytes(LARGE_BYTES))

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"more\n")
            await asyncio.sleep(0.02)

    @property
    def num_open(self) -> int:
        return len(self.listener.guards)

    @property
    def num_unread_bytes(self) -> int:
        return sum(guard.num_unread_bytes for guard in self.listener.guards.values())

    async def get(self, connector: TCPConnector | None = None) -> str:
        url = f"http://127.0.0.1:{self.listener.port}/small"
        async with ClientSession(connector=connector) as http, http.get(url) as response:
            return await response.text()


@asynccontextmanager
async def serving(**limits: Any) -> AsyncIterator[Served]:
    served = Served(**limits)
    await served.listener.start(served.app)
    try:
        yield served
    finally:
        await served.listener.stop()


@asynccontextmanager
async def stalling(served: Served, sent: bytes, num: int = NUM_CLIENTS) -> AsyncIterator[list[Any]]:
    """Clients that send this, and then neither send nor read; their sockets."""
    loop, clients = asyncio.get_running_loop(), []
    try:
        for _ in range(num):
            client = socket.socket()
            clients.append(client)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            await loop.sock_connect(client, ("127.0.0.1", served.listener.port))
            await loop.sock_sendall(client, sent)
        yield clients
    finally:
        for client in clients:
            client.close()


async def send_until_gone(client: socket.socket, data: bytes, *, rest_s: float) -> None:
    """The other side has dropped the connection when it cannot be sent to any more."""
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(PATIENCE_S):
            while True:
                await asyncio.get_running_loop().sock_sendall(client, data)
                await asyncio.sleep(rest_s)


HEAD = b"GET /%b HTTP/1.1\r\nHost: localhost\r\n"


@pytest.mark.parametrize(
    "sent", [b"", b"G", HEAD % b"small", HEAD % b"small" + b"X-A: " + b"a" * 4000]
)
@on_each_loop
async def test_requests_that_never_get_complete_are_dropped(sent: bytes) -> None:
    async with serving(request_s=0.5) as served, stalling(served, sent):
        assert await served.get() == "small"
        await eventually(lambda: served.dropped[HttpLimit.REQUEST] == NUM_CLIENTS)
        await eventually(lambda: served.num_open == 0)

        assert await served.get() == "small"


@on_each_loop
async def test_headers_that_come_drop_by_drop_have_no_more_time() -> None:
    async with serving(request_s=0.5) as served, stalling(served, HEAD % b"small", 1) as [one]:
        await send_until_gone(one, b"X-A: a\r\n", rest_s=0.02)

        assert served.dropped == {HttpLimit.REQUEST: 1}


@pytest.mark.parametrize(
    "head", [b"Content-Length: 1000000000\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n5\r\nab"]
)
@on_each_loop
async def test_a_body_that_never_ends_is_not_waited_for(head: bytes) -> None:
    async with (
        serving(body_s=0.2) as served,
        stalling(served, HEAD % b"small" + head) as clients,
    ):
        await eventually(lambda: served.num_open == 0)
        answers = [client.recv(4096) for client in clients]

    assert all(answer.startswith(b"HTTP/1.1 200 ") for answer in answers)
    assert not served.dropped


@on_each_loop
async def test_a_connection_with_an_unread_response_is_dropped() -> None:
    asked = HEAD % b"large" + b"\r\n"
    async with serving(answer_s=0.3) as served, stalling(served, asked):
        assert await served.get() == "small"
        await eventually(lambda: served.dropped[HttpLimit.ANSWER] == NUM_CLIENTS)
        await eventually(lambda: served.num_open == 0)


@on_each_loop
async def test_unread_responses_are_bounded_together() -> None:
    async with (
        serving(max_unread_bytes=LARGE_BYTES) as served,
        stalling(served, HEAD % b"large" + b"\r\n"),
    ):
        await eventually(lambda: served.num_large == NUM_CLIENTS)
        await eventually(lambda: served.num_unread_bytes <= LARGE_BYTES)
        assert served.dropped[HttpLimit.ANSWER] > 0
        # One is counted as dropped before its connection is closed.
        await eventually(lambda: served.num_open == NUM_CLIENTS - served.dropped[HttpLimit.ANSWER])
        assert await served.get() == "small"


@on_each_loop
async def test_connections_with_small_unread_responses_end_after_the_idle_time_too() -> None:
    """aiohttp then closes, which would wait for what was written to be read."""
    asked = (HEAD % b"small" + b"\r\n") * 200
    async with (
        serving(idle_s=0.2, answer_s=0.6) as served,
        stalling(served, asked, 2) as clients,
    ):
        for client in clients:
            await send_until_gone(client, asked, rest_s=0)
        await eventually(lambda: served.num_open == 0)


@on_each_loop
async def test_an_idle_connection_is_closed_without_being_counted() -> None:
    asked = HEAD % b"small" + b"\r\n"
    async with serving(idle_s=0.2) as served, stalling(served, asked):
        await eventually(lambda: served.num_open == 0)

    assert not served.dropped


@on_each_loop
async def test_a_stream_that_is_read_is_not_dropped() -> None:
    limits = {"request_s": 0.5, "idle_s": 0.5, "answer_s": 0.5}
    async with serving(**limits) as served, ClientSession() as http:
        url = f"http://127.0.0.1:{served.listener.port}/stream"
        async with http.get(url) as response:
            for _ in range(50):  # of 0.02 s at least
                assert await response.content.readline() == b"more\n"

    assert not served.dropped


@on_each_loop
async def test_connections_beyond_the_limit_are_dropped_at_once_and_a_place_becomes_free() -> None:
    asked = HEAD % b"stream" + b"\r\n"
    async with serving(max_connections=5) as served:
        async with stalling(served, asked, 5):
            await eventually(
                lambda: (
                    served.num_open == 5
                    and all(each.is_answering for each in served.listener.guards.values())
                )
            )
            async with stalling(served, b"") as further:
                for client in further:
                    await send_until_gone(client, b"x", rest_s=0.01)
                assert served.num_open == 5
            await eventually(lambda: served.dropped == {HttpLimit.CONNECTIONS: NUM_CLIENTS})
        await eventually(lambda: served.num_open == 0)

        assert await served.get() == "small"


@pytest.mark.parametrize("sent", [b"", HEAD % b"small", HEAD % b"small" + b"\r\n"])
@on_each_loop
async def test_connections_that_ask_for_nothing_make_room_for_others(sent: bytes) -> None:
    """Silent, half a request, idle after an answer: the oldest go, one for each further one."""
    async with serving(max_connections=5) as served, stalling(served, sent, 5):
        await eventually(lambda: served.num_open == 5)
        answers = [await served.get() for _ in range(3)]
        async with stalling(served, b""):
            assert await served.get() == "small"

        assert answers == ["small"] * 3
        assert served.num_open <= 5


@on_each_loop
async def test_connections_that_do_not_read_make_room_for_others() -> None:
    asked = HEAD % b"large" + b"\r\n"
    async with serving(max_connections=5) as served, stalling(served, asked, 5):
        await eventually(lambda: served.num_large == 5 and served.num_unread_bytes > 0)

        assert await served.get() == "small"


@on_each_loop
async def test_whoever_does_not_read_loses_more_than_who_reads_then() -> None:
    """A large answer to one who reads is served, however much others have left unread."""
    asked = HEAD % b"large" + b"\r\n"
    limits = {"max_unread_bytes": 2 * LARGE_BYTES}
    async with serving(**limits) as served, stalling(served, asked), ClientSession() as http:
        url = f"http://127.0.0.1:{served.listener.port}/large"
        for _ in range(3):
            async with http.get(url) as response:
                assert len(await response.read()) == LARGE_BYTES
        assert served.num_unread_bytes <= 2 * LARGE_BYTES


@on_each_loop
async def test_one_address_keeps_no_other_out_even_where_all_its_requests_are_answered() -> None:
    asked = HEAD % b"stream" + b"\r\n"
    async with serving(max_connections=5) as served, stalling(served, asked, 5):
        await eventually(
            lambda: (
                served.num_open == 5
                and all(each.is_answering for each in served.listener.guards.values())
            )
        )
        other = TCPConnector(local_addr=("127.0.0.2", 0))
        assert await served.get(other) == "small"
        assert served.dropped == {HttpLimit.CONNECTIONS: 1}


@on_each_loop
async def test_stopping_waits_for_no_one_who_stalls() -> None:
    body = HEAD % b"small" + b"Content-Length: 9\r\n\r\n"
    async with (
        serving(stop_s=0.1) as served,
        stalling(served, b"", 3),
        stalling(served, HEAD % b"large" + b"\r\n", 3),
        stalling(served, body, 3),
    ):
        await eventually(lambda: served.num_open >= 6)
        async with asyncio.timeout(PATIENCE_S):
            await served.listener.stop()
        await eventually(lambda: served.num_open == 0)


MAX_HELD_BYTES = 128 * 1024
"""Of one connection, whatever it sends: 16 MiB of all that a port has."""
OWN_BYTES = 256 * 1024
"""Of the client that asks meanwhile."""
FIRST = {
    "nothing": b"",
    "another protocol": b"Connection: Upgrade\r\nUpgrade: x\r\n\r\n",
    "websocket": b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
    "HTTP/2": b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: x\r\n\r\n",
    "a request": b"\r\n",
    "a head": b"X-A: ",
    "a body": b"Content-Length: 1000000000\r\n\r\n",
    "a body to be asked for": b"Expect: 100-continue\r\nContent-Length: 1000000000\r\n\r\n",
    "a compressed body": b"Content-Encoding: gzip\r\nContent-Length: 1000000000\r\n\r\n",
    "a chunk's extension": b"Transfer-Encoding: chunked\r\n\r\n1;",
    "a trailer": b"Transfer-Encoding: chunked\r\n\r\n0\r\n",
}
THEN = {
    "noise": b"x" * 65_536,
    "requests": (HEAD % b"small" + b"\r\n") * 1500,
    "blank lines": b"\r\n" * 32_768,
    "fields": b"a: b\r\n" * 10_000,
    "chunks": b"1\r\nx\r\n" * 10_000,
}


async def send_what_is_taken(client: socket.socket, data: bytes, num_bytes: int) -> None:
    """Send so much, or until the other side reads no more of it or has gone."""
    with contextlib.suppress(ConnectionError, TimeoutError):
        for _ in range(num_bytes // len(data)):
            async with asyncio.timeout(0.05):
                await asyncio.get_running_loop().sock_sendall(client, data)


def all_or_two(what: Sequence[bytes], place: int) -> Sequence[bytes]:
    """Return two where there is no time for all: others for each of what comes first."""
    num = len(what)
    return what if IS_THOROUGH else (what[place % num], what[(place + 2) % num])


@pytest.mark.few(8)
@pytest.mark.parametrize(
    ("first", "path"), [("another protocol", "stream"), *((each, "small") for each in FIRST)]
)
@on_each_loop
async def test_whatever_a_connection_sends_little_of_it_is_kept(
    first: str, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """While a request is being answered, and after it."""
    caplog.set_level(logging.CRITICAL, "aiohttp.server")  # records keep what was sent
    head = b"" if first == "nothing" else HEAD % path.encode() + FIRST[first]
    for then in all_or_two([*THEN.values()], [*FIRST].index(first)):
        async with serving(body_s=60.0) as served, stalling(served, head, 4) as clients:
            await served.get()
            gc.collect()
            tracemalloc.start()
            try:
                sending = (send_what_is_taken(each, then, 2**18) for each in clients)
                await asyncio.gather(*sending)
                await served.get()
                held_bytes, _ = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()

        assert held_bytes <= len(clients) * MAX_HELD_BYTES + OWN_BYTES


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
@on_each_loop
async def test_a_compressed_body_takes_its_own_bytes_and_no_more(encoding: str) -> None:
    packer = zlib.compressobj(wbits=31 if encoding == "gzip" else 15)
    sent = packer.compress(bytes(2**20)) + packer.flush()
    head = f"Content-Encoding: {encoding}\r\nContent-Length: {len(sent)}\r\n\r\n".encode()
    async with serving() as served:
        asked = b"POST /length HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + head + sent
        reader, writer = await asyncio.open_connection("127.0.0.1", served.listener.port)
        writer.write(asked)
        answer = await reader.read()
        writer.close()

    assert answer.endswith(b"\r\n\r\n%d" % len(sent))


@on_each_loop
async def test_who_goes_on_besides_a_body_is_dropped_and_counted() -> None:
    asked = b"Connection: Upgrade\r\nUpgrade: x\r\n"
    async with (
        serving() as served,
        stalling(served, HEAD % b"stream" + asked + b"\r\n", 1) as [one],
    ):
        await send_until_gone(one, b"x" * 4096, rest_s=0)

        assert served.dropped == {HttpLimit.AHEAD: 1}
        assert await served.get() == "small"


@on_each_loop
async def test_requests_that_come_in_a_row_and_bodies_of_any_length_are_served() -> None:
    async with serving() as served, ClientSession() as http:
        url = f"http://127.0.0.1:{served.listener.port}/length"
        for num_bytes in (0, 100, 1_000_000):
            async with http.post(url, data=bytes(num_bytes)) as response:
                assert await response.text() == str(num_bytes)
        reader, writer = await asyncio.open_connection("127.0.0.1", served.listener.port)
        upgrade = b"Connection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
        for ending in (b"\r\n", b"\r\n", upgrade, b"\r\n") * 40:
            writer.write(HEAD % b"small" + ending)
            assert (await reader.readuntil(b"small")).startswith(b"HTTP/1.1 200 ")
        writer.write((HEAD % b"small" + b"\r\n") * 40)
        for _ in range(40):
            assert (await reader.readuntil(b"small")).count(b"HTTP/1.1 200 ") == 1
        writer.close()

    assert not served.dropped
