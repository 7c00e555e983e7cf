"""An HTTP listener that holds no resources for ever, however its peers behave.

aiohttp closes idle connections and bounds the size of headers. The rest is bounded here, around it:
the number of connections, the time for a request to arrive, what arrives besides its body, and the
time for a response to be read. Connections over a limit are aborted: closing would wait for the
peer to read what is left.

A body is read as its handler takes it, a few KB ahead. The rest of what arrives is counted before
aiohttp gets it: bytes behind a request for another protocol, further requests, bytes that are none.
It would keep them until somebody asks for them, and some of them several times.

No peer keeps other peers out. Where connections or unread bytes are too many, those of the address
that has most of them are dropped. First come those that ask for nothing, then those that do not
read, the oldest first. Handlers bound the requests that hold a place for longer: the live page's
viewers, the requests of registration, those that wait for a turn.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf
from typing import Any, cast

from aiohttp import StreamReader, web
from aiohttp.http_exceptions import HttpProcessingError

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Bounds on the resources of a listener's peers.

    Attributes:
        max_connections: Open at one time; for a further one another is dropped, or itself where all
            are being answered. Prometheus needs one, a browser six at most.
        request_s: From connecting, or from a request's first byte, to the end of its headers.
        idle_s: Between two requests of a connection; above Prometheus's usual minute.
        max_ahead_bytes: Received on a connection since its last request began to be answered, apart
            from that request's body: heads, further requests, bytes that are no request.
        answer_s: Longest time that a response may remain unread.
        max_unread_bytes: Unread on all connections together; beyond, those that have not been read
            for longest are dropped. Thirty pages of metrics about a thousand pods.
        body_s: Time to read and discard a request's body, so that the response arrives.
        stop_s: Time for requests in progress when the listener stops.
        tick_s: Interval of the checks, and so the precision of the times.
    """

    max_connections: int = 128
    request_s: float = 10.0
    idle_s: float = 75.0
    max_ahead_bytes: int = 32 * 1024
    answer_s: float = 30.0
    max_unread_bytes: int = 32 * 1024 * 1024
    body_s: float = 1.0
    stop_s: float = 2.0
    tick_s: float = 1.0


class HttpLimit(StrEnum):
    """The limits that connections are dropped for."""

    CONNECTIONS = "connections"
    REQUEST = "request"
    ANSWER = "answer"
    AHEAD = "ahead"


DEFAULT_HTTP_LIMITS = HttpLimits()

_READ_BYTES = 16 * 1024  # of one read of a socket, all into one place
_BODY_BYTES = 4 * 1024  # of a body that aiohttp reads ahead, to twice that


