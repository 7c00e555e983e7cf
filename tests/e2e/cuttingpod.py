"""A pod whose answers break off where a request says so, over HTTP/1 and HTTP/2."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, RequestReceived, StreamEnded

CUT_HEADER, ID_HEADER = "x-test-cut", "x-test-id"
MODEL = "m"
_CHUNK = b'data: {"choices": [{"text": "a token"}]}\n\n'
_NUM_CHUNKS = 40
_DONE = b"data: [DONE]\n\n"
_PAUSE_S = 0.005


class Answer(StrEnum):
    """How a pod answers a request."""

    CHUNKED = "chunked"  # whole
    LENGTH = "length"  # whole
    EMPTY = "empty"  # whole, without a body
    ERROR = "error"  # whole: a 500 of its own
    REFUSAL = "refusal"  # whole: a 400 of its own
    NO_HEADERS = "no-headers"  # cut before its headers
    HEADERS = "headers"  # cut right after them
    IN_LENGTH = "in-length"  # cut in a body that has a length
    IN_CHUNKS = "in-chunks"  # cut in a body that has none
    LAST_CHUNK = "last-chunk"  # all of its text is sent; only the end of the body is not
    SLOW = "slow"  # a token in 5 ms, for ever: its client leaves
    SILENT = "silent"  # no headers, for ever


WHOLE = (Answer.CHUNKED, Answer.LENGTH, Answer.EMPTY, Answer.ERROR, Answer.REFUSAL)
CUT = (Answer.NO_HEADERS, Answer.HEADERS, Answer.IN_LENGTH, Answer.IN_CHUNKS, Answer.LAST_CHUNK)


@dataclass(frozen=True)
class Part:
    """What a pod sends next."""

    headers: tuple[int, dict[str, str]] | None = None
    data: bytes = b""
    ends: bool = False
    cuts: bool = False


@dataclass
class CuttingPod:
    """A pod that listens at `address`; requests that have come there, by their ids.

    Attributes:
        kill: Ends it as a killed process does: nobody listens, and connections are reset.
        always: Its answer to every request, whatever that asks for; None for what it asks for.
    """

    address: str
    arrived: defaultdict[str, asyncio.Event]
    always: Answer | None = None
    kill: Callable[[], Awaitable[None]] = field(init=False)


async def parts(answer: Answer) -> AsyncIterator[Part]:
    """What a pod sends, as fast as a pod would."""
    text = _NUM_CHUNKS * _CHUNK + _DONE
    stream, plain = {"content-type": "text/event-stream"}, {"content-type": "application/json"}
    if answer is Answer.SILENT:
        await asyncio.sleep(3600)
    if answer is Answer.NO_HEADERS:
        yield Part(cuts=True)
    elif answer is Answer.EMPTY:
        yield Part((200, {"content-length": "0"}), ends=True)
    elif answer in (Answer.ERROR, Answer.REFUSAL):
        status = 500 if answer is Answer.ERROR else 400
        yield Part((status, plain | {"content-length": "2"}), data=b"{}", ends=True)
    elif answer in (Answer.LENGTH, Answer.IN_LENGTH):
        yield Part((200, plain | {"content-length": str(len(text))}), data=text[:99])
        await asyncio.sleep(_PAUSE_S)
        is_cut = answer is Answer.IN_LENGTH
        yield Part(cuts=True) if is_cut else Part(data=text[99:], ends=True)
    else:
        yield Part((200, stream))
        await asyncio.sleep(_PAUSE_S)
        if answer is Answer.HEADERS:
            yield Part(cuts=True)
        while answer is Answer.SLOW:
            yield Part(data=_CHUNK)
            await asyncio.sleep(_PAUSE_S)
        yield Part(data=text[: len(_CHUNK)])
        await asyncio.sleep(_PAUSE_S)
        if answer is Answer.IN_CHUNKS:
            yield Part(cuts=True)
        yield Part(data=text[len(_CHUNK) :])
        await asyncio.sleep(_PAUSE_S)
        yield Part(cuts=True) if answer is Answer.LAST_CHUNK else Part(ends=True)


def _listed(path: str) -> bytes:
    """What a router asks of a pod: its list of models, or its metrics."""
    kind, body = "text/plain", "vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n"
    if path == "/v1/models":
        kind = "application/json"
        body = json.dumps({"object": "list", "data": [{"id": MODEL, "object": "model"}]})
    head = f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
    return f"{head}{body}".encode()


async def _serve_1(
    pod: CuttingPod, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, begun: bytes
) -> None:
    while True:
        head = (begun + await reader.readuntil(b"\r\n\r\n")).decode().lower()
        begun = b""
        lines = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)
        if CUT_HEADER not in lines:
            writer.write(_listed(head.split(" ")[1]))
            continue
        if "content-length" in lines:
            await reader.readexactly(int(lines["content-length"]))
        elif lines.get("transfer-encoding") == "chunked":
            await reader.readuntil(b"0\r\n\r\n")
        pod.arrived[lines[ID_HEADER]].set()
        is_chunked = False
        async for part in parts(pod.always or Answer(lines[CUT_HEADER])):
            if part.headers is not None:
                status, headers = part.headers
                is_chunked = "content-length" not in headers
                if is_chunked:
                    headers = headers | {"transfer-encoding": "chunked"}
                said = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
                writer.write(f"HTTP/1.1 {status} X\r\n{said}\r\n".encode())
            if part.data:
                data = part.data
                writer.write(b"%x\r\n%b\r\n" % (len(data), data) if is_chunked else data)
            if part.cuts:
                await writer.drain()
                return
            if part.ends and is_chunked:
                writer.write(b"0\r\n\r\n")
            await writer.drain()


class _Http2:
    """One HTTP/2 connection; a cut resets the stream."""

    def __init__(self, pod: CuttingPod, writer: asyncio.StreamWriter) -> None:
        self._pod = pod
        self.connection = H2Connection(H2Configuration(client_side=False))
        self.connection.initiate_connection()
        self._writer = writer
        self._answers: dict[int, Answer] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def flush(self) -> None:
        self._writer.write(self.connection.data_to_send())

    def receive(self, data: bytes) -> None:
        for event in self.connection.receive_data(data):
            if isinstance(event, RequestReceived):
                headers = {name.decode(): value.decode() for name, value in event.headers}
                self._answers[event.stream_id] = Answer(headers[CUT_HEADER])
                self._pod.arrived[headers[ID_HEADER]].set()
            elif isinstance(event, DataReceived):
                length = event.flow_controlled_length
                self.connection.acknowledge_received_data(length, event.stream_id)
            elif isinstance(event, StreamEnded):
                task = asyncio.create_task(self._answer(event.stream_id))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        self.flush()

    async def _answer(self, stream_id: int) -> None:
        with suppress(Exception):  # its client has left
            async for part in parts(self._answers.pop(stream_id)):
                if part.headers is not None:
                    status, headers = part.headers
                    is_all = part.ends and not part.data
                    self.connection.send_headers(
                        stream_id, [(":status", str(status)), *headers.items()], end_stream=is_all
                    )
                    if is_all:
                        self.flush()
                        return
                if part.data:
                    self.connection.send_data(stream_id, part.data)
                if part.cuts:
                    self.connection.reset_stream(stream_id, 2)
                    self.flush()
                    return
                if part.ends:
                    self.connection.end_stream(stream_id)
                self.flush()

    def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()


async def _serve_2(
    pod: CuttingPod, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, begun: bytes
) -> None:
    connection = _Http2(pod, writer)
    connection.receive(begun)
    try:
        while data := await reader.read(65536):
            connection.receive(data)
    finally:
        connection.cancel()


@asynccontextmanager
async def cutting_pod() -> AsyncIterator[CuttingPod]:
    """A pod that runs."""
    pod = CuttingPod("", defaultdict(asyncio.Event))
    tasks: set[asyncio.Task[object]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        with suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            begun = await reader.readexactly(3)
            await (_serve_2 if begun == b"PRI" else _serve_1)(pod, reader, writer, begun)
        writer.close()
        tasks.discard(task)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)

    async def kill() -> None:
        server.close()
        for each in [*tasks]:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    pod.address, pod.kill = f"127.0.0.1:{server.sockets[0].getsockname()[1]}", kill
    try:
        yield pod
    finally:
        await kill()
