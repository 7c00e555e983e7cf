"""The streams of one connection: open ones, closed ones, and the pending `closed()` calls.

Every stream that a method has opened gets `closed()` exactly once, and never from inside another
call to its session: closed streams are collected, and their sessions called in `settle`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from extproc.wire import frames
from extproc.wire.budget import Budget
from extproc.wire.grpccall import WireStream
from extproc.wire.limits import Abuse, ConnectionFault, Counters, ErrorCode, Limits, StreamFault
from extproc.wire.outbox import Outbox
from extproc.wire.rpc import NO_SESSION, Code, HoldingSession
from extproc.wire.streamstates import (
    REMEMBERED,
    TABLE,
    ClosedStreams,
    Evidence,
    FrameScope,
    StreamState,
)


@dataclass(eq=False, slots=True)
class Streams:
    """The streams of one connection.

    Attributes:
        host: The peer's IP address; "" where unknown.
        open: Streams not closed yet, by identifier.
        closed: How the latest closed ones ended.
        last_id: Highest identifier used by the peer.
        partial_since_s: Start times of incomplete messages, by stream.
        deadlines_s: Deadlines of calls with a `grpc-timeout`, by stream.
        finished: Closed streams whose sessions have not heard of it yet: see `settle`.
        num_delivered: Messages by `deliver`.
    """

    outbox: Outbox
    limits: Limits
    counters: Counters
    budget: Budget
    on_session_error: Callable[[Exception, str], None]
    host: str = ""
    open: dict[int, WireStream] = field(default_factory=dict)
    closed: ClosedStreams = field(default_factory=ClosedStreams)
    last_id: int = 0
    partial_since_s: dict[int, float] = field(default_factory=dict)
    deadlines_s: dict[int, float] = field(default_factory=dict)
    finished: list[WireStream] = field(default_factory=list)
    num_delivered: int = 0
    _late_resets: int = 0
    _unacknowledged_bytes: int = 0

    def state(self, stream_id: int) -> StreamState:
        """Return the state of a client-initiated stream (9113 5.1)."""
        if stream_id > self.last_id:
            return StreamState.IDLE
        stream = self.open.get(stream_id)
        if stream is None:
            return self.closed.state(stream_id)
        return StreamState.HALF_CLOSED_REMOTE if stream.is_half_closed else StreamState.OPEN

    def verdict(self, stream_id: int, kind: int) -> Evidence:
        """Return the table's decision on a frame on a stream."""
        return TABLE[self.state(stream_id), kind]

    def obey(self, stream_id: int, kind: int) -> FrameScope:
        """Return whether to handle or discard a frame.

        Raises:
            ConnectionFault, StreamFault: By the table's decision.
        """
        # 9113 5.1.1: even identifiers are the server's, and we never open a stream.
        if not stream_id & 1:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "frame on an idle stream")
        scope, code = self.verdict(stream_id, kind)
        if scope is FrameScope.CONNECTION_ERROR:
            raise ConnectionFault(code, f"frame of type {kind} on stream {stream_id}")
        if scope is FrameScope.STREAM_ERROR:
            raise StreamFault(code, f"frame of type {kind} on stream {stream_id}")
        return scope

    def is_full(self) -> bool:
        """Return whether a limit forbids another stream."""
        limits, counters = self.limits, self.counters
        return (
            len(self.open) >= limits.max_streams_per_connection
            or counters.streams_open >= limits.max_streams
            or self.budget.unsent_bytes >= self.budget.max_bytes
        )

    def may_be_late(self) -> bool:
        """Count a reset of a stream that is no longer remembered.

        Returns:
            Whether each stream may have had one: a burst is answered before its resets come.
        """
        self._late_resets += 1
        return self._late_resets <= (self.last_id + 1) >> 1

    # ---- the windows that we grant (9113 6.9); those of the peer for us are in `outbox`
    #
    # They are replenished half a window at a time: a connection's as bytes arrive, so that waiting
    # streams cannot use it up and starve the others, a stream's as the budget for bodies has room.
    # Before our settings arrive, and if they are smaller, the default counts (9113 6.9.2).

    def count_data(self, size_bytes: int) -> None:
        """Count the DATA of a read.

        Raises:
            ConnectionFault: More than the window (9113 6.9.1).
        """
        self._unacknowledged_bytes += size_bytes
        window_bytes = self.limits.connection_window_bytes
        if self._unacknowledged_bytes < window_bytes >> 1:
            return
        if self._unacknowledged_bytes > max(window_bytes, frames.DEFAULT_WINDOW_BYTES):
            raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "connection window exceeded")
        self.outbox.put(0, frames.window_update(0, self._unacknowledged_bytes))
        self._unacknowledged_bytes = 0

    def count_data_of(self, stream: WireStream, size_bytes: int) -> None:
        """Count one DATA frame of an open stream; reset the stream beyond its window."""
        stream.unacknowledged_bytes += size_bytes
        window_bytes = self.limits.stream_window_bytes
        if stream.unacknowledged_bytes < window_bytes >> 1:
            return
        if stream.unacknowledged_bytes > max(window_bytes, frames.DEFAULT_WINDOW_BYTES):
            # 9113 6.9.1: a stream error of type FLOW_CONTROL_ERROR.
            self.reset(stream.id, ErrorCode.FLOW_CONTROL_ERROR)
        elif self.budget.may_grow(stream):
            stream.grant()

    # ---- calls of sessions

    def deliver(self, stream: WireStream, message: bytes) -> None:
        """Give one message to the session; its exceptions end its own stream only."""
        self.num_delivered += 1
        try:
            stream.session.receive(message)
        except Exception as error:
            self.fail_session(stream, error)

    def end_request(self, stream: WireStream) -> None:
        """Handle the end of the request (9113 5.1 half-closed (remote))."""
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
        """Handle an exception of a session: INTERNAL for its peer, the error for our log."""
        self.counters.session_errors += 1
        self.on_session_error(error, stream.path)
        stream.end(Code.INTERNAL, "internal error")

    def give_up(self, stream: WireStream) -> None:
        """End a stream for want of memory, by its session if it can."""
        self.counters.abuse[Abuse.BUFFERED_BYTES] += 1
        self._end_by_session(stream, "no memory for this message now", is_too_large=False)
        if stream.id in self.open:
            # Its response may wait for a window; its memory is released now.
            self._release(stream)

    def refuse(self, stream: WireStream, num_bytes: int) -> None:
        """End a stream whose next message is too large, by its session if it can."""
        self.counters.abuse[Abuse.MESSAGE_TOO_LARGE] += 1
        details = f"message of {num_bytes} bytes exceeds the limit"
        self._end_by_session(stream, details, is_too_large=True)

    def _end_by_session(self, stream: WireStream, details: str, *, is_too_large: bool) -> None:
        session = stream.session
        if isinstance(session, HoldingSession):
            try:
                session.give_up(is_too_large=is_too_large)
            except Exception as error:
                self.fail_session(stream, error)
        stream.end(Code.RESOURCE_EXHAUSTED, details)

    def settle(self) -> None:
        """Call `closed()` of the sessions of closed streams; they may end further streams."""
        while self.finished:
            finished, self.finished = self.finished, []
            for stream in finished:
                # Breaks the reference cycle, so that neither needs the garbage collector.
                session, stream.session = stream.session, NO_SESSION
                try:
                    session.closed()
                except Exception as error:
                    self.counters.session_errors += 1
                    self.on_session_error(error, stream.path)

    # ---- how streams close

    def on_answered(self, stream: WireStream) -> None:
        """Close a stream after our trailers, and the reset if the request had not ended."""
        self.counters.streams_answered += 1
        self._close(stream, stream.is_half_closed)

    def on_reset_by_peer(self, stream: WireStream) -> None:
        """9113 6.4: nothing more is sent for the stream, not even the output of this pass."""
        self.counters.streams_reset_by_peer += 1
        self.outbox.drop_frames(stream.id)
        self.outbox.forget_queue(stream)
        self._close(stream, True)

    def reset(self, stream_id: int, code: ErrorCode) -> None:
        """9113 5.4.2: end a stream with RST_STREAM, and drop its queue."""
        self.outbox.put(stream_id, frames.rst_stream(stream_id, code))
        stream = self.open.get(stream_id)
        if stream is None:
            self.closed.remember(stream_id, is_by_peer=False)
            return
        self.outbox.forget_queue(stream)
        self.counters.streams_reset_by_us += 1
        self._close(stream, False)

    def expire(self, now: float) -> None:
        """End the calls past their deadline, and those with stalled messages."""
        for stream_id, deadline_s in list(self.deadlines_s.items()):
            if now >= deadline_s:
                # gRPC "Client Cancellation": a server whose deadline expires "should locally
                # cancel the RPC and send RST_STREAM with CANCEL error code".
                self.reset(stream_id, ErrorCode.CANCEL)
        for stream_id, since_s in list(self.partial_since_s.items()):
            if now - since_s > self.limits.message_timeout_s:
                self.counters.abuse[Abuse.STALLED_MESSAGE] += 1
                self.open[stream_id].end(Code.DEADLINE_EXCEEDED, "message announced, not sent")

    def shed(self, target_bytes: int) -> None:
        """Reset the streams with the longest queues until so many bytes wait at most."""
        waiting = [
            (each.queue.num_bytes, each.id) for each in self.open.values() if each.queue is not None
        ]
        for _, stream_id in sorted(waiting, reverse=True):
            if self.outbox.queued_bytes <= target_bytes:
                return
            self.counters.abuse[Abuse.SLOW_READER] += 1
            self.reset(stream_id, ErrorCode.ENHANCE_YOUR_CALM)

    def lose_all(self) -> None:
        """Close every open stream with the connection."""
        for stream in list(self.open.values()):
            self.outbox.forget_queue(stream)
            self.counters.streams_lost += 1
            self._close(stream, True)

    def _close(self, stream: WireStream, is_by_peer: bool) -> None:
        stream_id = stream.id
        del self.open[stream_id]
        # As `ClosedStreams.remember`, which is one call more for each stream.
        self.closed.slots[(stream_id >> 1) % REMEMBERED] = stream_id << 1 | is_by_peer
        stream.is_ended, stream.is_plain = True, False
        self.counters.streams_open -= 1
        if self.deadlines_s:
            self.deadlines_s.pop(stream_id, None)
        if stream.held_bytes:
            self._release(stream)
        self.finished.append(stream)

    def _release(self, stream: WireStream) -> None:
        """Release the memory of a stream."""
        if stream.partial is not None:
            self.forget_partial(stream)
        stream.kept_bytes = 0
        self.budget.leave(stream)

    def forget_partial(self, stream: WireStream) -> None:
        """Forget the incomplete message of a stream that has one; the caller updates the budget."""
        del self.partial_since_s[stream.id]
        stream.partial = None
