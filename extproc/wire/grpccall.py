"""One gRPC call on one HTTP/2 stream: the output, and its end.

`Connection` handles the input. The response headers go out with the first message, never earlier:
until then Envoy may still retry. The end comes after everything queued; if the peer has not
finished its request by then, RST_STREAM(NO_ERROR) follows (9113 8.1, gRPC "Early Server Closure"),
and the stream is closed at once.
"""

from __future__ import annotations

from typing import Final, Protocol

from extproc.wire import frames, grpc
from extproc.wire.budget import Budget
from extproc.wire.limits import ErrorCode
from extproc.wire.methods import Request
from extproc.wire.outbox import Outbox, Unsent
from extproc.wire.rpc import NO_SESSION, Code, Session

_NO_ERROR: Final = int(ErrorCode.NO_ERROR)
# 7541 6.3: "Dynamic Table Size Update" to 0. Our encoder never indexes; it says so once.
_TABLE_UPDATE: Final = b"\x20"


class StreamBook(Protocol):
    """The interface of `Streams` for one stream: the outbox for its frames, the budget for its
    bodies.
    """

    outbox: Outbox
    budget: Budget
    host: str

    def give_up(self, stream: WireStream) -> None:
        """End the stream for want of memory, by its session if it can."""

    def on_answered(self, stream: WireStream) -> None:
        """Handle the end of the stream's response."""


