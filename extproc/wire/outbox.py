"""The output of a connection: frames by stream, and DATA that waits for a window.

1. The frames of a pass are kept by stream until they are taken. So a stream that the peer resets in
   the same read loses its unwritten frames (9113 6.4: after RST_STREAM "the receiver MUST NOT send
   additional frames for that stream").
2. DATA that does not fit the windows waits in its stream; streams take turns, a frame each.
3. Nothing here stops reading: the WINDOW_UPDATE that we wait for arrives on the same socket.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from typing import Final, Protocol

from extproc.wire import frames
from extproc.wire.budget import Budget
from extproc.wire.limits import ConnectionFault, ErrorCode

_CHUNKS: Final = dict[int, list[bytes]].values
SHARED_BYTES: Final = 16 * 1024
"""Of a message from which on it is not copied to wait for a window."""


class Unsent:
    """DATA of one stream that waits for a window.

    A message of `SHARED_BYTES` is kept as it is, without a copy: many streams may wait with the
    same one, which then costs its bytes once. Shorter ones are joined, as each object costs more
    than they do.
    """

    __slots__ = ("_parts", "num_bytes")

    def __init__(self) -> None:
        self._parts: deque[bytearray | memoryview] = deque()
        self.num_bytes = 0

    def add(self, part: bytes) -> None:
        """Add bytes at the end."""
        self.num_bytes += len(part)
        if len(part) >= SHARED_BYTES:
            self._parts.append(memoryview(part))
            return
        last = self._parts[-1] if self._parts else None
        if isinstance(last, bytearray):
            last += part
        else:
            self._parts.append(bytearray(part))

    def take(self, size_bytes: int) -> bytes:
        """Remove that many bytes from the front, of which there are so many."""
        self.num_bytes -= size_bytes
        taken = []
        while size_bytes:
            part = self._parts[0]
            piece = bytes(memoryview(part)[:size_bytes])
            taken.append(piece)
            size_bytes -= len(piece)
            if len(piece) == len(part):
                self._parts.popleft()
            elif isinstance(part, bytearray):
                del part[: len(piece)]
            else:
                self._parts[0] = part[len(piece) :]
        return b"".join(taken)


class StreamSender(Protocol):
    """A stream that has DATA to send.

    Attributes:
        window_bytes: The peer's window for it (9113 6.9.1).
        queue: DATA that waits for a window; None where none does.
    """

    window_bytes: int
    queue: Unsent | None

    @property
    def id(self) -> int:
        """HTTP/2 stream identifier."""

    def on_queue_sent(self) -> None:
        """Handle the end of the queue."""


@dataclass(eq=False, slots=True)
class Outbox:
    """Outgoing side of one connection: frames, windows, queues and turns.

    Attributes:
        window_bytes: The peer's connection window (9113 6.9.1); 0 while the socket is full.
        initial_window_bytes: The peer's SETTINGS_INITIAL_WINDOW_SIZE.
        max_frame_bytes: The peer's SETTINGS_MAX_FRAME_SIZE.
        data_frames: DATA frames sent.
        queued_bytes: DATA that waits.
        is_in_pass: Output joins the write of the pass; else `on_output_ready` is called.
    """

    on_output_ready: Callable[[], None]
    budget: Budget
    window_bytes: int = frames.DEFAULT_WINDOW_BYTES
    initial_window_bytes: int = frames.DEFAULT_WINDOW_BYTES
    max_frame_bytes: int = frames.DEFAULT_MAX_FRAME_BYTES
    data_frames: int = 0
    queued_bytes: int = 0
    is_in_pass: bool = False
    # The stream whose header block announced that we use no dynamic table; 0 before.
    table_update_stream: int = 0
    _is_awake: bool = False
    _frames: dict[int, list[bytes]] = field(default_factory=dict)
    _sealed: list[dict[int, list[bytes]]] = field(default_factory=list)
    _ready_streams: deque[StreamSender] = field(default_factory=deque)
    _held_window_bytes: int | None = None

    def put(self, stream_id: int, chunk: bytes) -> None:
        """Add whole frames of one stream, or of the connection."""
        held = self._frames.get(stream_id)
        if held is None:
            self._frames[stream_id] = [chunk]
        else:
            held.append(chunk)
        if not (self.is_in_pass or self._is_awake):
            self._is_awake = True
            self.on_output_ready()

    def seal(self) -> None:
        """Fix the order: later frames are written after all present ones."""
        if self._frames:
            self._sealed.append(self._frames)
            self._frames = {}

    def take(self) -> bytes:
        """Return and forget all bytes to write now."""
        self._is_awake = False
        if not self._frames and not self._sealed:
            return b""
        parts = [*self._sealed, self._frames]
        self._sealed, self._frames = [], {}
        return b"".join(chain.from_iterable(chain.from_iterable(map(_CHUNKS, parts))))

    def drop_frames(self, stream_id: int) -> None:
        """Forget the unwritten frames of a stream."""
        if stream_id in self._frames:
            self._refund(stream_id, self._frames.pop(stream_id))
        for part in self._sealed:
            if stream_id in part:
                self._refund(stream_id, part.pop(stream_id))

    def forget_queue(self, stream: StreamSender) -> None:
        """Forget the DATA of a stream that waits for a window."""
        if stream.queue is not None:
            self._unqueue(stream.queue.num_bytes)
            stream.queue = None

    def _refund(self, stream_id: int, chunks: list[bytes]) -> None:
        """Undo the effects of dropped frames on the connection's state."""
        position, dropped = 0, b"".join(chunks)
        while position < len(dropped):
            word, _, _ = frames.FRAME_HEADER.unpack_from(dropped, position)
            if word & 0xFF == frames.DATA:
                self.data_frames -= 1
                self._widen(word >> 8)
            position += frames.FRAME_HEADER_BYTES + (word >> 8)
        if self.table_update_stream == stream_id:
            self.table_update_stream = 0

    def _unqueue(self, size_bytes: int) -> None:
        self.queued_bytes -= size_bytes
        self.budget.add_unsent(-size_bytes)

    def enqueue(self, stream: StreamSender, prefix: bytes, message: bytes) -> None:
        """Queue DATA that does not fit a window or a frame, and send the part that does."""
        if stream.queue is None:
            stream.queue = Unsent()
            if stream.window_bytes > 0:
                self._ready_streams.append(stream)
        stream.queue.add(prefix)
        stream.queue.add(message)
        size = len(prefix) + len(message)
        self.queued_bytes += size
        self.budget.add_unsent(size)
        self.pump()

    def add_window(self, increment_bytes: int) -> None:
        """Widen the connection window (9113 6.9.1).

        Raises:
            ConnectionFault: "A sender MUST NOT allow a flow-control window to exceed 2^31-1."
        """
        self._widen(increment_bytes)
        held = self._held_window_bytes
        if max(self.window_bytes, held or 0) > frames.LARGEST_WINDOW_BYTES:
            raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "connection window above 2^31-1")
        self.pump()

    def _widen(self, increment_bytes: int) -> None:
        if self._held_window_bytes is None:
            self.window_bytes += increment_bytes
        else:
            self._held_window_bytes += increment_bytes

    def pause(self) -> None:
        """Stop DATA while the socket is full; control frames are sent, and reading goes on."""
        if self._held_window_bytes is None:
            self._held_window_bytes, self.window_bytes = self.window_bytes, 0

    def resume(self) -> None:
        """Continue when the socket has room again."""
        if self._held_window_bytes is not None:
            self.window_bytes, self._held_window_bytes = self._held_window_bytes, None
            self.pump()

    def add_stream_window(self, stream: StreamSender, change_bytes: int) -> bool:
        """Change a stream's window, down too (9113 6.9.2); return False above 2^31-1."""
        was_blocked = stream.window_bytes <= 0
        stream.window_bytes += change_bytes
        if was_blocked and stream.window_bytes > 0 and stream.queue is not None:
            self._ready_streams.append(stream)
        return stream.window_bytes <= frames.LARGEST_WINDOW_BYTES

    def pump(self) -> None:
        """Send queued DATA, a frame of each stream in turn, as far as the windows go.

        A stream has turns while it has both queue and window; `add_stream_window` returns them.
        """
        ready = self._ready_streams
        while ready and self.window_bytes > 0:
            stream = ready.popleft()
            if stream.queue is None or stream.window_bytes <= 0:
                continue
            self._send_frame(stream, stream.queue)
            if not stream.queue.num_bytes:
                stream.queue = None
                stream.on_queue_sent()
            elif stream.window_bytes > 0:
                ready.append(stream)

    def _send_frame(self, stream: StreamSender, queue: Unsent) -> None:
        size = min(queue.num_bytes, self.window_bytes, stream.window_bytes, self.max_frame_bytes)
        payload = queue.take(size)
        self.window_bytes -= size
        stream.window_bytes -= size
        self.data_frames += 1
        self._unqueue(size)
        head = frames.FRAME_HEADER.pack(size << 8 | frames.DATA, 0, stream.id)
        self.put(stream.id, head + payload)
