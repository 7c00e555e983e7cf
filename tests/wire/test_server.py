"""The wire's server on real sockets: TLS, drain, close, limits of a socket."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import uvloop

from extproc.files.tls import client_context
from extproc.wire import Abuse, Limits, frames
from extproc.wire.listenertls import Certificates
from extproc.wire.rpc import Method
from extproc.wire.server import WireServer, serve
from tests.pki import Pki
from tests.waiting import eventually
from tests.wire.fake_call import Idle
from tests.wire.peer import literals, message, raw, request
from tests.wire.wire_echo import ECHO, WATCH, grpcio_echo, running, stream

# ---- TLS


async def test_tls_offers_http2_and_checks_the_client(tmp_path: Path) -> None:
    pki = Pki(tmp_path)
    files = pki.issue("server")
    certificates = Certificates(*files, client_ca=pki.ca)

    def call(with_certificate: bool) -> list[bytes]:
        certificate, key = pki.issue("client")
        credentials = grpc.ssl_channel_credentials(
            pki.ca.read_bytes(),
            key.read_bytes() if with_certificate else None,
            certificate.read_bytes() if with_certificate else None,
        )
        options = [("grpc.ssl_target_name_override", "localhost")]
        with grpc.secure_channel(server.address, credentials, options=options) as channel:
            return list(stream(channel, ECHO)(iter([b"x" * 100_000]), timeout=60))

    async with running(ssl_context=certificates.context) as (server, _):
        assert await asyncio.to_thread(call, True) == [b"x" * 100_000]
        with pytest.raises(grpc.RpcError):
            await asyncio.to_thread(call, False)


async def test_tls_without_h2_is_closed(tmp_path: Path) -> None:
    pki = Pki(tmp_path)
    context = client_context(pki.ca)
    async with running(ssl_context=Certificates(*pki.issue("server")).context) as (server, _):
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", server.port, ssl=context, server_hostname="localhost"
        )
        with contextlib.suppress(OSError):
            assert await reader.read() == b""
        writer.close()


async def silent(server: WireServer, number: int) -> list[socket.socket]:
    """Connections that say nothing, once the server has seen them."""
    opened = server.counters.abuse[Abuse.TOO_MANY_CONNECTIONS] + len(server.wires)
    found = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(number)]

    def are_seen() -> bool:
        seen = server.counters.abuse[Abuse.TOO_MANY_CONNECTIONS] + len(server.wires)
        return seen - opened == number

    await eventually(are_seen)
    return found


async def test_connections_that_never_shake_hands_count_and_are_closed_in_time(
    tmp_path: Path,
) -> None:
    limits = Limits(max_connections=3, handshake_timeout_s=0.5)
    context = Certificates(*Pki(tmp_path).issue("server")).context
    async with running(ssl_context=context, limits=limits, tick_s=0.02) as (server, _):
        sockets = await silent(server, 5)
        assert server.counters.abuse[Abuse.TOO_MANY_CONNECTIONS] == 2
        assert all(wire.connection is None for wire in server.wires), "HTTP/2 never began"
        sockets[0].sendall(b"\x16\x03\x01\x02\x00\x01")  # begins a ClientHello
        await eventually(lambda: not server.wires)

        assert server.counters.abuse[Abuse.HANDSHAKE_TIMEOUT] == 3
        for each in sockets:
            each.close()


async def test_silent_tls_connections_neither_stop_a_drain_nor_a_close(tmp_path: Path) -> None:
    context = Certificates(*Pki(tmp_path).issue("server")).context
    async with running(ssl_context=context) as (server, _):
        sockets = await silent(server, 3)
        assert await server.drain(5.0)
    async with running(ssl_context=context) as (server, _):
        sockets += await silent(server, 3)
    for each in sockets:
        each.close()


async def test_a_peer_without_tls_gets_an_alert_and_is_closed(tmp_path: Path) -> None:
    context = Certificates(*Pki(tmp_path).issue("server")).context
    async with running(ssl_context=context) as (server, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"\x16\x03\x01\x00\x05hello")
        answer = await reader.read()
        writer.close()

        assert answer[:1] == b"\x15", "a TLS alert"
        await eventually(lambda: not server.wires)


async def test_tls_ends_with_close_notify_from_both_sides(tmp_path: Path) -> None:
    pki = Pki(tmp_path)
    context = client_context(pki.ca)
    context.set_alpn_protocols(["h2"])
    async with running(ssl_context=Certificates(*pki.issue("server")).context) as (server, _):

        async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            return await asyncio.open_connection(
                "127.0.0.1", server.port, ssl=context, server_hostname="localhost"
            )

        reader, writer = await connect()
        writer.write(b"x" * 24)  # no preface of HTTP/2: GOAWAY, and the end
        assert b"preface" in await reader.read()
        writer.close()
        reader, writer = await connect()
        await reader.readexactly(9)
        writer.close()
        await eventually(lambda: not server.wires)


async def test_changed_certificate_serves_the_next_connection(tmp_path: Path) -> None:
    pki = Pki(tmp_path)
    files = pki.issue("server")
    certificates = Certificates(*files)

    async def served() -> bytes:
        context = client_context(pki.ca)
        context.set_alpn_protocols(["h2"])
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", server.port, ssl=context, server_hostname="localhost"
        )
        certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        return bytes(certificate)

    options = {"ssl_context": certificates.context, "on_tick": certificates.reload_if_changed}
    async with running(**options) as (server, _):
        before = await served()
        pki.issue("server")
        async with asyncio.timeout(60):
            while await served() == before:
                await asyncio.sleep(0.1)


# ---- life


async def raw_client(server: WireServer, *frames: bytes) -> tuple[asyncio.StreamReader, Any]:
    """A client that sends the preface and then the given frames."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5))
    writer.write(bytes(3) + b"\x04\x01" + bytes(4) + b"".join(frames))
    return reader, writer


