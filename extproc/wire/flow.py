"""The windows that we grant (9113 6.9); those of the peer for us are in `outbox`.

A connection's is replenished as bytes arrive, so that waiting streams cannot use it up and starve
the others. A stream's is replenished as the budget for bodies has room.
"""

from __future__ import annotations

from extproc.wire import frames
from extproc.wire.errors import ConnectionFault, ErrorCode
from extproc.wire.limits import Limits
from extproc.wire.stream import WireStream
from extproc.wire.streams import Streams


class GivenWindows:
    """Counts the DATA of one connection and replenishes its windows, half a window at a time."""

    __slots__ = ("_connection_bytes", "_stream_bytes", "_streams", "_unacknowledged_bytes")

    def __init__(self, limits: Limits, streams: Streams) -> None:
        self._streams = streams
        # Before our settings arrive, and if they are smaller, the default counts (9113 6.9.2).
        self._connection_bytes = max(limits.connection_window_bytes, frames.DEFAULT_WINDOW_BYTES)
        self._stream_bytes = limits.stream_window_bytes
        self._unacknowledged_bytes = 0

    def count(self, size_bytes: int) -> None:
        """Count the DATA of a read.

        Raises:
            ConnectionFault: More than the window (9113 6.9.1).
        """
        self._unacknowledged_bytes += size_bytes
        if self._unacknowledged_bytes < self._connection_bytes >> 1:
            return
        if self._unacknowledged_bytes > self._connection_bytes:
            raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "connection window exceeded")
        update = frames.window_update(0, self._unacknowledged_bytes)
        self._streams.outbox.put(0, update)
        self._unacknowledged_bytes = 0

    def count_for(self, stream: WireStream, size_bytes: int) -> None:
        """Count one DATA frame of an open stream; reset the stream beyond its window."""
        stream.unacknowledged_bytes += size_bytes
        if stream.unacknowledged_bytes < self._stream_bytes >> 1:
            return
        if stream.unacknowledged_bytes > max(self._stream_bytes, frames.DEFAULT_WINDOW_BYTES):
            # 9113 6.9.1: a stream error of type FLOW_CONTROL_ERROR.
            self._streams.reset(stream.id, ErrorCode.FLOW_CONTROL_ERROR)
            return
        if self._streams.budget.may_grow(stream):
            stream.grant()
