"""An HTTP listener that holds no resources for ever, however its peers behave.

aiohttp closes idle connections and bounds the size of headers. The rest is bounded here, around it:
the number of connections, the time for a request to arrive, and the time for a response to be
read. Connections over a limit are aborted: closing would wait for the peer to read what is left.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import cast

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Bounds on the resources of a listener's peers.

    Attributes:
        max_connections: Open at one time; further ones are dropped at once. Prometheus needs one, a
            browser six at most, and the live page has its own limit.
        request_s: From connecting, or from a request's first byte, to the end of its headers.
        idle_s: Between two requests of a connection; above Prometheus's usual minute.
        answer_s: Longest time that a response may remain unread.
        max_unread_bytes: Unread on all connections together; the connection that exceeds it is
            dropped. Thirty pages of metrics about a thousand pods.
        body_s: Time to read and discard a request's body, so that the response arrives.
        stop_s: Time for requests in progress when the listener stops.
        tick_s: Interval of the checks, and so the precision of the times.
    """

    max_connections: int = 128
    request_s: float = 10.0
    idle_s: float = 75.0
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


DEFAULT_HTTP_LIMITS = HttpLimits()


@dataclass(eq=False)
class HttpListener:
    """Serves an application on one address.

    Attributes:
        port: 0 for a free one; the bound port, once started.
        limits: Bounds on the resources of peers.
        dropped: Counts dropped connections.
    """

    host: str
    port: int
    limits: HttpLimits
    dropped: Counter[HttpLimit]
    guards: dict[object, _Guard] = field(default_factory=dict)
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
            handler_cancellation=True,  # no work for clients that have disconnected
            keepalive_timeout=limits.idle_s,
            lingering_time=limits.body_s,
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

    def _tick(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self.limits.tick_s, self._tick)
        for guard in tuple(self.guards.values()):
            guard.tick()

    @web.middleware
    async def _note_request(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        guard = self.guards.get(request.protocol)
        if guard is None:
            return await handler(request)
        guard.since_s, guard.is_answering = None, True
        try:
            return await handler(request)
        finally:
            guard.is_answering = False


class _Guard(asyncio.Protocol):
    """One connection: passes everything on to aiohttp's protocol, and enforces the limits.

    Attributes:
        since_s: Start of the request that is arriving; None while none is.
        is_answering: Whether a handler has it, which bounds the time of the body that it reads.
    """

    def __init__(
        self, listener: HttpListener, server: web.Server, clock: Callable[[], float]
    ) -> None:
        self._listener = listener
        self._inner = server()
        self._clock = clock
        self._transport: asyncio.Transport | None = None
        self._unread_since_s: float | None = None
        self.since_s: float | None = None
        self.is_answering = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports implement the interface without being registered for it.
        tcp, guards = cast(asyncio.Transport, transport), self._listener.guards
        if len(guards) >= self._listener.limits.max_connections:
            self._listener.dropped[HttpLimit.CONNECTIONS] += 1
            tcp.abort()
            return
        self._transport = tcp
        self.since_s = self._clock()
        guards[self._inner] = self
        self._inner.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._transport is not None:
            del self._listener.guards[self._inner]
            self._inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._transport is not None:
            if self.since_s is None and not self.is_answering:
                self.since_s = self._clock()
            self._inner.data_received(data)

    def eof_received(self) -> None:
        self._inner.eof_received()

    def pause_writing(self) -> None:
        guards = self._listener.guards.values()
        if sum(each.num_unread_bytes for each in guards) > self._listener.limits.max_unread_bytes:
            self._drop(HttpLimit.ANSWER)
        self._inner.pause_writing()

    def resume_writing(self) -> None:
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
            self._unread_since_s = None
        elif self._unread_since_s is None:
            self._unread_since_s = now
        elif now - self._unread_since_s > limits.answer_s:
            self._drop(HttpLimit.ANSWER)
            return
        if self.since_s is not None and now - self.since_s > limits.request_s:
            self._drop(HttpLimit.REQUEST)

    def abort(self) -> None:
        """Drop the socket and its unsent bytes."""
        if self._transport is not None:
            self._transport.abort()

    def _drop(self, limit: HttpLimit) -> None:
        self._listener.dropped[limit] += 1
        self.abort()
