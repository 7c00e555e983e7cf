"""Limits on the resources of a peer, the counters, and the errors of a connection or a stream.

Both exceptions stay inside this package: `Connection.receive_pass` turns them into GOAWAY or
RST_STREAM.

Every limit has a default that a real Envoy never reaches, and a name in `Abuse` under which its
violations are counted. The memory of one connection is at most
`max_queued_bytes + max_write_buffer_bytes + max_streams_per_connection * about 1 KB`, plus its
share of the one budget for bodies (`extproc.wire.budget`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum, StrEnum

from extproc.errors import ExtprocError
from extproc.wire.budget import GRANT_BYTES
from extproc.wire.mismatches import Mismatches


class ErrorCode(IntEnum):
    """Error codes of RST_STREAM and GOAWAY in use (9113 7)."""

    NO_ERROR = 0x0
    PROTOCOL_ERROR = 0x1
    FLOW_CONTROL_ERROR = 0x3
    SETTINGS_TIMEOUT = 0x4
    STREAM_CLOSED = 0x5
    FRAME_SIZE_ERROR = 0x6
    REFUSED_STREAM = 0x7
    CANCEL = 0x8
    COMPRESSION_ERROR = 0x9
    ENHANCE_YOUR_CALM = 0xB


class Fault(ExtprocError):
    """An error of the peer; `abuse` is the limit that was exceeded, if one was."""

    def __init__(self, code: ErrorCode, reason: str, abuse: Abuse | None = None) -> None:
        super().__init__(reason)
        self.code = code
        self.abuse = abuse


class ConnectionFault(Fault):
    """A connection error (9113 5.4.1): GOAWAY with `code`, then close."""


class StreamFault(Fault):
    """A stream error (9113 5.4.2): RST_STREAM with `code`; other streams are not affected."""


class Abuse(StrEnum):
    """The limits by name; each is a label of one counter."""

    TOO_MANY_CONNECTIONS = "too_many_connections"
    TOO_MANY_STREAMS = "too_many_streams"
    BUFFERED_BYTES = "buffered_bytes"
    MESSAGE_TOO_LARGE = "message_too_large"
    STALLED_MESSAGE = "stalled_message"
    HEADER_BLOCK = "header_block"
    HEADER_LIST = "header_list"
    CONTINUATION_FLOOD = "continuation_flood"
    FRAME_FLOOD = "frame_flood"
    SLOW_READER = "slow_reader"
    HANDSHAKE_TIMEOUT = "handshake_timeout"
    HALF_OPEN = "half_open"
    IDLE = "idle"


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one server. "Per window" is for one connection in `flood_window_s`.

    Attributes:
        max_connections: Open connections; further ones are closed at once.
        max_streams_per_connection: Announced as SETTINGS_MAX_CONCURRENT_STREAMS; further ones are
            refused with REFUSED_STREAM, which Envoy may retry. Envoy itself opens another
            connection after 1,024.
        max_streams: Open streams of all connections; further ones are refused likewise.
        max_message_bytes: One gRPC message; a longer one ends its stream, by its session or with
            RESOURCE_EXHAUSTED. Prompts with images exceed gRPC's usual default of 4 MiB.
        max_queued_bytes: Responses of one connection that wait for the peer's windows or socket;
            above it, the streams with the longest queues are reset.
        max_write_buffer_bytes: Written, but not yet accepted by the kernel; above it the connection
            is closed. A peer gets there only with control frames, as DATA waits in its stream.
        max_header_block_bytes: Compressed header block, over all its CONTINUATION frames. A longer
            one, or list, is refused with RESOURCE_EXHAUSTED; before the peer has acknowledged our
            SETTINGS it ends the connection, as later blocks may depend on it.
        max_header_list_bytes: Uncompressed header list (9113 6.5.2); bounds an HPACK bomb.
        max_continuation_frames: CONTINUATION frames of one header block (CVE-2024-27316).
        max_control_frames: The cost of frames without a request per window, at their costs in
            `wire.control`. These are SETTINGS, PING, DATA without content or end, and WINDOW_UPDATE
            beyond ten for each DATA frame that we sent. They are also PRIORITY, unknown types and
            frames for closed streams, but for DATA that may cross our end and one reset for each
            stream. Streams that the peer made us reset count too (CVE-2025-8671). Its own resets
            (CVE-2023-44487) have no limit: they free all, and cost less than an answer.
        flood_window_s: Duration of the window for that budget.
        stream_window_bytes: Announced SETTINGS_INITIAL_WINDOW_SIZE: the data that a stream may send
            without room in the budget. Nearly every prompt fits, and thousands of streams are safe.
        connection_window_bytes: Receive window of a connection; replenished as bytes arrive.
        handshake_timeout_s: From the connection to the preface and the acknowledged SETTINGS.
        keepalive_s: Silence after which we send PING.
        keepalive_timeout_s: Silence after that PING until the connection is considered lost.
        idle_timeout_s: Time without streams after which a connection is drained.
        message_timeout_s: From the first byte of a message to its last.
        stall_timeout_s: Time for which queued responses make no progress: those streams are reset,
            or the connection is closed if it has no window, or its socket no room.
    """

    max_connections: int = 4096
    max_streams_per_connection: int = 16_384
    max_streams: int = 65_536
    max_message_bytes: int = 64 * 1024 * 1024
    max_queued_bytes: int = 64 * 1024 * 1024
    max_write_buffer_bytes: int = 64 * 1024 * 1024
    max_header_block_bytes: int = 16 * 1024
    max_header_list_bytes: int = 16 * 1024
    max_continuation_frames: int = 16
    max_control_frames: int = 20_000
    flood_window_s: float = 10.0
    stream_window_bytes: int = GRANT_BYTES
    connection_window_bytes: int = 16 * 1024 * 1024
    handshake_timeout_s: float = 10.0
    keepalive_s: float = 5.0
    keepalive_timeout_s: float = 5.0
    idle_timeout_s: float = 1800.0
    message_timeout_s: float = 60.0
    stall_timeout_s: float = 60.0


DEFAULT_LIMITS = Limits()


@dataclass(slots=True)
class Counters:
    """Counts over all connections of one server, for metrics.

    In the end every open stream is answered, reset by one side, or lost with its connection:
    `streams_opened == streams_answered + streams_reset_by_peer + streams_reset_by_us
    + streams_lost + streams_open`.

    Attributes:
        connection_faults: Connections that we ended with an error in GOAWAY.
        streams_opened: Streams given to a session, or answered without one.
        streams_answered: Ended by our trailers.
        streams_reset_by_peer: Reset by the peer before our trailers.
        streams_reset_by_us: Stream errors, deadlines and malformed requests.
        streams_lost: Open at the end of their connection.
        streams_refused: Refused by a limit, with REFUSED_STREAM; not in `streams_opened`.
        session_errors: Exceptions of sessions.
        header_blocks_cached: Header blocks found in the cache.
        abuse: Violations of each limit.
        mismatches: Peers that speak TLS where there is none, or the reverse.
    """

    connections_open: int = 0
    connection_faults: int = 0
    streams_opened: int = 0
    streams_open: int = 0
    streams_answered: int = 0
    streams_reset_by_peer: int = 0
    streams_reset_by_us: int = 0
    streams_lost: int = 0
    streams_refused: int = 0
    session_errors: int = 0
    header_blocks_cached: int = 0
    abuse: dict[Abuse, int] = field(default_factory=lambda: dict.fromkeys(Abuse, 0))
    mismatches: Mismatches = field(default_factory=Mismatches, compare=False)
