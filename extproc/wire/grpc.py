"""gRPC over HTTP/2: status blocks, message prefixes, timeouts (grpc/doc/PROTOCOL-HTTP2.md).

Every header block that we send consists of literals without indexing (7541 6.2.2), so it does not
depend on the connection, and the common ones are encoded once.
"""

from __future__ import annotations

import re
from functools import lru_cache
from io import BytesIO
from struct import Struct
from typing import Final
from urllib.parse import quote

import hpack

from extproc.wire import frames
from extproc.wire.rpc import Code

IDENTITY: Final = "identity"
PREFIX_BYTES: Final = 5
# A longer `grpc-message` is truncated, so that a trailer block fits any peer's frame.
MAX_DETAILS_BYTES: Final = 2048

_PRINTABLE: Final = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")
_CUT_ESCAPE: Final = re.compile("%[0-9A-F]?$")
_TIMEOUT: Final = re.compile(rb"([0-9]{1,8})([HMSmun])", re.ASCII)
_UNIT_S: Final = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}


JOINED_BYTES: Final = 256 * 1024
"""Of a message up to which its parts are joined at its end: a longer one takes milliseconds."""


class Partial:
    """An incomplete message.

    Attributes:
        prefix: Its first bytes, up to `PREFIX_BYTES`.
        missing_bytes: Of what follows them; -1 until that is announced.
    """

    __slots__ = ("_parts", "_size_bytes", "_text", "missing_bytes", "prefix")

    def __init__(self) -> None:
        self.prefix = b""
        self.missing_bytes = self._size_bytes = -1
        self._parts: list[bytes] = []
        self._text: BytesIO | None = None

    def __len__(self) -> int:
        return len(self.prefix) + self._size_bytes - self.missing_bytes

    def add_to_prefix(self, part: bytes) -> None:
        """Add what comes next, no more than the prefix."""
        self.prefix += part

    def announce(self, size_bytes: int) -> None:
        """Set how much follows the prefix."""
        self.missing_bytes = self._size_bytes = size_bytes
        if size_bytes > JOINED_BYTES:
            self._text = BytesIO()  # once whole it is the message, without a copy

    def add(self, part: bytes) -> None:
        """Add what comes next, no more than is missing."""
        self.missing_bytes -= len(part)
        if self._text is None:
            self._parts.append(part)
        else:
            self._text.write(part)

    def message(self) -> bytes:
        """Return the message, of which nothing is missing."""
        return b"".join(self._parts) if self._text is None else self._text.getvalue()


def literal(name: bytes, value: bytes) -> bytes:
    """Encode one field without indexing and without Huffman (7541 6.2.2)."""
    return b"\x00" + _string(name) + _string(value)


def _string(text: bytes) -> bytes:
    """Encode a string literal (7541 5.2), its length with a 7-bit prefix (7541 5.1)."""
    return bytes(hpack.hpack.encode_integer(len(text), 7)) + text


# 0x88 is `:status: 200` in the static table (7541 appendix A).
RESPONSE_BLOCK: Final = b"\x88" + literal(b"content-type", b"application/grpc")


@lru_cache(maxsize=256)
def trailer_block(code: int, details: str) -> bytes:
    """Encode `grpc-status` and, if there are details, `grpc-message`."""
    block = literal(b"grpc-status", b"%d" % code)
    return block + literal(b"grpc-message", percent_encode(details)) if details else block


def percent_encode(details: str) -> bytes:
    """Encode a status message: UTF-8, every byte but printable ASCII as %XX, `%` itself too.

    Truncated to `MAX_DETAILS_BYTES`, never within an escape.
    """
    encoded = quote(details, safe=_PRINTABLE, errors="replace")[:MAX_DETAILS_BYTES]
    return _CUT_ESCAPE.sub("", encoded).encode()


def parse_timeout_s(value: bytes) -> float | None:
    """Parse `grpc-timeout` to seconds; None if it is malformed."""
    match = _TIMEOUT.fullmatch(value)
    return int(match[1]) * _UNIT_S[match[2]] if match else None


# One frame head and message prefix: length and type, flags, stream; compressed flag, length.
MESSAGE_HEAD: Final = Struct(">IBIBI")
# The same after the response headers, for the first message of a stream.
FIRST_HEAD: Final = Struct(f">IBI{len(RESPONSE_BLOCK)}sIBIBI")
RESPONSE_WORD: Final = len(RESPONSE_BLOCK) << 8 | frames.HEADERS

OK_TRAILERS: Final = trailer_block(Code.OK, "")
OK_WORD: Final = len(OK_TRAILERS) << 8 | frames.HEADERS
# Trailers `grpc-status: 0`, without and with RST_STREAM(NO_ERROR) after them.
OK_END: Final = Struct(f">IBI{len(OK_TRAILERS)}s")
OK_END_AND_RESET: Final = Struct(f">IBI{len(OK_TRAILERS)}sIBII")
RESET_WORD: Final = 4 << 8 | frames.RST_STREAM
END_FLAGS: Final = frames.END_STREAM | frames.END_HEADERS
