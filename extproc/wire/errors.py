"""Errors of a connection or a stream, with the HTTP/2 code for the peer.

Both exceptions stay inside this package: `Connection.receive` turns them into GOAWAY or RST_STREAM.
"""

from __future__ import annotations

from enum import IntEnum

from extproc.errors import ExtprocError
from extproc.wire.limits import Abuse


class ErrorCode(IntEnum):
    """Error codes of RST_STREAM and GOAWAY (9113 7)."""

    NO_ERROR = 0x0
    PROTOCOL_ERROR = 0x1
    INTERNAL_ERROR = 0x2
    FLOW_CONTROL_ERROR = 0x3
    SETTINGS_TIMEOUT = 0x4
    STREAM_CLOSED = 0x5
    FRAME_SIZE_ERROR = 0x6
    REFUSED_STREAM = 0x7
    CANCEL = 0x8
    COMPRESSION_ERROR = 0x9
    CONNECT_ERROR = 0xA
    ENHANCE_YOUR_CALM = 0xB
    INADEQUATE_SECURITY = 0xC
    HTTP_1_1_REQUIRED = 0xD


class ConnectionFault(ExtprocError):
    """A connection error (9113 5.4.1): GOAWAY with `code`, then close.

    `abuse` is the limit that was exceeded, if one was.
    """

    def __init__(self, code: ErrorCode, reason: str, abuse: Abuse | None = None) -> None:
        super().__init__(reason)
        self.code = code
        self.abuse = abuse


class StreamFault(ExtprocError):
    """A stream error (9113 5.4.2): RST_STREAM with `code`; other streams are not affected."""

    def __init__(self, code: ErrorCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code