async def test_drain_moves_long_lived_calls_and_waits_for_the_others() -> None:
    async with running() as (server, sessions):

        def watch() -> str:
            with grpc.insecure_channel(server.address) as channel:
                call = stream(channel, WATCH)(iter([b"x"]), timeout=60)
                with pytest.raises(grpc.RpcError) as moved:
                    list(call)
                return str(moved.value.code().name)

        begun, go_on = threading.Event(), threading.Event()
        watching = asyncio.ensure_future(asyncio.to_thread(watch))
        echoing = asyncio.ensure_future(
            asyncio.to_thread(grpcio_echo_slowly, server.address, begun, go_on)
        )
        await eventually(lambda: len(sessions) == 2 and begun.is_set())
        draining = asyncio.ensure_future(server.drain(60))
        assert await watching == "UNAVAILABLE"
        assert not draining.done()
        go_on.set()

        assert await echoing == [b"one", b"two"]
        assert await draining
        with pytest.raises(OSError, match="refused|Connect call failed"):
            await asyncio.open_connection("127.0.0.1", server.port)


def grpcio_echo_slowly(target: str, begun: threading.Event, go_on: threading.Event) -> list[bytes]:
    """Echo two messages, the second on an event."""

    def bodies() -> Any:
        yield b"one"
        begun.set()
        go_on.wait(60)
        yield b"two"

    with grpc.insecure_channel(target) as channel:
        return list(stream(channel, ECHO)(bodies(), timeout=60))


async def test_drain_gives_up_after_its_time() -> None:
    async with running() as (server, _):
        _, writer = await raw_client(server)
        await eventually(lambda: bool(server.wires))

        assert not await server.drain(0.1)
        writer.close()


async def test_drain_without_connections_is_at_once() -> None:
    async with running() as (server, _):
        assert await server.drain(0)


async def test_close_loses_open_calls_and_closes_their_sessions() -> None:
    async with running() as (server, sessions):
        call = asyncio.ensure_future(asyncio.to_thread(grpcio_echo, server.address, [b"x"], WATCH))
        await eventually(lambda: bool(sessions))
        await server.close()

        assert sessions[0].num_closed == 1
        with pytest.raises(grpc.RpcError):
            await call


async def test_peer_that_breaks_the_protocol_reads_why() -> None:
    async with running() as (server, _):
        reader, writer = await raw_client(server, b"\0\0\x05\x06\0\0\0\0\0hello")
        got = await asyncio.wait_for(reader.read(), 60)
        writer.close()

        assert b"length of PING" in got
        await eventually(lambda: not server.wires)


async def test_connection_above_the_limit_is_closed() -> None:
    async with running(limits=Limits(max_connections=1)) as (server, _):
        _, first = await raw_client(server)
        await eventually(lambda: bool(server.wires))
        reader, second = await asyncio.open_connection("127.0.0.1", server.port)
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 60) == b""
        first.close()
        second.close()

        assert server.counters.abuse[Abuse.TOO_MANY_CONNECTIONS] == 1


async def test_a_lost_connection_leaves_nothing_to_the_garbage_collector() -> None:
    """Whoever connects again and again must not cause pauses for others."""
    async with running() as (server, _):
        _, writer = await raw_client(server, echo_request(1))
        await eventually(lambda: any(wire.connection for wire in server.wires))
        [wire] = server.wires
        gone = weakref.ref(wire.connection)
        del wire
        gc.collect()
        gc.disable()
        try:
            writer.close()
            await eventually(lambda: not server.wires)

            assert gone() is None
        finally:
            gc.enable()


