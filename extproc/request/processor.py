"""The ext_proc service: messages to `Stream` events, commands to messages, and nothing else.

A bug must never end an RPC with OK: Envoy would forward the request without a destination, whatever
its `failure_mode_allow`. An exception here becomes INTERNAL, a broken protocol INVALID_ARGUMENT,
and Envoy sends its client an error.

Before the service is ready, RPCs end with UNAVAILABLE. A response, even a 503, would be final; this
way Envoy tries another router, or continues without one if it fails open.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, takewhile
from typing import Any

from msgspec import Struct

from extproc.errors import ProtocolError
from extproc.meters import Meters
from extproc.passes import PassScheduler, TimerHandle
from extproc.request import messages as m
from extproc.request.body import MAX_ECHOED
from extproc.request.codec import Codec
from extproc.request.interfaces import StreamObserver, StreamParts, StreamSettings
from extproc.request.stream import Stream
from extproc.request.transitions import CallState
from extproc.wire.rpc import Call, Code, Metadata, Method, Session

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"

PROTOCOL, INTERNAL, SILENCE = _CAUSES = "protocol", "internal", "silence"

MAX_SILENCE_S = 900.0
"""Longest wait for the data plane's next message: three times Envoy's default limit for a silent
client (`stream_idle_timeout`), as no messages come while Envoy buffers a slow upload. It is
detected within twice the time."""

LARGE_BYTES = 1024 * 1024
"""Of a body of ours that is encoded in a pass of its own: to copy one of 16 MiB takes 4 ms."""

log = logging.getLogger(__name__)
_DONE = CallState.DONE
_NOT_YET: Any = None  # it wakes its session, which has to be first
_NO_MESSAGES = frozenset((m.WakeAt, m.EchoRest, m.EndStream))
"""Commands that are not one message to the data plane."""


@dataclass(slots=True)
class ExternalProcessor:
    """Opens a stream per RPC.

    Attributes:
        parts: That streams call.
        settings: Of streams.
        clock: Monotonic seconds.
        call_later: Runs a callable after so many seconds, unless its handle is cancelled.
        is_open: Whether requests are accepted; called for each until they are.
        trace: Returns the observer of one stream, by its RPC's metadata; None for that of `parts`.
        num_broken: RPCs that an error ended, by cause: `PROTOCOL`, `INTERNAL` or `SILENCE`.
    """

    parts: StreamParts
    settings: StreamSettings
    codec: Codec
    clock: Callable[[], float]
    call_later: Callable[[float, Callable[[], None]], TimerHandle]
    is_open: Callable[[], bool] = lambda: True
    trace: Callable[[Metadata], StreamObserver] | None = None
    num_open: int = 0
    num_broken: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_CAUSES, 0))
    pass_scheduler: PassScheduler = field(init=False)
    _checked_at: dict[_Session, float] = field(default_factory=dict)  # undecided ones, oldest first
    _has_opened: bool = False

    def __post_init__(self) -> None:
        self.pass_scheduler = PassScheduler(self.call_later)

    def methods(self) -> list[Method]:
        """Return the service's methods."""
        return [Method(f"/{SERVICE}/Process", self._open)]

    def add_metrics(self, meters: Meters) -> None:
        """Register the calls that are open, and those that an error ended."""
        meters.add_gauge("streams_active", "Open ext_proc streams.", lambda: self.num_open)
        meters.add_counters(
            "streams_broken",
            "ext_proc calls that ended with an error. internal: the router failed, and "
            "the request got an error. protocol: Envoy broke the protocol. silence: it "
            "sent nothing for a request for 15 minutes. At most one log line in 10 s.",
            "cause",
            lambda: self.num_broken,
        )

    def broke(self, cause: str, message: str, *, with_traceback: bool = False) -> None:
        """Count and log an error; `observe.logs` limits how often."""
        self.num_broken[cause] += 1
        level = logging.ERROR if with_traceback else logging.WARNING
        log.log(level, "%s", message, exc_info=with_traceback)

    def _open(self, call: Call, metadata: Metadata) -> Session:
        if not (self._has_opened or self.is_open()):
            return _NotReady(call)
        self._has_opened = True
        self.num_open += 1
        session, parts = _Session(self, call, self.clock()), self.parts
        if self.trace is not None:
            parts = replace(parts, observer=self.trace(metadata))
        session._stream = Stream(parts, self.settings, session._wake_soon, call.host)
        self._checked_at[session] = session.received_s
        return session

    def tick(self) -> None:
        """End calls that the data plane has abandoned; to be called about once a second.

        Only calls that wait for its message: not while a policy holds the request, or during a
        response.
        """
        now = self.clock()
        before_s = now - MAX_SILENCE_S
        for session in list(
            takewhile(lambda each: self._checked_at[each] < before_s, self._checked_at)
        ):
            del self._checked_at[session]
            if session.awaits_message and session.received_s < before_s:
                self.broke(SILENCE, "the data plane has abandoned a request")
                session.fail(Code.DEADLINE_EXCEEDED, "no further message for the request")
            elif not session.is_answered:
                self._checked_at[session] = now


class _NotReady:
    """An RPC that ends with its first message: to gRPC's Python client one that has ended before it
    has sent that is an internal error, not an unavailable router."""

    __slots__ = ("_call",)

    def __init__(self, call: Call) -> None:
        self._call = call

    def receive(self, _message: bytes) -> None:
        self._call.end(Code.UNAVAILABLE, "not ready yet")

    def half_close(self) -> None:
        self._call.end(Code.UNAVAILABLE, "not ready yet")

    def closed(self) -> None:
        pass


