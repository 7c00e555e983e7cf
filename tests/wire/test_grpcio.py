"""The reference transport. ext_proc is spoken to it by a second implementation of gRPC, grpclib,
which takes a server's early end for a failure and so always half-closes with its last message;
whatever needs an end without a half-close is asked by grpc.aio, as Envoy would.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from grpc import aio
from grpclib.client import Channel, StreamStreamMethod
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from extproc.request.codec import Codec
from extproc.request.interfaces import StreamSettings
from extproc.request.processor import ExternalProcessor
from extproc.types import Outcome, RequestInfo, Wait
from extproc.wire.budget import Budget
from extproc.wire.grpcio import GrpcioServer
from extproc.wire.rpc import Call, Code, Metadata, Method
from tests.builders import BASE, body
from tests.request import ext_proc
from tests.request.ext_proc import destination, phase, read, request_body, request_headers
from tests.request.fakerouter import PICK, FakeRouter
from tests.routing.scene import router
from tests.waiting import eventually
from tests.wire.rawcodec import RawCodec

PROCESS = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
MAX_MESSAGE_BYTES = 200_000
BODY = body()
SOON_S = 60.0
"""Deadline that only detects a hang."""


@contextlib.asynccontextmanager
async def serving(
    methods: Iterable[Method], budget: Budget | None = None
) -> AsyncIterator[tuple[GrpcioServer, Channel]]:
    """A server on a free port and a client's channel to it."""
    server = GrpcioServer(methods, max_message_bytes=MAX_MESSAGE_BYTES, budget=budget)
    host, _, port = (await server.start("127.0.0.1:0")).rpartition(":")
    channel = Channel(host, int(port), codec=RawCodec())
    try:
        yield server, channel
    finally:
        channel.close()
        await server.stop(0.1)


def rpc(channel: Channel, path: str = PROCESS) -> Any:
    """A new RPC, to be entered."""
    return StreamStreamMethod[bytes, bytes](channel, path, bytes, bytes).open(timeout=SOON_S)


async def exchange(channel: Channel, *messages: bytes, path: str = PROCESS) -> list[bytes]:
    """Send everything, read to the end; raises what the RPC ended with if it was not OK."""
    async with rpc(channel, path) as call:
        for number, message in enumerate(messages, 1):
            await call.send_message(message, end=number == len(messages))
        return [answer async for answer in call]


async def status_of(channel: Channel, *messages: bytes, path: str = PROCESS) -> Status:
    try:
        await exchange(channel, *messages, path=path)
    except GRPCError as error:
        return error.status
    return Status.OK


def processor(router: Any, **settings: Any) -> ExternalProcessor:
    return ExternalProcessor(
        new_stream=lambda _metadata, *rest: router.stream(StreamSettings(**settings), *rest),
        codec=Codec(),
        clock=time.monotonic,
        call_later=asyncio.get_running_loop().call_later,
    )


@pytest.mark.parametrize("is_whole", [False, True])
async def test_complete_bodies_count_and_the_oldest_is_given_up(is_whole: bool) -> None:
    """gRPC's core assembles messages itself; only the bytes that a service keeps are counted."""
    budget = Budget(150_000)
    held = Wait(until_s=time.monotonic() + 3600)
    service = processor(FakeRouter(held))
    chunk = body(prompt=100_000 * "p") if is_whole else b" " * 100_000
    async with serving(service.methods(), budget) as (_, channel):
        async with rpc(channel) as old, rpc(channel) as young:
            for call in (old, young):
                await call.send_message(request_headers(body_mode=ext_proc.FULL_DUPLEX))
                await call.send_message(request_body(chunk, is_whole))
                if call is old:
                    await eventually(lambda: budget.used_bytes > 100_000)
            answer = read(await old.recv_message() or b"")
            assert answer.immediate_response.details == "memory"
            assert budget.num_given_up == 1
            await young.cancel()
            await old.cancel()
        await eventually(lambda: budget.used_bytes == 0)


# --- ext_proc -------------------------------------------------------------------------------


