"""Our own gRPC server: sockets and the clock around `extproc.wire`.

Almost always one pass per read and one write per pass. `data_received` hands the bytes to the
connection, which calls the sessions, and writes all their responses at once. There is no task,
future or await per request. If a read holds more than one pass's work, the rest waits until other
connections have had a turn, in one line with the rests of other reads. Services may also respond
later, from any callback of the same loop; then one write is scheduled for everything that has
collected by the time it runs.

Reading pauses between the passes over one read, and never otherwise: WINDOW_UPDATE and RST_STREAM
arrive on that same socket. When the socket is full, it queues per stream instead, within
`Limits.max_queued_bytes`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, cast

from extproc.address import Address
from extproc.passes import PassScheduler
from extproc.wire import Abuse, Connection, Counters, Limits
from extproc.wire.budget import Budget
from extproc.wire.limits import DEFAULT_LIMITS
from extproc.wire.listenertls import TlsBytes, TlsError
from extproc.wire.mismatches import Mismatch, is_plain_http
from extproc.wire.rpc import Method

log = logging.getLogger(__name__)

# Enough for several passes. Beyond it, DATA waits in its stream, where a reset can still drop it.
_WRITE_HIGH_WATER_BYTES: Final = 1024 * 1024
# Time for the peer to read our GOAWAY before the socket closes. If it closed at once, the kernel
# would respond to unread bytes with a TCP reset, which overtakes the GOAWAY.
_LINGER_S: Final = 1.0

OnSessionError = Callable[[Exception, str], None]


def _log_session_error(error: Exception, path: str) -> None:
    log.error("session of %s raised", path, exc_info=error)


def _host_of(transport: asyncio.BaseTransport | None) -> str:
    peer = None if transport is None else transport.get_extra_info("peername")
    return str(peer[0]) if isinstance(peer, tuple) else ""  # that of a Unix socket is a path


class _Wire(asyncio.Protocol):
    """One socket, with or without TLS; counted and timed from the moment it is accepted."""

    def __init__(self, server: WireServer) -> None:
        self._server = server
        self._loop = server.loop
        self._opened_s = self._loop.time()
        self._tls = TlsBytes(server.ssl_context) if server.ssl_context is not None else None
        self._transport: asyncio.Transport | None = None
        self._is_closing = False
        self._rest, self._position = b"", 0  # the unprocessed part of a read
        self.connection: Connection | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports implement the interface without being registered for it.
        tcp = cast(asyncio.Transport, transport)
        self._transport = tcp
        server = self._server
        if len(server.wires) >= server.limits.max_connections:
            server.counters.abuse[Abuse.TOO_MANY_CONNECTIONS] += 1
            self.abort()
            return
        server.wires.add(self)
        tcp.set_write_buffer_limits(high=_WRITE_HIGH_WATER_BYTES)
        if self._tls is None:
            self._begin()

    def _begin(self) -> None:
        """Begin HTTP/2: the connection is open, and TLS established."""
        server = self._server
        self.connection = Connection(
            server.methods,
            now=self._opened_s,
            host=_host_of(self._transport),
            limits=server.limits,
            counters=server.counters,
            budget=server.budget,
            on_output_ready=self._schedule_flush,
            on_session_error=server.on_session_error,
        )
        self.flush()
        if server.is_draining:
            self.start_drain()

    def data_received(self, data: bytes) -> None:
        if self._tls is not None:
            data = self._decrypt(self._tls, data)
        if self._rest:
            self._rest += data  # read before reading was paused
        else:
            self._receive(data, 0)

    def _receive(self, data: bytes, position: int) -> None:
        connection, transport = self.connection, self._transport
        if connection is not None and position < len(data):
            position = connection.receive_pass(data, position, now=self._loop.time())
            self.flush()
            if position < len(data) and transport is not None and not transport.is_closing():
                transport.pause_reading()
                self._rest, self._position = data, position
                self._server.line_up(self)
                return
        if self._tls is not None and self._tls.is_over:
            self._hang_up()

    def go_on(self) -> None:
        """Make the next pass over the last read."""
        data, self._rest = self._rest, b""
        transport = self._transport
        if transport is not None and not transport.is_closing():
            transport.resume_reading()
            self._receive(data, self._position)

    def _decrypt(self, tls: TlsBytes, data: bytes) -> bytes:
        if self._transport is None or self._is_closing:
            return b""
        try:
            if not tls.has_begun and is_plain_http(data):
                self._note(Mismatch.PLAINTEXT_TO_TLS)
            data = tls.receive(data)
        except TlsError as error:
            if error.lacks_http2:
                self._note(Mismatch.TLS_WITHOUT_HTTP2)
            level = logging.WARNING if error.is_refusal else logging.DEBUG
            log.log(level, "connection from %s: %s", self._peer(), error)
            self._transport.write(tls.data_to_send())
            self._hang_up()
            return b""
        self._transport.write(tls.data_to_send())
        if tls.is_ready and self.connection is None:
            self._begin()
        return data

    def _note(self, kind: Mismatch) -> None:
        mismatches = self._server.counters.mismatches
        mismatches.note(kind, _host_of(self._transport), now=self._loop.time())

    def _peer(self) -> str:
        name = self._transport and self._transport.get_extra_info("peername")
        return name[0] if isinstance(name, tuple) else "a Unix socket"

    def _hang_up(self) -> None:
        """Close after the end of TLS: nothing more can be sent."""
        self._is_closing = True
        if self._transport is not None:
            self._transport.close()
            self._loop.call_later(_LINGER_S, self.abort)

    def pause_writing(self) -> None:
        if self.connection is not None:
            self.connection.outbox.pause()

    def resume_writing(self) -> None:
        if self.connection is not None:
            self.connection.outbox.resume()
            self.flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self.connection is not None:
            self.connection.lose()
            self.connection = None
        self._server.on_wire_lost(self)

    def _schedule_flush(self) -> None:
        self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Write pending output; close if the connection is over."""
        connection, transport = self.connection, self._transport
        if connection is None or transport is None:
            return
        data = connection.data_to_send()
        if data and not self._is_closing:
            self._write(transport, data)
            if transport.get_write_buffer_size() > self._server.limits.max_write_buffer_bytes:
                self._server.counters.abuse[Abuse.SLOW_READER] += 1
                self.abort()
                return
        if connection.is_over and not self._is_closing:
            self._close(transport)

    def _write(self, transport: asyncio.Transport, data: bytes) -> None:
        if self._tls is not None:
            self._tls.send(data)
            data = self._tls.data_to_send()
        transport.write(data)

    def _close(self, transport: asyncio.Transport) -> None:
        self._is_closing = True
        if self._tls is not None:
            self._tls.close()
            transport.write(self._tls.data_to_send())
        if transport.can_write_eof():
            transport.write_eof()
            self._loop.call_later(_LINGER_S, self.abort)
        else:
            transport.close()

    def tick(self) -> None:
        """Enforce the time limits."""
        if self.connection is not None:
            self.connection.tick(now=self._loop.time())
            self.flush()
        elif self._loop.time() - self._opened_s > self._server.limits.handshake_timeout_s:
            self._server.counters.abuse[Abuse.HANDSHAKE_TIMEOUT] += 1
            self.abort()

    def start_drain(self) -> None:
        """Ask the peer to reconnect elsewhere. Before the end of the TLS handshake, just close."""
        if self.connection is not None:
            self.connection.start_drain(now=self._loop.time())
            self.flush()
        else:
            self.abort()

    def abort(self) -> None:
        """Drop the socket and its unsent bytes."""
        if self._transport is not None:
            self._transport.abort()