class _Session(Struct, eq=False):
    """One RPC.

    Attributes:
        _rest: Commands that wait for their turn.
    """

    _service: ExternalProcessor
    _call: Call
    received_s: float
    _stream: Stream = _NOT_YET
    _timer: TimerHandle | None = None
    _is_holding: bool = False
    _is_half_closed: bool = False
    _rest: Sequence[m.Command] = ()
    _rest_bytes: int = 0

    @property
    def is_answered(self) -> bool:
        return self._stream.is_answered

    @property
    def awaits_message(self) -> bool:
        return self._stream.awaits_message

    def give_up(self, *, is_too_large: bool = False) -> None:
        if self._rest:
            self.fail(Code.RESOURCE_EXHAUSTED, "no memory for the rest of a body")
        else:
            self.receive(m.Overloaded(is_too_large))

    def _wake_soon(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._service.call_later(0.0, self._wake)

    def _wake_at(self, after_s: float) -> TimerHandle:
        service = self._service
        return (
            service.call_later(after_s, self._wake)
            if after_s > 0
            else service.pass_scheduler.add(self._wake)
        )

    def _wake(self) -> None:
        self._timer = None
        self.receive(m.Wakeup())

    def _go_on(self) -> None:
        self._timer = None
        self.receive(None)

    def receive(self, received: bytes | m.Event | None) -> None:
        """Execute the stream's commands for a message, or for an event of our own; the rest of
        earlier ones before them, or in part for None."""
        service, call = self._service, self._call
        try:
            event = service.codec.decode(received) if isinstance(received, bytes) else received
            now = self.received_s = service.clock()
            stream = self._stream
            if self._rest:
                rest, self._rest, self._rest_bytes = self._rest, (), 0
                self._execute(rest, now, MAX_ECHOED if event is None else None)
            if event is not None:
                self._execute(stream.handle(event, now=now), now)
            if stream.state is _DONE and not (self._is_holding or self._rest):
                return
            held_bytes = stream.held_bytes() + self._rest_bytes
            if held_bytes or self._is_holding:
                self._is_holding = held_bytes > 0
                call.hold(held_bytes, is_whole=stream.is_whole or self._rest_bytes > 0)
            if self._is_half_closed:
                self._end_if_half_closed()
        except ProtocolError as error:
            service.broke(PROTOCOL, f"the data plane broke the ext_proc protocol: {error}")
            self.fail(Code.INVALID_ARGUMENT, str(error))
        except Exception:
            service.broke(INTERNAL, "a request could not be handled", with_traceback=True)
            self.fail(Code.INTERNAL, "internal error, see the router's log")

    def _execute(self, commands: Sequence[m.Command], now: float, most: int | None = 0) -> None:
        """Execute commands; after `most` chunks of a body's rest go on in another pass, and with a
        large body that was made in this one (`most` is 0)."""
        call, encode = self._call, self._service.codec.encode
        for command in commands:
            kind = type(command)  # `isinstance` of another Struct takes CPython 0.2 us
            if kind not in _NO_MESSAGES:
                body = command.body if type(command) is m.ContinueBody else None
                if body is not None and most == 0 and len(body) > LARGE_BYTES:
                    self._put_off(commands, command, len(body))
                    return
                if len(commands) == 2 and commands[1] is m.END:
                    call.finish(encode(command))
                    return
                call.send(encode(command))
            elif kind is m.WakeAt:
                assert isinstance(command, m.WakeAt)
                self._timer = self._wake_at(command.at_s - now)
            elif kind is m.EchoRest:
                assert isinstance(command, m.EchoRest)
                num_sent = 0
                for chunk in islice(command.chunks, most):
                    call.send(encode(chunk))
                    num_sent += 1
                if num_sent == most:
                    self._put_off(commands, command, command.num_bytes)
                    return
            else:
                call.end()

    def _put_off(self, commands: Sequence[m.Command], first: m.Command, num_bytes: int) -> None:
        """Execute commands from one on in another pass."""
        self._rest, self._rest_bytes = commands[commands.index(first) :], num_bytes
        self._timer = self._service.pass_scheduler.add(self._go_on)

    def fail(self, code: Code, details: str) -> None:
        """End the RPC, and its pick if there is one: its request is not forwarded."""
        self._rest, self._rest_bytes = (), 0
        try:
            self._stream.abandon(now=self._service.clock())
        finally:
            self._call.end(code, details)

    def half_close(self) -> None:
        """End the RPC, unless the data plane still wants an answer (`is_wanted_half_closed`).

        Then it ends after that, once the body is read and no policy holds the request.
        """
        self._is_half_closed = True
        self._end_if_half_closed()

    def _end_if_half_closed(self) -> None:
        if self._rest:
            return
        if self.is_answered:
            self._call.end()
        elif self.awaits_message or not self._stream.is_wanted_half_closed:
            self._call.end(Code.CANCELLED, "closed before the request was answered")

    def closed(self) -> None:
        service = self._service
        service.num_open -= 1
        service._checked_at.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        stream = self._stream
        try:
            if stream.state is not _DONE:
                stream.handle(m.StreamEnded(), now=service.clock())
        except Exception:
            service.broke(INTERNAL, "a request could not be ended", with_traceback=True)
        stream.retire()