class WireStream:
    """The `Call` of one RPC.

    Attributes:
        host: The peer's IP address; "" where unknown.
        session: The service's side; does nothing until the method has opened it.
        window_bytes: The peer's window for our DATA (9113 6.9.1).
        unacknowledged_bytes: DATA received since the last WINDOW_UPDATE.
        is_plain: Open both ways, with nothing to check beyond the message framing.
        is_half_closed: The peer has ended its side.
        is_ended: We have ended, or the stream is closed; further calls of the service are ignored.
        has_answered: Response headers are sent.
        partial: An incomplete message.
        content_left: The rest of an announced content-length.
        queue: DATA that waits for a window.
        kept_bytes: Bytes of its messages that the session keeps.
        held_bytes: That and `partial`; set by the budget, as is `waited_s`.
    """

    waited_s: float

    __slots__ = (
        *("_book", "_end_block", "content_left", "encoding", "has_answered", "held_bytes", "id"),
        *("host", "is_ended", "is_half_closed", "is_plain", "kept_bytes", "method", "partial"),
        *("queue", "session", "unacknowledged_bytes", "waited_s", "window_bytes"),
    )

    def __init__(self, book: StreamBook, stream_id: int, request: Request) -> None:
        self._book, self.host = book, book.host
        self.id = stream_id
        # Not the request itself, whose metadata the peer may have made large.
        self.method = request.method
        self.encoding = request.encoding
        self.session: Session = NO_SESSION
        self.window_bytes = book.outbox.initial_window_bytes
        self.unacknowledged_bytes = 0
        self.is_plain = request.content_length is None
        self.is_half_closed = False
        self.is_ended = False
        self.has_answered = False
        self.partial: grpc.Partial | None = None
        self.queue: Unsent | None = None
        self.content_left = request.content_length
        self.held_bytes = 0
        self.kept_bytes = 0
        self._end_block = grpc.OK_TRAILERS

    @property
    def path(self) -> str:
        """The method's path, for the log."""
        return self.method.path if self.method is not None else ""

    def send(self, message: bytes) -> None:
        """Queue one message. Ignored after `end` and after the peer has disconnected."""
        if self.is_ended:
            return
        outbox = self._book.outbox
        size = len(message)
        framed = size + grpc.PREFIX_BYTES
        if (
            framed > self.window_bytes
            or framed > outbox.window_bytes
            or framed > outbox.max_frame_bytes
            or self.queue is not None
        ):
            self._begin_response()
            outbox.enqueue(self, b"\x00" + frames.U32.pack(size), message)
            return
        self.window_bytes -= framed
        outbox.window_bytes -= framed
        outbox.data_frames += 1
        stream_id = self.id
        word = framed << 8
        if not self.has_answered and outbox.table_update_stream:
            self.has_answered = True
            head = grpc.FIRST_HEAD.pack(
                grpc.RESPONSE_WORD, frames.END_HEADERS, stream_id, grpc.RESPONSE_BLOCK,
                word, 0, stream_id, 0, size,
            )  # fmt: skip
        else:
            self._begin_response()
            head = grpc.MESSAGE_HEAD.pack(word, 0, stream_id, 0, size)
        outbox.put(stream_id, head + message)

    def finish(self, message: bytes) -> None:
        """Queue the last message, and end the RPC with OK after it."""
        outbox, size = self._book.outbox, len(message)
        framed = size + grpc.PREFIX_BYTES
        if (
            not self.has_answered
            or self.is_half_closed
            or self.is_ended
            or framed > self.window_bytes
            or framed > outbox.window_bytes
            or framed > outbox.max_frame_bytes
            or self.queue is not None
        ):
            self.send(message)
            self.end()
            return
        outbox.window_bytes -= framed
        outbox.data_frames += 1
        stream_id = self.id
        head = grpc.MESSAGE_HEAD.pack(framed << 8, 0, stream_id, 0, size)
        outbox.put(stream_id, head + message + _end_and_reset(stream_id))
        self._book.on_answered(self)

    def end(self, code: Code = Code.OK, details: str = "") -> None:
        """End the RPC, after all queued messages. Later calls are ignored."""
        self.end_with(grpc.trailer_block(code, details) if code or details else grpc.OK_TRAILERS)

    def end_with(self, trailers: bytes) -> None:
        """End the RPC with an encoded trailer block."""
        if self.is_ended:
            return
        self.is_ended = True
        self.is_plain = False
        self._end_block = trailers
        if self.queue is None:
            self._finish()

    def hold(self, num_bytes: int, *, is_whole: bool = False) -> None:
        """Set how many bytes of this call's messages the service keeps; 0 after the end."""
        now_bytes = 0 if self.is_ended else num_bytes
        change_bytes, self.kept_bytes = now_bytes - self.kept_bytes, now_bytes
        if change_bytes:
            self._book.budget.add(self, change_bytes)
        if is_whole:
            self._book.budget.set_whole(self)

    def grant(self) -> None:
        """Replenish the peer's window (9113 6.9.1)."""
        if not self.is_ended:
            update = frames.window_update(self.id, self.unacknowledged_bytes)
            self._book.outbox.put(self.id, update)
            self.unacknowledged_bytes = 0

    def give_up(self) -> None:
        """End the call for want of memory, by its session if it can."""
        self._book.give_up(self)

    def on_queue_sent(self) -> None:
        """Send the end, if there is one, after the last queued DATA."""
        if self.is_ended:
            self._finish()

    def _begin_response(self) -> None:
        if not self.has_answered:
            self.has_answered = True
            self._put_block(frames.END_HEADERS, grpc.RESPONSE_BLOCK)

    def _put_block(self, flags: int, block: bytes) -> None:
        outbox = self._book.outbox
        if not outbox.table_update_stream:
            # 9113 4.3.1: after a reduced table size an encoder begins its next block with a size
            # update. Size 0 before the first block covers every later reduction.
            outbox.table_update_stream = self.id
            block = _TABLE_UPDATE + block
        outbox.put(self.id, frames.frame(frames.HEADERS, flags, self.id, block))

    def _finish(self) -> None:
        stream_id, block = self.id, self._end_block
        if block is grpc.OK_TRAILERS and self.has_answered:
            if self.is_half_closed:
                end = grpc.OK_END.pack(grpc.OK_WORD, grpc.END_FLAGS, stream_id, block)
            else:
                end = _end_and_reset(stream_id)
            self._book.outbox.put(stream_id, end)
        else:
            self.put_end(block if self.has_answered else grpc.RESPONSE_BLOCK + block)
        self._book.on_answered(self)

    def put_end(self, block: bytes) -> None:
        """Write the last header block, and RST_STREAM(NO_ERROR) if the request has not ended."""
        self._put_block(grpc.END_FLAGS, block)
        if not self.is_half_closed:
            self._book.outbox.put(self.id, frames.rst_stream(self.id, _NO_ERROR))


def _end_and_reset(stream_id: int) -> bytes:
    return grpc.OK_END_AND_RESET.pack(
        grpc.OK_WORD, grpc.END_FLAGS, stream_id, grpc.OK_TRAILERS,
        grpc.RESET_WORD, 0, stream_id, _NO_ERROR,
    )  # fmt: skip