@dataclass(eq=False)
class WireServer:
    """A listening server; made by `serve`.

    Attributes:
        address: `host:port`, or `unix:` and the path.
        wires: Open sockets.
    """

    methods: Mapping[str, Method]
    limits: Limits
    counters: Counters
    budget: Budget
    ssl_context: ssl.SSLContext | None
    on_session_error: OnSessionError
    on_tick: Callable[[], object]
    tick_s: float
    address: str = ""
    is_draining: bool = False
    wires: set[_Wire] = field(default_factory=set)
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    _pass_scheduler: PassScheduler = field(init=False)
    _listener: asyncio.Server | None = None
    _all_lost: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._pass_scheduler = PassScheduler(self.loop.call_later)
        self._timer = self.loop.call_later(self.tick_s, self._tick)
        self.budget.tick(now=self.loop.time())

    async def listen(self, host: str, port: int, path: str | None) -> None:
        """Bind; called once, by `serve`."""
        if path is not None:
            self._listener = await self.loop.create_unix_server(lambda: _Wire(self), path)
            self.address = f"unix:{path}"
        else:
            self._listener = await self.loop.create_server(lambda: _Wire(self), host, port)
            name = self._listener.sockets[0].getsockname()
            self.address = str(Address(name[0], name[1]))

    @property
    def port(self) -> int:
        """The bound TCP port. Raises ValueError on a Unix socket."""
        return Address.parse(self.address).port

    async def drain(self, timeout_s: float) -> bool:
        """Stop listening, ask every peer to reconnect elsewhere, and wait until all have left.

        Calls in progress finish; those of long-lived methods end with UNAVAILABLE.

        Returns:
            Whether all had left within `timeout_s`; `close` drops the rest.
        """
        self.is_draining = True
        self._stop_listening()
        for wire in list(self.wires):
            wire.start_drain()
        if not self.wires:
            return True
        self._all_lost.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._all_lost.wait(), timeout_s)
        return not self.wires

    async def close(self) -> None:
        """Stop now. Open calls are lost; their sessions are closed."""
        self._stop_listening()
        self._timer.cancel()
        for wire in list(self.wires):
            wire.abort()
        if self.wires:
            self._all_lost.clear()
            await self._all_lost.wait()

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
            if self.address.startswith("unix:"):
                Path(self.address[5:]).unlink(missing_ok=True)

    def line_up(self, wire: _Wire) -> None:
        """Have a socket go on with its read when it is its turn.

        One pass of one socket, then everything else: with a pass of each, the wait of other sockets
        would grow with the number of busy senders.
        """
        self._pass_scheduler.add(wire.go_on)

    def on_wire_lost(self, wire: _Wire) -> None:
        """Forget a closed socket."""
        self.wires.discard(wire)
        if not self.wires:
            self._all_lost.set()

    def _tick(self) -> None:
        self._timer = self.loop.call_later(self.tick_s, self._tick)
        self.on_tick()
        self.budget.tick(now=self.loop.time())
        for wire in list(self.wires):
            wire.tick()


