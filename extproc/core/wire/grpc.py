"""gRPC over HTTP/2: status blocks, messages' prefixes, timeouts (grpc/doc/PROTOCOL-HTTP2.md).

Every header block that we send is made of literals without indexing (7541 6.2.2), so it never
depends on the connection and the common ones are made once.
"""

from __future__ import annotations

import re
from functools import lru_cache
from struct import Struct
from typing import Final

from extproc.core.wire import frames
from extproc.core.wire.service import Code

IDENTITY: Final = "identity"
PREFIX_BYTES: Final = 5
# `grpc-message` beyond this is cut; with it a trailer block fits any peer's frame.
MAX_DETAILS_BYTES: Final = 2048

_TIMEOUT: Final = re.compile(rb"([0-9]{1,8})([HMSmun])", re.ASCII)
_UNIT_S: Final = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}


def literal(name: bytes, value: bytes) -> bytes:
    """Encode one field without indexing and without Huffman (7541 6.2.2)."""
    return b"\x00" + _string(name) + _string(value)


def _string(text: bytes) -> bytes:
    """Encode a string literal (7541 5.2), its length with a 7-bit prefix (7541 5.1)."""
    length = len(text)
    if length < 127:
        return bytes((length,)) + text
    head, rest = bytearray((127,)), length - 127
    while rest >= 128:
        head.append(rest & 127 | 128)
        rest >>= 7
    head.append(rest)
    return bytes(head) + text


# 0x88 is `:status: 200` in the static table (7541 appendix A).
RESPONSE_BLOCK: Final = b"\x88" + literal(b"content-type", b"application/grpc")


@lru_cache(maxsize=64)
def http_error_block(status: int) -> bytes:
    """Encode an answer below gRPC: an HTTP status alone."""
    return literal(b":status", b"%d" % status)


@lru_cache(maxsize=256)
def trailer_block(code: int, details: str) -> bytes:
    """Encode `grpc-status` and, if there are details, `grpc-message`."""
    block = literal(b"grpc-status", b"%d" % code)
    return block + literal(b"grpc-message", percent_encode(details)) if details else block


def percent_encode(details: str) -> bytes:
    """Encode a status message: UTF-8, every byte but printable ASCII as %XX, `%` itself too.

    Cut to `MAX_DETAILS_BYTES`, never in the middle of an escape.
    """
    encoded, size = [], 0
    for byte in details.encode("utf-8", "replace"):
        piece = bytes((byte,)) if 0x20 <= byte <= 0x7E and byte != 0x25 else b"%%%02X" % byte
        size += len(piece)
        if size > MAX_DETAILS_BYTES:
            break
        encoded.append(piece)
    return b"".join(encoded)


def parse_timeout_s(value: bytes) -> float | None:
    """Read `grpc-timeout` as seconds; None where it is not one."""
    match = _TIMEOUT.fullmatch(value)
    return int(match[1]) * _UNIT_S[match[2]] if match else None


# One frame head and message prefix: length and type, flags, stream; compressed flag, length.
MESSAGE_HEAD: Final = Struct(">IBIBI")
# The same behind the response headers, for the first message of a stream.
FIRST_HEAD: Final = Struct(f">IBI{len(RESPONSE_BLOCK)}sIBIBI")
RESPONSE_WORD: Final = len(RESPONSE_BLOCK) << 8 | frames.HEADERS

OK_TRAILERS: Final = trailer_block(Code.OK, "")
OK_WORD: Final = len(OK_TRAILERS) << 8 | frames.HEADERS
# Trailers `grpc-status: 0`, and behind them RST_STREAM(NO_ERROR).
OK_END: Final = Struct(f">IBI{len(OK_TRAILERS)}s")
OK_END_AND_RESET: Final = Struct(f">IBI{len(OK_TRAILERS)}sIBII")
RESET_WORD: Final = 4 << 8 | frames.RST_STREAM
END_FLAGS: Final = frames.END_STREAM | frames.END_HEADERS
