"""Find a large body in an encoded message instead of decoding it: protobuf would copy it twice.

Field numbers and wire types: envoy/service/ext_proc/v3/external_processor.proto and
protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

from typing import Final, NamedTuple

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_REQUEST_BODY: Final = 4 << 3 | _BYTES  # of ProcessingRequest
_BODY: Final = 1 << 3 | _BYTES  # of HttpBody
_END_OF_STREAM: Final = 2 << 3 | _VARINT
_MAX_VARINT_BYTES: Final = 10


class Cut(NamedTuple):
    """A message in which a body was found.

    Attributes:
        body: The body, within the message.
        end_of_stream: Whether it ends here.
        rest: The message without its `request_body`, encoded.
    """

    body: memoryview
    end_of_stream: bool
    rest: bytes


def cut_body(message: bytes) -> Cut | None:
    """Cut the body out of a ProcessingRequest; None where it is not plainly there."""
    try:
        return _cut(message)
    except (IndexError, ValueError):  # cut off, or not the format: the decoder says what it is
        return None


def _cut(message: bytes) -> Cut | None:
    at, found = 0, None
    while at < len(message):
        begin = at
        tag, at = _varint(message, at)
        start, at = _content(message, at, tag & 7)
        if tag == _REQUEST_BODY:
            if found is not None:
                return None  # two are one, merged
            found = begin, start, at
    if found is None:
        return None
    begin, start, end = found
    body, ends = memoryview(b""), False
    at = start
    while at < end:
        tag, at = _varint(message, at)
        first, at = _content(message, at, tag & 7)
        if tag == _BODY:
            body = memoryview(message)[first:at]
        elif tag == _END_OF_STREAM:
            ends = bool(_varint(message, first)[0])
        else:
            return None
    return Cut(body, ends, message[:begin] + message[end:]) if at == end else None


def _content(message: bytes, at: int, wire_type: int) -> tuple[int, int]:
    """From where to where the content of a field goes whose tag ends at `at`."""
    if wire_type == _BYTES:
        size, at = _varint(message, at)
        end = at + size
    elif wire_type == _VARINT:
        end = _varint(message, at)[1]
    elif wire_type in (_FIXED32, _FIXED64):
        end = at + (4 if wire_type == _FIXED32 else 8)
    else:
        raise ValueError("a group")
    if end > len(message):
        raise ValueError("cut off")
    return at, end


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = 0
    for place in range(_MAX_VARINT_BYTES):
        octet = message[at + place]
        value |= (octet & 0x7F) << 7 * place
        if octet < 0x80:
            return value, at + place + 1
    raise ValueError("no varint")
