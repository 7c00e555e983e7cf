"""An echo service on our wire, for tests of the transport."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import grpc

from extproc.wire.rpc import Call, Code, Method
from extproc.wire.server import WireServer, serve

ECHO, FAIL, WATCH = "/test.Test/Echo", "/test.Test/Fail", "/test.Test/Watch"


class Echo:
    """Echoes every message; ends when the request does."""

    def __init__(self, call: Call, metadata: Mapping[str, str]) -> None:
        self.call = call
        self.num_closed = 0
        self.has_received = False

    def receive(self, message: bytes) -> None:
        if message == b"raise":
            raise RuntimeError("as asked")
        self.call.send(message)

    def half_close(self) -> None:
        self.call.end()

    def closed(self) -> None:
        self.num_closed += 1


class Fail(Echo):
    """Ends at the first message."""

    def receive(self, message: bytes) -> None:
        self.call.end(Code.FAILED_PRECONDITION, "50 % café")


class Watch(Echo):
    """Answers at once and stays."""

    def receive(self, message: bytes) -> None:
        self.has_received = True
        self.call.send(b"watching")

    def half_close(self) -> None: ...


@contextlib.asynccontextmanager
async def running(**options: Any) -> AsyncIterator[tuple[WireServer, list[Echo]]]:
    """An echo server, and the sessions that were opened."""
    sessions: list[Echo] = []

    def opener(kind: type[Echo]) -> Callable[[Call, Mapping[str, str]], Echo]:
        def open_session(call: Call, metadata: Mapping[str, str]) -> Echo:
            sessions.append(kind(call, metadata))
            return sessions[-1]

        return open_session

    methods = [
        Method(ECHO, opener(Echo)),
        Method(FAIL, opener(Fail)),
        Method(WATCH, opener(Watch), is_long_lived=True),
    ]
    server = await serve(methods, **{"tick_s": 0.05, **options})
    try:
        yield server, sessions
    finally:
        await server.close()
        assert server.counters.connections_open == 0
        assert server.counters.streams_open == 0
        assert all(session.num_closed == 1 for session in sessions)


def stream(channel: grpc.Channel, path: str) -> Any:
    """A method that sends and receives bytes."""
    return channel.stream_stream(path, None, None)


def grpcio_echo(target: str, bodies: list[bytes], path: str = ECHO) -> list[bytes]:
    """Send all bodies on one stream with grpcio."""
    options = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(target, options=options) as channel:
        return list(stream(channel, path)(iter(bodies), timeout=60))