@dataclass(eq=False)
class HttpListener:
    """Serves an application on one address.

    Attributes:
        port: 0 for a free one; the bound port, once started.
        limits: Bounds on the resources of peers.
        dropped: Counts dropped connections.
        guards: Of the open connections, by aiohttp's protocol.
        place: Where each socket is read into.
    """

    host: str
    port: int
    limits: HttpLimits
    dropped: Counter[HttpLimit]
    guards: dict[object, _Guard] = field(default_factory=dict)
    place: memoryview = field(default_factory=lambda: memoryview(bytearray(_READ_BYTES)))
    _runner: web.AppRunner | None = None
    _listener: asyncio.Server | None = None
    _timer: asyncio.TimerHandle | None = None

    async def start(self, app: web.Application) -> None:
        """Listen.

        Raises:
            OSError: The address cannot be listened on; nothing is left open.
        """
        limits, loop = self.limits, asyncio.get_running_loop()
        app.middlewares.insert(0, self._note_request)
        runner = web.AppRunner(
            app,
            access_log=None,
            logger=_Log(logging.getLogger("aiohttp.server"), {}),
            handler_cancellation=True,  # no work for clients that have disconnected
            keepalive_timeout=limits.idle_s,
            read_bufsize=_BODY_BYTES,
            lingering_time=limits.body_s,
            auto_decompress=False,  # a few bytes could become any number
            shutdown_timeout=limits.stop_s,
        )
        await runner.setup()
        server = runner.server
        assert server is not None
        try:
            listener = await loop.create_server(
                lambda: _Guard(self, server, loop.time), self.host, self.port
            )
        except OSError:
            await runner.cleanup()
            raise
        self._runner, self._listener = runner, listener
        self.port = listener.sockets[0].getsockname()[1]
        self._tick()

    async def stop(self) -> None:
        """Stop listening and close open connections; no effect if not started."""
        if self._runner is None or self._listener is None or self._timer is None:
            return
        self._listener.close()
        await self._runner.cleanup()
        self._timer.cancel()
        for guard in tuple(self.guards.values()):
            guard.abort()
        self._runner = None

    def make_room(self, host: str) -> bool:
        """Drop a connection for one more of `host`; return whether there was one to drop.

        One that is being answered goes only for another host than its own.
        """
        [(largest, num)] = Counter(guard.host for guard in self.guards.values()).most_common(1)
        found = min((each for each in self.guards.values() if each.host == largest), key=_rank)
        if found.is_answering and (largest == host or num == 1):
            return False
        found.drop(HttpLimit.CONNECTIONS)
        return True

    def keep_unread_bounded(self) -> None:
        """Drop connections until the bytes that are not read are within their limit."""
        while True:
            by_host: Counter[str] = Counter()
            for guard in self.guards.values():
                by_host[guard.host] += guard.num_unread_bytes
            if by_host.total() <= self.limits.max_unread_bytes:
                return
            [(largest, _)] = by_host.most_common(1)
            unread = [g for g in self.guards.values() if g.host == largest and g.num_unread_bytes]
            min(unread, key=_unread_since_s).drop(HttpLimit.ANSWER)

    def _tick(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self.limits.tick_s, self._tick)
        for guard in tuple(self.guards.values()):
            guard.tick()

    @web.middleware
    async def _note_request(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        guard = self.guards.get(request.protocol)
        if guard is None:
            return await handler(request)
        guard.begin(request.content)
        try:
            return await handler(request)
        finally:
            guard.is_answering = False


class _Guard(asyncio.BufferedProtocol):
    """One connection: passes everything on to aiohttp's protocol, and enforces the limits.

    Attributes:
        host: The peer's address, without its port.
        since_s: Start of the request that is arriving; None while none is.
        unread_since_s: When a response was first seen to be unread; None while none is.
        is_answering: Whether a handler has it, which bounds the time of the body that it reads.
    """

    def __init__(
        self, listener: HttpListener, server: web.Server, clock: Callable[[], float]
    ) -> None:
        self._listener = listener
        self._inner = server()
        self._clock = clock
        self._transport: asyncio.Transport | None = None
        self.host = ""
        self.unread_since_s: float | None = None
        self.since_s: float | None = None
        self.is_answering = False
        self._body: StreamReader | None = None
        self._num_body_bytes = self._num_ahead_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports implement the interface without being registered for it.
        tcp, listener = cast(asyncio.Transport, transport), self._listener
        guards = listener.guards
        self.host = str((tcp.get_extra_info("peername") or ("",))[0])
        is_full = len(guards) >= listener.limits.max_connections
        if is_full and not listener.make_room(self.host):
            listener.dropped[HttpLimit.CONNECTIONS] += 1
            tcp.abort()
            return
        self._transport = tcp
        self.since_s = self._clock()
        guards[self._inner] = self
        self._inner.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._transport is not None:
            self._listener.guards.pop(self._inner, None)
            self._inner.connection_lost(exc)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._listener.place

    def buffer_updated(self, nbytes: int) -> None:
        if self._transport is None:
            return
        if self.since_s is None and not self.is_answering:
            self.since_s = self._clock()
        body, num_before = self._body, self._num_body_bytes
        self._inner.data_received(bytes(self._listener.place[:nbytes]))
        # A body that cannot be read on neither ends nor fails: what it gets is what counts.
        self._num_body_bytes = 0 if body is None else body.total_bytes
        if self._num_body_bytes != num_before:
            self._num_ahead_bytes = 0
            return
        self._num_ahead_bytes += nbytes
        if self._num_ahead_bytes > self._listener.limits.max_ahead_bytes:
            self.drop(HttpLimit.AHEAD)

    def begin(self, body: StreamReader) -> None:
        """Note that a handler has the request with this body."""
        self.since_s, self.is_answering = None, True
        self._body, self._num_body_bytes, self._num_ahead_bytes = body, body.total_bytes, 0

    def eof_received(self) -> None:
        self._inner.eof_received()

    def pause_writing(self) -> None:
        self.unread_since_s = self._clock()
        self._listener.keep_unread_bounded()
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self.unread_since_s = None
        self._inner.resume_writing()

    @property
    def num_unread_bytes(self) -> int:
        """Bytes written that the kernel has not accepted yet."""
        assert self._transport is not None
        return self._transport.get_write_buffer_size()

    def tick(self) -> None:
        """Drop the connection if it has exceeded a time limit."""
        now, limits = self._clock(), self._listener.limits
        if not self.num_unread_bytes:
            self.unread_since_s = None
        elif self.unread_since_s is None:
            self.unread_since_s = now
        elif now - self.unread_since_s > limits.answer_s:
            self.drop(HttpLimit.ANSWER)
            return
        if self.since_s is not None and now - self.since_s > limits.request_s:
            self.drop(HttpLimit.REQUEST)

    def abort(self) -> None:
        """Drop the socket and its unsent bytes."""
        if self._transport is not None:
            self._transport.abort()

    def drop(self, limit: HttpLimit) -> None:
        """Drop the connection, for a limit; its place is free at once."""
        self._listener.dropped[limit] += 1
        self._listener.guards.pop(self._inner, None)
        self.abort()


class _Log(logging.LoggerAdapter[logging.Logger]):
    """The log of aiohttp, for which a malformed request is an error of this program: any peer could
    have it log tracebacks, and hide those of real ones behind the limit on repeated lines.
    """

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log a record, that of a malformed request at DEBUG."""
        if isinstance(kwargs.get("exc_info"), HttpProcessingError):
            level = logging.DEBUG
        super().log(level, msg, *args, **kwargs)


def _rank(guard: _Guard) -> int:
    """Return how much would be lost with a connection."""
    return 2 if guard.is_answering else 1 if guard.num_unread_bytes else 0


def _unread_since_s(guard: _Guard) -> float:
    return inf if guard.unread_since_s is None else guard.unread_since_s
