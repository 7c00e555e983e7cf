"""Which frame is allowed in which state of a stream (9113 5.1), as a table.

1. All decisions are here; `Connection` follows them and adds none.
2. A server that never pushes needs five states. `half-closed (local)` is not among them: when our
   response ends before the request, RST_STREAM(NO_ERROR) follows it (9113 8.1), so the stream is
   closed at once.
3. A closed stream is remembered by how it closed. After our reset, frames that the peer sent before
   it knew are discarded silently. After the peer's own end, further frames are errors.
"""

from __future__ import annotations

from array import array
from enum import Enum, auto
from typing import Final

from extproc.wire import frames
from extproc.wire.limits import ErrorCode


class StreamState(Enum):
    """State of a client-initiated stream, as the server sees it."""

    IDLE = auto()
    OPEN = auto()
    HALF_CLOSED_REMOTE = auto()
    CLOSED_BY_US = auto()
    CLOSED_BY_PEER = auto()
    # Closed long ago, or skipped by a higher identifier (9113 5.1.1): no longer known which.
    FORGOTTEN = auto()


class FrameScope(Enum):
    """The effect of a frame on stream and connection."""

    ACCEPT = auto()
    DISCARD = auto()
    STREAM_ERROR = auto()
    CONNECTION_ERROR = auto()


Evidence = tuple[FrameScope, ErrorCode]

_ACCEPT: Final = (FrameScope.ACCEPT, ErrorCode.NO_ERROR)
_DISCARD: Final = (FrameScope.DISCARD, ErrorCode.NO_ERROR)
_PROTOCOL_ERROR: Final = (FrameScope.CONNECTION_ERROR, ErrorCode.PROTOCOL_ERROR)
_CLOSED_STREAM: Final = (FrameScope.STREAM_ERROR, ErrorCode.STREAM_CLOSED)
_CLOSED_CONNECTION: Final = (FrameScope.CONNECTION_ERROR, ErrorCode.STREAM_CLOSED)

# PRIORITY is legal in every state (9113 5.1).
TABLE: Final[dict[tuple[StreamState, int], Evidence]] = {
    # 9113 5.1 idle: "Receiving any frame other than HEADERS or PRIORITY on a stream in this state
    # MUST be treated as a connection error of type PROTOCOL_ERROR."
    (StreamState.IDLE, frames.HEADERS): _ACCEPT,
    (StreamState.IDLE, frames.DATA): _PROTOCOL_ERROR,
    (StreamState.IDLE, frames.RST_STREAM): _PROTOCOL_ERROR,
    (StreamState.IDLE, frames.WINDOW_UPDATE): _PROTOCOL_ERROR,
    # 9113 5.1 open: any frame; HEADERS are trailers then (9113 8.1).
    (StreamState.OPEN, frames.HEADERS): _ACCEPT,
    (StreamState.OPEN, frames.DATA): _ACCEPT,
    (StreamState.OPEN, frames.RST_STREAM): _ACCEPT,
    (StreamState.OPEN, frames.WINDOW_UPDATE): _ACCEPT,
    # 9113 5.1 half-closed (remote): "If an endpoint receives additional frames, other than
    # WINDOW_UPDATE, PRIORITY, or RST_STREAM [...] it MUST respond with a stream error of type
    # STREAM_CLOSED."
    (StreamState.HALF_CLOSED_REMOTE, frames.HEADERS): _CLOSED_STREAM,
    (StreamState.HALF_CLOSED_REMOTE, frames.DATA): _CLOSED_STREAM,
    (StreamState.HALF_CLOSED_REMOTE, frames.RST_STREAM): _ACCEPT,
    (StreamState.HALF_CLOSED_REMOTE, frames.WINDOW_UPDATE): _ACCEPT,
    # 9113 5.1 closed: after our RST_STREAM the peer may have sent anything before it knew;
    # "An endpoint MUST minimally process and then discard any frames it receives in this state."
    (StreamState.CLOSED_BY_US, frames.HEADERS): _DISCARD,
    (StreamState.CLOSED_BY_US, frames.DATA): _DISCARD,
    (StreamState.CLOSED_BY_US, frames.RST_STREAM): _DISCARD,
    (StreamState.CLOSED_BY_US, frames.WINDOW_UPDATE): _DISCARD,
    # 9113 5.1 closed: "An endpoint MAY treat receipt of any other type of frame on a closed stream
    # as a connection error of type STREAM_CLOSED", but WINDOW_UPDATE and RST_STREAM may be late.
    (StreamState.CLOSED_BY_PEER, frames.HEADERS): _CLOSED_CONNECTION,
    (StreamState.CLOSED_BY_PEER, frames.DATA): _CLOSED_STREAM,
    (StreamState.CLOSED_BY_PEER, frames.RST_STREAM): _DISCARD,
    (StreamState.CLOSED_BY_PEER, frames.WINDOW_UPDATE): _DISCARD,
    # 9113 5.1.1: "An endpoint that receives an unexpected stream identifier MUST respond with a
    # connection error of type PROTOCOL_ERROR." Late DATA of a stream that we reset looks the same
    # as DATA on a skipped identifier; it costs the stream only.
    (StreamState.FORGOTTEN, frames.HEADERS): _PROTOCOL_ERROR,
    (StreamState.FORGOTTEN, frames.DATA): _CLOSED_STREAM,
    (StreamState.FORGOTTEN, frames.RST_STREAM): _DISCARD,
    (StreamState.FORGOTTEN, frames.WINDOW_UPDATE): _DISCARD,
}

# Closed streams remembered; 8 KB a connection.
REMEMBERED: Final = 1024


class ClosedStreams:
    """How the latest streams closed, in a ring of fixed size.

    A slot holds the identifier times two, plus one if the peer ended or reset the stream.
    `Connection` writes the ring in place on its common path.
    """

    __slots__ = ("slots",)

    def __init__(self) -> None:
        self.slots = array("Q", bytes(8 * REMEMBERED))

    def remember(self, stream_id: int, *, is_by_peer: bool) -> None:
        """Record how a stream closed."""
        self.slots[(stream_id >> 1) % REMEMBERED] = stream_id << 1 | is_by_peer

    def state(self, stream_id: int) -> StreamState:
        """Return the state of a closed stream."""
        slot = self.slots[(stream_id >> 1) % REMEMBERED]
        if slot >> 1 != stream_id:
            return StreamState.FORGOTTEN
        return StreamState.CLOSED_BY_PEER if slot & 1 else StreamState.CLOSED_BY_US

    def age(self, stream_id: int) -> bool:
        """Record a late RST_STREAM; return False if there was no reason for one.

        The peer's reset may cross our end, and may follow its own END_STREAM; any more are abuse.
        """
        state = self.state(stream_id)
        if state is StreamState.FORGOTTEN:
            return False
        is_by_us = state is StreamState.CLOSED_BY_US
        self.slots[(stream_id >> 1) % REMEMBERED] = stream_id << 1 | 1 if is_by_us else 0
        return True