async def test_a_hundred_requests_at_once_are_routed_and_counted() -> None:
    made = router(1, 2, 3)

    class Counting(FakeRouter):
        def route(self, request: RequestInfo, *, now: float, **_: Any) -> Any:
            return made.route(request, now=now)

    service = processor(Counting())
    async with serving(service.methods()) as (_, channel):
        tasks = [
            exchange(channel, request_headers(), request_body(body("a" if n % 2 else BASE)))
            for n in range(100)
        ]
        answers = await asyncio.gather(*tasks)
        await eventually(lambda: service.num_open == 0)

    routes = [destination(routed) for _, routed in answers]
    ids = {route[2] for route in routes if route is not None}
    assert len(ids) == len(made.pool.flights) == 100
    assert [made.pool.flights.finish(id, now=9.0) is not None for id in ids] == [True] * 100
    assert len(made.pool.flights) == 0


async def test_garbage_ends_its_own_stream_and_no_other() -> None:
    junk = (b"\xff\xff", b"", b"\x0a\x7f")
    async with (
        serving(processor(FakeRouter()).methods()) as (_, channel),
        rpc(channel) as other,
    ):
        await other.send_message(request_headers())
        await other.recv_message()
        statuses = [await status_of(channel, each) for each in junk]
        await other.send_message(request_body(BODY), end=True)
        routed = await other.recv_message()

    assert statuses == [Status.INVALID_ARGUMENT] * 3
    assert destination(routed) is not None


async def test_a_half_close_before_the_response_is_not_ok() -> None:
    async with serving(processor(FakeRouter()).methods()) as (_, channel), rpc(channel) as call:
        await call.send_message(request_headers(), end=True)
        assert phase(await call.recv_message()) == "request_headers"
        with pytest.raises(GRPCError) as ended:
            await call.recv_trailing_metadata()

    assert ended.value.status is Status.CANCELLED


async def test_a_client_that_leaves_ends_its_session_once() -> None:
    router = FakeRouter()
    service = processor(router, uses_response_phases=True)
    async with serving(service.methods()) as (_, channel):
        async with rpc(channel) as call:
            await call.send_message(request_headers())
            await call.send_message(request_body(BODY))
            for _ in range(2):
                await call.recv_message()
            await call.cancel()
        await eventually(lambda: service.num_open == 0)
        await asyncio.sleep(0.05)

    assert [(pick, outcome) for pick, outcome, _ in router.finished] == [(PICK, Outcome.CANCELLED)]
    assert service.num_open == 0


