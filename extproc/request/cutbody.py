"""Finds a large body in an encoded message without decoding it: protobuf would copy it twice.

Field numbers and wire types: envoy/service/ext_proc/v3/external_processor.proto and
protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_PHASES: Final = range(2, 8)  # numbers of ProcessingRequest's fields of which one is set
_REQUEST_BODY: Final = 4 << 3 | _BYTES
_BODY: Final = 1 << 3 | _BYTES  # of HttpBody
_END_OF_STREAM: Final = 2 << 3 | _VARINT
_MAX_VARINT_BYTES: Final = 10


class Cut(NamedTuple):
    """A message and its body.

    Attributes:
        body: The body, within the message.
        end_of_stream: Whether it is the last part.
        rest: The message without its `request_body`, encoded.
    """

    body: memoryview
    end_of_stream: bool
    rest: bytes


def cut_body(message: bytes) -> Cut | None:
    """Cut the body out of a ProcessingRequest; None if it is not in the usual place."""
    try:
        return _cut(message)
    except (IndexError, ValueError):  # truncated or malformed: the decoder reports it
        return None


def _cut(message: bytes) -> Cut | None:
    phases = [field for field in _fields(message, 0, len(message)) if field.tag >> 3 in _PHASES]
    if [field.tag for field in phases] != [_REQUEST_BODY]:
        return None  # another phase, or several: the last one counts, or bodies are merged
    found, body, ends = phases[0], memoryview(b""), False
    for field in _fields(message, found.start, found.end):
        if field.tag == _BODY:
            body = memoryview(message)[field.start : field.end]
        elif field.tag == _END_OF_STREAM:
            ends = bool(_varint(message, field.start)[0])
        else:
            return None
    return Cut(body, ends, message[: found.begin] + message[found.end :])


class _Field(NamedTuple):
    tag: int
    begin: int  # of the tag
    start: int  # of the content
    end: int


def _fields(message: bytes, at: int, end: int) -> Iterator[_Field]:
    """Yield the fields from `at` to `end`, where the last one must end."""
    while at < end:
        begin = at
        tag, at = _varint(message, at)
        start, at = _content(message, at, tag & 7)
        if at > end:
            raise ValueError("cut off")
        yield _Field(tag, begin, start, at)


def _content(message: bytes, at: int, wire_type: int) -> tuple[int, int]:
    """Return start and end of the content of a field whose tag ends at `at`."""
    if wire_type == _BYTES:
        size, at = _varint(message, at)
        end = at + size
    elif wire_type == _VARINT:
        end = _varint(message, at)[1]
    elif wire_type in (_FIXED32, _FIXED64):
        end = at + (4 if wire_type == _FIXED32 else 8)
    else:
        raise ValueError("a group")
    return at, end


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = 0
    for place in range(_MAX_VARINT_BYTES):
        octet = message[at + place]
        value |= (octet & 0x7F) << 7 * place
        if octet < 0x80:
            return value, at + place + 1
    raise ValueError("no varint")
