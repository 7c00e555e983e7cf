"""The streams of one connection: which are open, how the others closed, and whose end is due.

Every stream that a method has opened gets `closed()` exactly once, and never from inside another
call to its session: ends are noted where they happen and told in `settle`.
"""

from __future__ import annotations

from collections.abc import Callable

from extproc.core.budget import Budget
from extproc.core.wire import frames
from extproc.core.wire.errors import ConnectionFault, ErrorCode, StreamFault
from extproc.core.wire.limits import Abuse, Counters, Limits
from extproc.core.wire.outbox import Outbox
from extproc.core.wire.service import NO_SESSION, Code
from extproc.core.wire.states import TABLE, ClosedStreams, Scope, State, Verdict
from extproc.core.wire.stream import WireStream


class Streams:
    """Book of the streams of one connection.

    Attributes:
        open: Streams not closed yet, by identifier.
        closed: How the latest others closed.
        last_id: Highest identifier that the peer has used.
        partial_since_s: When the half-received messages began, by stream.
        deadlines_s: When calls with a `grpc-timeout` run out, by stream.
    """

    __slots__ = (
        "_finished",
        "_on_session_error",
        "budget",
        "closed",
        "counters",
        "deadlines_s",
        "last_id",
        "limits",
        "open",
        "outbox",
        "partial_since_s",
    )

    def __init__(
        self,
        outbox: Outbox,
        limits: Limits,
        counters: Counters,
        budget: Budget,
        on_session_error: Callable[[Exception, str], None],
    ) -> None:
        self.outbox = outbox
        self.limits = limits
        self.counters = counters
        self.budget = budget
        self.open: dict[int, WireStream] = {}
        self.closed = ClosedStreams()
        self.last_id = 0
        self.partial_since_s: dict[int, float] = {}
        self.deadlines_s: dict[int, float] = {}
        self._finished: list[WireStream] = []
        self._on_session_error = on_session_error

    def state(self, stream_id: int) -> State:
        """Say which state a client-initiated stream is in (9113 5.1)."""
        if stream_id > self.last_id:
            return State.IDLE
        stream = self.open.get(stream_id)
        if stream is None:
            return self.closed.state(stream_id)
        return State.HALF_CLOSED_REMOTE if stream.is_half_closed else State.OPEN

    def verdict(self, stream_id: int, kind: int) -> Verdict:
        """Look up what the table says to a frame on a stream."""
        return TABLE[self.state(stream_id), kind]

    def obey(self, stream_id: int, kind: int) -> Scope:
        """Say whether a frame is to be handled or discarded.

        Raises:
            ConnectionFault: The table says so.
            StreamFault: The table says so.
        """
        # 9113 5.1.1: even identifiers are the server's, and we never open a stream.
        if not stream_id & 1:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "frame on an idle stream")
        scope, code = self.verdict(stream_id, kind)
        if scope is Scope.CONNECTION_ERROR:
            raise ConnectionFault(code, f"frame of type {kind} on stream {stream_id}")
        if scope is Scope.STREAM_ERROR:
            raise StreamFault(code, f"frame of type {kind} on stream {stream_id}")
        return scope

    @property
    def is_full(self) -> bool:
        """Whether a limit forbids one more stream."""
        limits, counters = self.limits, self.counters
        return (
            len(self.open) >= limits.max_streams_per_connection
            or counters.streams_open >= limits.max_streams
            or self.budget.is_full
        )

    # ---- what sessions are told

    def deliver(self, stream: WireStream, message: bytes) -> None:
        """Give one message to the session; what it raises ends its own stream only."""
        try:
            stream.session.receive(message)
        except Exception as error:
            self.fail_session(stream, error)

    def end_request(self, stream: WireStream) -> None:
        """The peer has ended its side (9113 5.1 half-closed (remote))."""
        stream.is_half_closed, stream.is_plain = True, False
        if stream.is_ended:
            return
        if stream.partial is not None:
            stream.end(Code.INTERNAL, "request ended inside a message")
            return
        try:
            stream.session.half_close()
        except Exception as error:
            self.fail_session(stream, error)

    def fail_session(self, stream: WireStream, error: Exception) -> None:
        """A session has raised: INTERNAL for its peer, the error for our log."""
        self.counters.session_errors += 1
        self._on_session_error(error, stream.path)
        stream.end(Code.INTERNAL, "internal error")

    def give_up(self, stream: WireStream) -> None:
        """There is no room for what a stream holds: its session answers, or we do."""
        self.counters.abuse[Abuse.BUFFERED_BYTES] += 1
        answer: Callable[[], None] | None = getattr(stream.session, "give_up", None)
        if answer is not None:
            try:
                answer()
            except Exception as error:
                self.fail_session(stream, error)
        stream.end(Code.RESOURCE_EXHAUSTED, "no memory for this message now")
        if stream.id in self.open:
            # Its answer waits for a window; what it holds must not.
            self._let_go(stream)

    def settle(self) -> None:
        """Tell the sessions whose streams are closed; they may end further streams."""
        while self._finished:
            finished, self._finished = self._finished, []
            for stream in finished:
                # Session and stream know each other; apart, both go without the garbage collector.
                session, stream.session = stream.session, NO_SESSION
                try:
                    session.closed()
                except Exception as error:
                    self.counters.session_errors += 1
                    self._on_session_error(error, stream.path)

    # ---- how streams close

    def on_answered(self, stream: WireStream) -> None:
        """Our trailers are written; if the peer had not ended, a reset went with them."""
        self.counters.streams_answered += 1
        self._close(stream, is_by_peer=stream.is_half_closed)

    def on_reset_by_peer(self, stream: WireStream) -> None:
        """9113 6.4: nothing more is sent for the stream, not even what this pass had made."""
        self.counters.streams_reset_by_peer += 1
        self.outbox.drop(stream)
        self._close(stream, is_by_peer=True)

    def reset(self, stream_id: int, code: ErrorCode) -> None:
        """9113 5.4.2: end a stream with RST_STREAM; what was queued for it is forgotten."""
        self.outbox.put(stream_id, frames.rst_stream(stream_id, code))
        stream = self.open.get(stream_id)
        if stream is None:
            self.closed.remember(stream_id, is_by_peer=False)
            return
        self.outbox.forget_queue(stream)
        self.counters.streams_reset_by_us += 1
        self._close(stream, is_by_peer=False)

    def expire(self, now: float) -> None:
        """End the calls and the half-received messages whose time is up."""
        for stream_id, deadline_s in list(self.deadlines_s.items()):
            if now >= deadline_s:
                # gRPC "Client Cancellation": a server whose deadline expires "should locally
                # cancel the RPC and send RST_STREAM with CANCEL error code".
                self.reset(stream_id, ErrorCode.CANCEL)
        for stream_id, since_s in list(self.partial_since_s.items()):
            if now - since_s > self.limits.message_timeout_s:
                self.counters.abuse[Abuse.STALLED_MESSAGE] += 1
                self.open[stream_id].end(Code.DEADLINE_EXCEEDED, "message announced, not sent")

    def lose_all(self) -> None:
        """The connection is gone, and every open stream with it."""
        for stream in list(self.open.values()):
            self.outbox.forget_queue(stream)
            self.counters.streams_lost += 1
            self._close(stream, is_by_peer=True)

    def _close(self, stream: WireStream, *, is_by_peer: bool) -> None:
        stream_id = stream.id
        del self.open[stream_id]
        self.closed.remember(stream_id, is_by_peer=is_by_peer)
        stream.is_ended, stream.is_plain = True, False
        self.counters.streams_open -= 1
        if self.deadlines_s:
            self.deadlines_s.pop(stream_id, None)
        if stream.held_bytes:
            self._let_go(stream)
        self._finished.append(stream)

    def _let_go(self, stream: WireStream) -> None:
        """Nobody will use what the stream holds."""
        if stream.partial is not None:
            self.forget_partial(stream)
        stream.kept_bytes = 0
        self.budget.leave(stream)

    def forget_partial(self, stream: WireStream) -> None:
        """Forget the half-received message of a stream that has one; the budget is told apart."""
        del self.partial_since_s[stream.id]
        stream.partial = None
