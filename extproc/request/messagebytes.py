"""Reads usual ext_proc messages from their bytes: the two of a request of 308 B take 30 thousand
instructions, by protobuf 112, which would also copy large bodies twice.

Usual are messages with headers that are laid out as one that protobuf has read, and bodies as Envoy
writes them: the phase is the first field. All else is left to protobuf, which reads the same of a
usual message. Clients choose the values, which may look like fields: so every length is followed,
and nothing is searched for.

Field numbers and wire types: envoy/service/ext_proc/v3/external_processor.proto,
envoy/config/core/v3/base.proto and protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from functools import lru_cache
from operator import itemgetter
from struct import Struct
from typing import Any

HEADERS, BODY = 0x12, 0x22
"""First bytes of messages with the request's headers and with its body."""
_BODIES = BODY, 0x2A  # of the request and of the response

VIEW_FROM_BYTES = 16 * 1024
"""Longer bodies are not copied: each copy of a megabyte takes milliseconds."""

_HEAD_BYTES = 12
"""Two tags and two lengths at most, before a body."""
MAX_HEADS = 1024
"""That are remembered: with each the first letters of its body, 200 bytes."""

_BODY_ENDINGS = {b"": False, b"\x10\x01": True}
_CONTENT, _VALUE = 0x0A, 0x1A
"""The first field of its message, with a length; and the value of a header."""


class MessageLayout:
    """Where the values stand in messages that are the same everywhere else: all tags, all lengths,
    all names, and what follows the headers. Most messages have the layout of an earlier one.

    Args:
        at: Where the headers begin.
        headers: The name of each, what precedes its value, and that.
        needed: The names of those that are read.
    """

    __slots__ = ("_between", "_fixed", "_names", "_values")

    def __init__(
        self,
        message: bytes,
        at: int,
        headers: Iterable[tuple[str, bytes, bytes]],
        needed: Container[str],
    ) -> None:
        form, places = [f"{at}s"], dict[str, slice]()
        for name, head, value in headers:
            form.append(f"{len(head)}s{len(value)}x")
            at += len(head) + len(value)
            if name in needed:
                places[name] = slice(at - len(value), at)
        self._between = Struct(f"{''.join(form)}{len(message) - at}s").unpack
        self._fixed = self._between(message)
        self._names, self._values = tuple(places), itemgetter(*places.values(), slice(0))

    def read(self, message: bytes) -> dict[str, str] | None:
        """Return the needed headers of a message of the same length; None if it differs."""
        if self._between(message) != self._fixed:
            return None
        return dict(zip(self._names, self._values(message.decode("latin-1")), strict=False))


def layout_of(message: bytes, http: Any, headers: Mapping[str, str]) -> MessageLayout | None:
    """Return the layout of a message; None if it is not usual: its headers are not all in
    `raw_value`, or a needed one is repeated.

    Args:
        http: Its `HttpHeaders`, by protobuf.
        headers: The needed ones that were read of these.
    """
    found, text = list[tuple[str, bytes, bytes]](), b""
    for each in http.headers.headers:
        key, value = each.key.encode(), each.raw_value
        head = _field(_CONTENT, len(key)) + key + (_field(_VALUE, len(value)) if value else b"")
        head = _field(_CONTENT, len(head) + len(value)) + head
        found.append((each.key.lower(), head, value))
        text += head + value
    begin = _field(HEADERS, http.ByteSize()) + _field(_CONTENT, len(text))
    is_usual = message.startswith(begin + text)
    if not is_usual or sum(name in headers for name, _, _ in found) > len(headers):
        return None
    return MessageLayout(message, len(begin), found, headers)


def _field(tag: int, size: int) -> bytes:
    return bytes([tag]) + varint(size)


def read_body(message: bytes) -> tuple[bytes | memoryview, bool, bytes] | None:
    """Return the body, whether the stream ends with it, and all but the first field of the message;
    None if it is not usual."""
    try:
        at, end, stop = _places(message[:_HEAD_BYTES])
        if not end <= stop <= len(message):
            return None
        ends = _BODY_ENDINGS[message[end:stop]]
    except (IndexError, KeyError, ValueError):
        return None
    is_large = end - at > VIEW_FROM_BYTES
    return memoryview(message)[at:end] if is_large else message[at:end], ends, message[stop:]


@lru_cache(MAX_HEADS)
def _places(head: bytes) -> tuple[int, int, int]:
    """Return where a body begins and ends, and where the message's first field ends."""
    at, stop = _content(head, 0, BODY)
    at, end = _content(head, at, _CONTENT)
    return at, end, stop


def first_body_bytes(message: bytes) -> int:
    """Return how much of a message is the body that it begins with; 0 if it begins with none."""
    if not message or message[0] not in _BODIES:
        return 0
    try:
        at, stop = _content(message, 0, message[0])
    except IndexError:
        return 0
    return min(stop, len(message)) - at


def _content(message: bytes, at: int, tag: int) -> tuple[int, int]:
    """Return begin and end of the content of the field at `at`; raise ValueError for another."""
    if message[at] != tag:
        raise ValueError("another field")
    size = message[at + 1]
    at += 2
    if size > 127 and message[at] < 128:
        return at + 1, at + 1 + (size & 127 | message[at] << 7)
    if size > 127:
        size, shift = size & 127, 7
        while message[at] > 127 and shift < 28:
            size |= (message[at] & 127) << shift
            at, shift = at + 1, shift + 7
        size |= message[at] << shift  # of a longer varint far too much
        at += 1
    return at, at + size


def varint(value: int) -> bytes:
    """Encode a number as protobuf does."""
    groups = []
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*groups, value])