async def serve(
    methods: Iterable[Method],
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    path: str | None = None,
    ssl_context: ssl.SSLContext | None = None,
    limits: Limits = DEFAULT_LIMITS,
    counters: Counters | None = None,
    budget: Budget | None = None,
    on_session_error: OnSessionError = _log_session_error,
    on_tick: Callable[[], object] = lambda: None,
    tick_s: float = 0.5,
) -> WireServer:
    """Serve methods over HTTP/2: on the Unix socket `path`, else on `host` and `port` (0: any).

    Args:
        ssl_context: TLS context, which must offer `h2` by ALPN; None for plain text.
        limits: Bounds on the resources of a peer.
        counters: Shared by all connections, for metrics.
        budget: Memory for the bodies of all connections together.
        on_session_error: Called with an exception of a session and its method's path.
        on_tick: Called every `tick_s`, e.g. `Certificates.reload_if_changed`.
        tick_s: Interval, and so precision, of the time limits.

    Raises:
        OSError: The address cannot be bound.
    """
    server = WireServer(
        {method.path: method for method in methods},
        limits,
        counters or Counters(),
        budget or Budget(max_upload_bytes=limits.max_message_bytes),
        ssl_context,
        on_session_error,
        on_tick,
        tick_s,
    )
    try:
        await server.listen(host, port, path)
    except OSError:
        await server.close()
        raise
    return server
