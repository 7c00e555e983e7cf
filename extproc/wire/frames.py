"""The frames of HTTP/2 as bytes (9113 4.1 and 6): numbers, and builders of those that we send.

`Connection` parses frame headers in place, without an object per frame.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

# 9113 3.4: the first bytes of a client.
PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

# 9113 6: frame types.
DATA: Final = 0x0
HEADERS: Final = 0x1
PRIORITY: Final = 0x2
RST_STREAM: Final = 0x3
SETTINGS: Final = 0x4
PUSH_PROMISE: Final = 0x5
PING: Final = 0x6
GOAWAY: Final = 0x7
WINDOW_UPDATE: Final = 0x8
CONTINUATION: Final = 0x9

# 9113 6: flags.
END_STREAM: Final = 0x1
ACK: Final = 0x1
END_HEADERS: Final = 0x4
PADDED: Final = 0x8
PRIORITY_FLAG: Final = 0x20

# 9113 6.5.2: settings.
HEADER_TABLE_SIZE: Final = 0x1
ENABLE_PUSH: Final = 0x2
MAX_CONCURRENT_STREAMS: Final = 0x3
INITIAL_WINDOW_SIZE: Final = 0x4
MAX_FRAME_SIZE: Final = 0x5
MAX_HEADER_LIST_SIZE: Final = 0x6

# 9113 4.2: every peer accepts this size, and we announce no other.
DEFAULT_MAX_FRAME_BYTES: Final = 16_384
# 9113 6.5.2: the largest SETTINGS_MAX_FRAME_SIZE.
LARGEST_MAX_FRAME_BYTES: Final = 2**24 - 1
# 9113 6.9.1: the largest window; also the highest stream identifier (9113 5.1.1).
LARGEST_WINDOW_BYTES: Final = 2**31 - 1
LARGEST_STREAM_ID: Final = 2**31 - 1
# 9113 6.9.2: the initial size of windows.
DEFAULT_WINDOW_BYTES: Final = 65_535

FRAME_HEADER_BYTES: Final = 9
# Length (24 bits) and type (8) as one word, flags, stream identifier with its reserved bit.
FRAME_HEADER: Final = Struct(">IBI")
U32: Final = Struct(">I")
SETTING: Final = Struct(">HI")

_FRAME_U32: Final = Struct(">IBII")
_GOAWAY: Final = Struct(">IBIII")


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """Build any frame."""
    return FRAME_HEADER.pack(len(payload) << 8 | kind, flags, stream_id) + payload


def rst_stream(stream_id: int, code: int) -> bytes:
    """Build RST_STREAM (9113 6.4)."""
    return _FRAME_U32.pack(4 << 8 | RST_STREAM, 0, stream_id, code)


def window_update(stream_id: int, increment_bytes: int) -> bytes:
    """Build WINDOW_UPDATE (9113 6.9); stream 0 is the connection."""
    return _FRAME_U32.pack(4 << 8 | WINDOW_UPDATE, 0, stream_id, increment_bytes)


def goaway(last_stream_id: int, code: int, debug: bytes = b"") -> bytes:
    """Build GOAWAY (9113 6.8)."""
    head = _GOAWAY.pack((8 + len(debug)) << 8 | GOAWAY, 0, 0, last_stream_id, code)
    return head + debug


def settings(values: dict[int, int]) -> bytes:
    """Build SETTINGS (9113 6.5)."""
    return frame(SETTINGS, 0, 0, b"".join(SETTING.pack(*item) for item in values.items()))


SETTINGS_ACK: Final = frame(SETTINGS, ACK, 0)


def ping(opaque: bytes, *, is_ack: bool = False) -> bytes:
    """Build PING (9113 6.7); `opaque` is 8 bytes."""
    return frame(PING, ACK if is_ack else 0, 0, opaque)