async def test_clients_that_leave_at_any_moment_leave_nothing_behind(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    router = FakeRouter()
    service = processor(router, uses_response_phases=True)

    async def leave(channel: Channel, after: int) -> None:
        messages = [request_headers(), request_body(BODY), ext_proc.response_headers({})]
        async with rpc(channel) as call:
            for message in messages[: 1 + after % 3]:
                await call.send_message(message)
            if after % 8 > 3:
                await asyncio.sleep(0.001 * (after % 5))
            await call.cancel()

    async with serving(service.methods()) as (_, channel):
        await asyncio.gather(*(leave(channel, number) for number in range(64)))
        await eventually(lambda: service.num_open == 0)
        assert await status_of(channel, request_headers(), request_body(BODY)) is Status.OK

    assert len(router.finished) == len(router.routed)
    assert caplog.records == []


# --- any service ----------------------------------------------------------------------------


@dataclass
class Probe:
    """A session that does what its messages say, and keeps what happened to it."""

    call: Call
    events: list[str] = field(default_factory=list)
    metadata: Metadata = field(default_factory=dict)

    def receive(self, message: bytes) -> None:
        self.events.append(message.decode())
        if message == b"raise":
            raise RuntimeError("a bug")
        if message.startswith(b"twice"):
            self.call.send(b"one")
            self.call.send(b"two")
        if message.endswith(b"end"):
            self.call.end(Code.FAILED_PRECONDITION, "50 % café")
            self.call.send(b"after the end")
            self.call.end()

    def half_close(self) -> None:
        self.events.append("half_close")

    def closed(self) -> None:
        self.events.append("closed")


@dataclass
class Probes:
    """A service of probes."""

    opened: list[Probe] = field(default_factory=list)
    greeting: bytes = b""

    def method(self, *, is_long_lived: bool = False) -> Method:
        return Method("/test.Probes/Watch", self.open, is_long_lived)

    def open(self, call: Call, metadata: Metadata) -> Probe:
        self.opened.append(Probe(call, metadata=metadata))
        if self.greeting:
            call.send(self.greeting)
        return self.opened[-1]


@dataclass
class Peer:
    """A client's end of an RPC, by grpc.aio."""

    call: Any

    async def read(self) -> bytes | None:
        """The next message, None at the end."""
        try:
            message: Any = await self.call.read()
        except aio.AioRpcError:  # how it ended is asked for by `ended`
            return None
        return message if isinstance(message, bytes) else None

    async def ended(self) -> tuple[Code, str]:
        return Code((await self.call.code()).value[0]), await self.call.details()


@contextlib.asynccontextmanager
async def probing(
    *, is_long_lived: bool = False, greeting: bytes = b""
) -> AsyncIterator[tuple[GrpcioServer, Peer, Probe]]:
    """A server, an open RPC, and the session at its other end; which is closed once, and last."""
    probes = Probes(greeting=greeting)
    method = probes.method(is_long_lived=is_long_lived)
    server = GrpcioServer([method], max_message_bytes=MAX_MESSAGE_BYTES)
    channel = aio.insecure_channel(await server.start("127.0.0.1:0"))
    try:
        call = channel.stream_stream(method.path, None, None)(None, metadata=(("x-who", "me"),))
        await eventually(lambda: len(probes.opened) == 1)
        probe = probes.opened[0]
        yield server, Peer(call), probe
        call.cancel()
        await eventually(lambda: "closed" in probe.events)
    finally:
        await channel.close(None)
        await server.stop(0.1)
    assert (probe.events.count("closed"), probe.events[-1]) == (1, "closed")


async def test_a_session_sees_the_metadata_and_may_speak_first() -> None:
    async with probing(greeting=b"hello") as (_, peer, probe):
        assert await peer.read() == b"hello"

    assert probe.metadata["x-who"] == "me"


async def test_messages_come_in_order_and_none_after_the_end() -> None:
    async with probing() as (_, peer, _probe):
        await peer.call.write(b"twice, then end")
        assert [await peer.read() for _ in range(3)] == [b"one", b"two", None]
        assert await peer.ended() == (Code.FAILED_PRECONDITION, "50 % café")


async def test_an_exception_of_a_session_is_not_ok() -> None:
    async with probing() as (_, peer, _probe):
        await peer.call.write(b"raise")
        assert (await peer.ended())[0] is not Code.OK


async def test_messages_outside_a_pass_are_written_at_once_and_in_order() -> None:
    async with probing() as (_, peer, probe):
        for number in range(200):
            probe.call.send(b"%d" % number)
        await peer.call.write(b"twice")
        received = [await peer.read() for _ in range(202)]

    numbers = [message for message in received if message not in (b"one", b"two")]
    assert numbers == [b"%d" % number for number in range(200)]
    assert [message for message in received if message in (b"one", b"two")] == [b"one", b"two"]


@pytest.mark.parametrize("code", [Code.OK, Code.UNAVAILABLE, Code.NOT_FOUND])
@pytest.mark.parametrize("is_half_closed", [True, False])
async def test_an_rpc_that_its_service_ends_gets_all_messages_first(
    code: Code, is_half_closed: bool
) -> None:
    long = MAX_MESSAGE_BYTES // 2 * b"x"
    async with probing() as (_, peer, probe):
        if is_half_closed:
            await peer.call.done_writing()
            await eventually(lambda: "half_close" in probe.events)
        for message in (long, b"last"):
            probe.call.send(message)
        probe.call.end(code, "why")
        probe.call.send(b"too late")
        assert [await peer.read() for _ in range(3)] == [long, b"last", None]
        assert await peer.ended() == (code, "" if code is Code.OK else "why")


async def test_an_end_while_messages_wait_for_a_slow_peer_comes_after_them() -> None:
    """More than the peer's window: the writer is in the middle of it when the end is asked for."""
    chunks = [bytes([number]) * 100_000 for number in range(20)]
    async with probing() as (_, peer, probe):
        for chunk in chunks:
            probe.call.send(chunk)
        await asyncio.sleep(0.05)
        await peer.call.write(b"now end")
        await eventually(lambda: "now end" in probe.events)
        assert [await peer.read() for _ in range(21)] == [*chunks, None]
        assert (await peer.ended())[0] is Code.FAILED_PRECONDITION


async def test_a_watch_goes_on_after_the_half_close() -> None:
    async with probing() as (_, peer, probe):
        await peer.call.write(b"begin")
        await peer.call.done_writing()
        await eventually(lambda: "half_close" in probe.events)
        for message in (b"1", b"2"):
            probe.call.send(message)
            assert await peer.read() == message

    assert probe.events == ["begin", "half_close", "closed"]


@pytest.mark.parametrize("is_half_closed", [True, False])
async def test_sending_to_a_peer_that_disconnected_has_no_effect(
    is_half_closed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with probing() as (_, peer, probe):
        if is_half_closed:
            await peer.call.done_writing()
        peer.call.cancel()
        while "closed" not in probe.events:
            probe.call.send(1000 * b"x")
            await asyncio.sleep(0)
        probe.call.send(b"never")
        probe.call.end(Code.UNAVAILABLE)
        await asyncio.sleep(0.01)

    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_at_drain_only_long_lived_calls_are_ended() -> None:
    async with (
        probing(is_long_lived=True) as (server, watch, _),
        probing() as (other_server, request, _probe),
    ):
        server.end_long_lived()
        other_server.end_long_lived()
        assert await watch.ended() == (Code.UNAVAILABLE, "draining")
        await request.call.write(b"twice")
        assert await request.read() == b"one"


@contextlib.asynccontextmanager
async def asking(service: ExternalProcessor) -> AsyncIterator[tuple[GrpcioServer, Peer]]:
    """A request of which the headers have been answered."""
    server = GrpcioServer(service.methods(), max_message_bytes=MAX_MESSAGE_BYTES)
    channel = aio.insecure_channel(await server.start("127.0.0.1:0"))
    try:
        peer = Peer(channel.stream_stream(PROCESS, None, None)(None))
        await peer.call.write(request_headers())
        assert phase(await peer.read() or b"") == "request_headers"
        yield server, peer
    finally:
        await channel.close(None)
        await server.stop(0)


async def test_stopping_lets_rpcs_in_progress_end() -> None:
    async with asking(processor(FakeRouter())) as (server, peer):
        stopping = asyncio.ensure_future(server.stop(SOON_S))
        await asyncio.sleep(0.05)
        assert not stopping.done()
        await peer.call.write(request_body(BODY))
        assert destination(await peer.read() or b"") is not None
        assert (await peer.ended())[0] is Code.OK
        await stopping


async def test_rpcs_that_exceed_the_grace_period_are_cancelled() -> None:
    service = processor(FakeRouter())
    async with asking(service) as (server, peer):
        await server.stop(0.05)
        assert (await peer.ended())[0] is not Code.OK
        await eventually(lambda: service.num_open == 0)


# --- listening ------------------------------------------------------------------------------


async def test_an_address_that_is_taken_is_an_os_error() -> None:
    async with serving([Probes().method()]) as (_, channel):
        second = GrpcioServer([], max_message_bytes=MAX_MESSAGE_BYTES)
        with pytest.raises(OSError, match="cannot listen on 127.0.0.1"):
            await second.start(f"127.0.0.1:{channel._port}")
        await second.stop(0)


async def test_a_unix_socket_is_served_under_the_name_it_was_given(tmp_path: Path) -> None:
    server = GrpcioServer([Probes().method()], max_message_bytes=MAX_MESSAGE_BYTES)
    path = tmp_path / "s"
    assert await server.start(f"unix:{path}") == f"unix:{path}"
    channel = Channel(path=str(path), codec=RawCodec())
    try:
        assert await status_of(channel, b"end", path="/test.Probes/Watch") is (
            Status.FAILED_PRECONDITION
        )
    finally:
        channel.close()
        await server.stop(0.1)