async def test_silent_connection_is_closed() -> None:
    async with running(limits=Limits(handshake_timeout_s=0.1)) as (server, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        await asyncio.wait_for(reader.read(), 60)
        writer.close()

        assert server.counters.abuse[Abuse.HANDSHAKE_TIMEOUT] == 1


PING = b"\0\0\x08\x06\0" + bytes(12)


def echo_request(stream_id: int) -> bytes:
    """A call and its message."""
    block = raw(frames.HEADERS, 4, stream_id, b"\x20" + literals(request(pseudo_path=ECHO)))
    return block + raw(frames.DATA, 0, stream_id, message(b"x"))


class Notifying(Idle):
    """A session that calls back on each message."""

    def __init__(self, on_message: Callable[[], object]) -> None:
        self._on_message = on_message

    def receive(self, message: bytes) -> None:
        self._on_message()


@pytest.mark.parametrize("is_lost", [False, True], ids=["to its end", "lost between the passes"])
async def test_others_have_a_turn_between_the_passes_over_one_read(is_lost: bool) -> None:
    noted: list[str] = []

    def others() -> None:
        noted.append("others")
        for wire in server.wires if is_lost else ():
            wire.abort()

    def on_message() -> None:
        noted.append("message")
        asyncio.get_running_loop().call_soon(others)

    server = await serve([Method(ECHO, lambda call, metadata: Notifying(on_message))])
    burst = echo_request(1) + PING * 2000 + echo_request(3)
    _, writer = await raw_client(server, burst)
    await eventually(lambda: len(noted) == (2 if is_lost else 4))
    writer.close()
    await eventually(lambda: not server.wires)
    await server.close()

    assert noted == ["message", "others"] * (1 if is_lost else 2)


async def test_others_have_a_turn_between_the_passes_over_reads_of_several_peers() -> None:
    """However many send much, the others wait for one pass and not for one of each."""
    noted: list[str] = []

    def on_message() -> None:
        noted.append("message")
        asyncio.get_running_loop().call_soon(noted.append, "others")

    server = await serve([Method(ECHO, lambda call, metadata: Notifying(on_message))])
    writers = [(await raw_client(server))[1] for _ in range(3)]
    # No pass has two messages, and the first of each read none.
    burst = b"".join(PING * 70 + echo_request(stream_id) for stream_id in (1, 3, 5))
    for writer in writers:
        writer.write(burst)
    await eventually(lambda: len(noted) == 18)
    for writer in writers:
        writer.close()
    await eventually(lambda: not server.wires)
    await server.close()

    assert noted == ["message", "others"] * 9


async def test_peer_that_never_reads_loses_its_connection_and_no_other() -> None:
    """It requests pongs and reads none; another client is served meanwhile."""
    limits = Limits(max_write_buffer_bytes=100_000, max_control_frames=10**9)
    async with running(limits=limits) as (server, _):
        _, writer = await raw_client(server)
        writer.transport.pause_reading()
        pings = (b"\0\0\x08\x06\0" + bytes(12)) * 10_000
        with contextlib.suppress(OSError):
            while server.counters.abuse[Abuse.SLOW_READER] == 0:
                writer.write(pings)
                await asyncio.wait_for(writer.drain(), 60)
        got = await asyncio.to_thread(grpcio_echo, server.address, [b"x"])
        writer.close()

        assert got == [b"x"]
        assert server.counters.abuse[Abuse.SLOW_READER] == 1


async def test_megabytes_go_to_a_reader_that_is_only_slow() -> None:
    """Past the high-water mark the core holds back, and goes on when there is room."""
    async with running() as (server, sessions):

        def watch() -> int:
            options = [("grpc.max_receive_message_length", -1)]
            with grpc.insecure_channel(server.address, options=options) as channel:
                call = stream(channel, WATCH)(iter([b"x"]), timeout=60)
                return sum(len(message) for message in call)

        reading = asyncio.ensure_future(asyncio.to_thread(watch))
        await eventually(lambda: bool(sessions) and sessions[0].has_received)
        for _ in range(10):
            sessions[0].call.send(b"x" * 3_000_000)
        sessions[0].call.end()

        assert await reading == 30_000_000 + len(b"watching")


async def test_address_in_use_is_an_error() -> None:
    async with running() as (server, _):
        with pytest.raises(OSError, match="in use"):
            await serve([], port=server.port)


def test_everything_runs_on_uvloop_too(tmp_path: Path) -> None:
    async def main() -> None:
        await test_tls_offers_http2_and_checks_the_client(tmp_path)
        await test_changed_certificate_serves_the_next_connection(tmp_path)
        await test_connections_that_never_shake_hands_count_and_are_closed_in_time(tmp_path)
        await test_silent_tls_connections_neither_stop_a_drain_nor_a_close(tmp_path)
        await test_tls_ends_with_close_notify_from_both_sides(tmp_path)
        await test_drain_moves_long_lived_calls_and_waits_for_the_others()
        await test_peer_that_breaks_the_protocol_reads_why()
        await test_peer_that_never_reads_loses_its_connection_and_no_other()
        await test_megabytes_go_to_a_reader_that_is_only_slow()
        await test_close_loses_open_calls_and_closes_their_sessions()

    uvloop.run(main())
