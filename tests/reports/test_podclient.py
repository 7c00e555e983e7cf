"""The client of what is read again and again; what it shares with others is in `test_podhttp`."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, closing, suppress

import pytest
from aiohttp.test_utils import unused_port
from yarl import URL

from extproc.reports import podclient
from extproc.reports.longpages import FREE_BYTES, LongPages
from extproc.reports.podclient import (
    MAX_FIELDS,
    MAX_IDLE_BYTES,
    MAX_PIECES,
    PodClient,
    UnansweredError,
)
from extproc.reports.podhttp import ResponseError, TooLargeError
from tests.servers import tcp_server

PAGE = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\npage"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
HANG_S = 60.0
MIB = 1024 * 1024


class Last(bytes):
    """An answer after which the server closes the connection."""


END = Last()


class Server:
    """Answers the requests of each connection with the next bytes of its list.

    Attributes:
        requests: Of each connection.
        num_ended: Connections that the client has closed.
        is_slow: Writes byte by byte.
    """

    def __init__(self, connections: Iterator[Sequence[bytes]]) -> None:
        self.requests: list[list[bytes]] = []
        self.num_ended = 0
        self.changed = asyncio.Event()
        self.url = URL()
        self.writers: list[asyncio.StreamWriter] = []
        self.num_now = 0
        self.is_slow = False
        self._connections = connections

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(HANG_S):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers, seen = next(self._connections), list[bytes]()
        self.num_now += 1
        self.requests.append(seen)
        self.writers.append(writer)
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            for answer in answers:
                seen.append(await reader.readuntil(b"\r\n\r\n"))
                self.changed.set()
                for at in range(len(answer)) if self.is_slow else ():
                    writer.write(answer[at : at + 1])
                    await asyncio.sleep(0)
                writer.write(b"" if self.is_slow else answer)
                if isinstance(answer, Last):
                    break
            else:
                with suppress(ConnectionError):
                    await reader.read()
                self.num_ended += 1
        writer.close()
        self.num_now -= 1
        self.changed.set()


@asynccontextmanager
async def server(*connections: Sequence[bytes]) -> AsyncIterator[Server]:
    """A server with these answers for each connection, and no more connections than that."""
    served = Server(iter(connections))
    async with tcp_server(served.serve) as address:
        served.url = URL(f"http://{address}/x?y=z")
        yield served
        for writer in served.writers:
            writer.close()
        await served.until(lambda: served.num_now == 0)


async def get(client: PodClient, url: URL, max_bytes: int = 10**6) -> tuple[int, bytes]:
    async with asyncio.timeout(HANG_S):
        return await client.get(url, max_bytes=max_bytes)


async def test_one_connection_serves_all_requests() -> None:
    async with server([PAGE] * 5) as pod:
        with closing(PodClient({"Authorization": "Bearer key"})) as client:
            assert [await get(client, pod.url) for _ in range(5)] == [(200, b"page")] * 5

    assert pod.requests == [
        [
            b"GET /x?y=z HTTP/1.1\r\n"
            + f"Host: 127.0.0.1:{pod.url.port}\r\n".encode()
            + b"Accept: */*\r\nAccept-Encoding: identity\r\nUser-Agent: extproc\r\n"
            + b"Authorization: Bearer key\r\n\r\n"
        ]
        * 5
    ]


async def test_a_given_header_replaces_a_usual_one() -> None:
    async with server([PAGE]) as pod:
        with closing(PodClient({"user-agent": "other"})) as client:
            await get(client, pod.url)

    assert pod.requests[0][0].lower().count(b"user-agent:") == 1
    assert b"user-agent: other\r\n" in pod.requests[0][0]


@pytest.mark.parametrize("headers", [{"a": "b\r\nc: d"}, {"a\n": "b"}, {"a": "\0"}, {"a": "ä"}])
def test_a_header_with_a_line_s_end_is_refused(headers: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="one line"):
        PodClient(headers)


async def test_a_kept_connection_that_the_server_closed_is_replaced_unnoticed() -> None:
    """Closed at the moment of the next request: the client cannot know it before."""
    async with server([PAGE, END], [PAGE, END], [PAGE]) as pod:
        with closing(PodClient()) as client:
            assert [await get(client, pod.url) for _ in range(3)] == [(200, b"page")] * 3

    assert [len(requests) for requests in pod.requests] == [2, 2, 1]


async def test_a_connection_that_is_closed_after_each_response_is_opened_again() -> None:
    page = PAGE.replace(b"\r\n", b"\r\nconnection: close\r\n", 1)
    async with server([page], [page]) as pod:
        with closing(PodClient()) as client:
            assert [await get(client, pod.url) for _ in range(2)] == [(200, b"page")] * 2


async def test_a_new_connection_without_an_answer_is_a_failure_at_once() -> None:
    async with server([END], [PAGE]) as pod:
        with closing(PodClient()) as client, pytest.raises(UnansweredError):
            await get(client, pod.url)

    assert len(pod.requests) == 1


BODIES = {
    "length": (PAGE, (200, b"page")),
    "chunks": (CHUNKED + b"2\r\npa\r\n2;x=y\r\nge\r\n0\r\nx: y\r\n\r\n", (200, b"page")),
    "none": (b"HTTP/1.1 204 No Content\r\n\r\n", (204, b"")),
    "empty": (b"HTTP/1.1 503 Oh\r\ncontent-length: 0\r\n\r\n", (503, b"")),
    "close": (Last(b"HTTP/1.1 200 OK\r\n\r\npage"), (200, b"page")),
    "1.0": (Last(b"HTTP/1.0 200 OK\r\n\r\npage"), (200, b"page")),
    "provisional": (b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + PAGE, (200, b"page")),
    "redirect": (PAGE.replace(b"200", b"302"), (302, b"page")),
    "bare line feeds": (PAGE.replace(b"\r", b""), (200, b"page")),
    "identity": (PAGE.replace(b"\r", b"\r\ncontent-encoding: identity\r", 1), (200, b"page")),
}


@pytest.mark.parametrize(("raw", "expected"), BODIES.values(), ids=BODIES)
@pytest.mark.parametrize("is_slow", [False, True], ids=["whole", "bytewise"])
async def test_bodies_are_read_in_every_form(
    raw: bytes, expected: tuple[int, bytes], is_slow: bool
) -> None:
    async with server([raw], [PAGE]) as pod:
        pod.is_slow = is_slow
        with closing(PodClient()) as client:
            assert await get(client, pod.url) == expected


@pytest.mark.parametrize("begun", [b"H", b"HTTP/1.1 100 Continue\r\n\r\n", PAGE[:-1], CHUNKED])
async def test_a_response_that_breaks_off_is_a_failure_and_not_asked_for_again(
    begun: bytes,
) -> None:
    async with server([PAGE, Last(begun)], [PAGE]) as pod:
        with closing(PodClient()) as client:
            await get(client, pod.url)
            with pytest.raises(ConnectionError, match="in a response"):
                await get(client, pod.url)
            assert len(pod.requests) == 1

            assert await get(client, pod.url) == (200, b"page")


@pytest.mark.parametrize("more", [b"more", b"\x00", PAGE, b"HTTP/1.1 200 OK\r\n"])
async def test_what_nobody_asked_for_is_no_answer_to_the_next_request(more: bytes) -> None:
    async with server([PAGE.replace(b"page", b"1111") + more, PAGE], [PAGE]) as pod:
        with closing(PodClient()) as client:
            assert await get(client, pod.url) == (200, b"1111")
            assert await get(client, pod.url) == (200, b"page")

    assert [len(requests) for requests in pod.requests] == [1, 1]


async def test_what_comes_between_two_requests_ends_the_connection() -> None:
    async with server([PAGE], [PAGE]) as pod:
        with closing(PodClient()) as client:
            await get(client, pod.url)
            pod.writers[0].write(PAGE.replace(b"page", b"1111"))
            await pod.until(lambda: pod.num_ended == 1)

            assert await get(client, pod.url) == (200, b"page")


FIELDS = b"".join(b"x-%d: y\r\n" % number for number in range(MAX_FIELDS + 2))
HOSTILE = {
    "no HTTP": b"<html>no\r\n",
    "no status": b"HTTP/1.1 9\r\n\r\n",
    "another protocol": b"HTTP/1.1 101 X\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n",
    "a wrong length": b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n",
    "a wrong chunk": CHUNKED + b"zz\r\n",
    "many fields": b"HTTP/1.1 200 OK\r\n" + FIELDS,
    "many fields in a trailer": CHUNKED + b"0\r\n" + FIELDS,
    "many fields in many heads": b"HTTP/1.1 100 Continue\r\n"
    + FIELDS[: len(FIELDS) // 9]
    + b"\r\n",
    "a long field": b"HTTP/1.1 200 OK\r\nx: " + b"y" * (MAX_IDLE_BYTES + 1),
    "a long trailer": CHUNKED + b"1\r\nx\r\n0\r\nx: " + b"y" * MAX_IDLE_BYTES * 9,
    "many pieces": CHUNKED + b"1\r\nx\r\n" * (MAX_PIECES + 1),
    "compressed": b"HTTP/1.1 200 OK\r\nContent-Encoding: GZIP\r\ncontent-length: 9\r\n\r\n",
}


@pytest.mark.parametrize("raw", HOSTILE.values(), ids=HOSTILE)
async def test_a_hostile_response_is_a_failure_that_ends_the_connection(raw: bytes) -> None:
    async with server([raw * (9 if b"Continue" in raw else 1)], [PAGE]) as pod:
        with closing(PodClient()) as client:
            with pytest.raises(ResponseError):
                await get(client, pod.url)
            await pod.until(lambda: pod.num_ended == 1)

            assert await get(client, pod.url) == (200, b"page")


@pytest.mark.parametrize("begun", [b"", b"HTTP/1.1 200 OK\r\n", PAGE[:-1]])
async def test_a_request_that_is_cancelled_ends_its_connection(begun: bytes) -> None:
    async with server([begun], [PAGE]) as pod:
        with closing(PodClient()) as client:
            asked = asyncio.ensure_future(get(client, pod.url))
            await pod.until(lambda: bool(pod.requests and pod.requests[0]))
            asked.cancel()
            await pod.until(lambda: pod.num_ended == 1)

            assert await get(client, pod.url) == (200, b"page")


async def test_a_closed_client_closes_its_connection() -> None:
    async with server([PAGE]) as pod:
        with closing(PodClient()) as client:
            await get(client, pod.url)
        await pod.until(lambda: pod.num_ended == 1)


async def test_a_name_is_looked_up_and_all_its_addresses_tried() -> None:
    """Most hosts have ::1 for it as well, where nobody listens."""
    async with server([PAGE]) as pod:
        with closing(PodClient()) as client:
            assert await get(client, pod.url.with_host("localhost")) == (200, b"page")
    with closing(PodClient()) as client, pytest.raises(ConnectionRefusedError):
        await get(client, URL(f"http://localhost:{unused_port()}/"))


@pytest.mark.parametrize("last", [PAGE, Last(PAGE), END, HOSTILE["no HTTP"]])
async def test_a_connection_that_ended_leaves_nothing_to_the_garbage_collector(
    last: bytes,
) -> None:
    """A pod that hangs up again and again must not cause pauses for requests."""
    async with server([last]) as pod:
        client = PodClient()
        gc.collect()
        gc.disable()
        try:
            with suppress(OSError, ResponseError):
                await get(client, pod.url)
            gone = weakref.ref(client._connection)
            client.close()
            del client
            for _ in range(5):
                await asyncio.sleep(0)

            assert gone() is None
        finally:
            gc.enable()


async def test_a_refused_connection_leaves_nothing_to_the_garbage_collector() -> None:
    client = PodClient()
    gc.collect()
    gc.disable()
    try:
        with suppress(OSError):
            await get(client, URL(f"http://127.0.0.1:{unused_port()}/"))
        gone = weakref.ref(client)
        del client
        await asyncio.sleep(0)  # the event loop lets go of the future that woke us

        assert gone() is None
    finally:
        gc.enable()


def _page(num_bytes: int) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % num_bytes


async def test_long_responses_of_all_servers_together_share_one_room() -> None:
    """The longest that is arriving is given up for a shorter one."""
    room, long, short = LongPages(max_bytes=MIB), 2 * MIB, MIB // 2
    async with (
        server([_page(long) + bytes(MIB)]) as hostile,
        server([_page(short) + bytes(short)]) as honest,
    ):
        with closing(PodClient(room=room)) as one, closing(PodClient(room=room)) as other:
            asked = asyncio.ensure_future(one.get(hostile.url, max_bytes=long))
            async with asyncio.timeout(HANG_S):
                while room.num_bytes < MIB - FREE_BYTES:
                    await asyncio.sleep(0.01)
            status, body = await other.get(honest.url, max_bytes=long)
            assert (status, len(body)) == (200, short)
            assert room.num_bytes == short - FREE_BYTES, "until it has been read"
            with pytest.raises(TooLargeError, match="while others fill"):
                await asked
        assert room.num_bytes == 0


class DeafTransport(asyncio.Transport):
    """Writes nowhere."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        pass


async def test_a_long_body_is_held_once_while_it_arrives_and_when_it_is_whole() -> None:
    num, piece = 8 * MIB, bytes(MIB // 4)
    connection = podclient._Connection(asyncio.get_running_loop(), LongPages().lease())
    connection.connection_made(DeafTransport())
    answer = connection.ask(b"", num)
    connection.data_received(_page(num))
    tracemalloc.start()
    try:
        for _ in range(num // len(piece)):
            connection.data_received(piece)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert (await answer).body == bytes(num)
    assert peak_bytes < 1.25 * num, "it grows by an eighth"
