"""Reads usual ext_proc messages from their bytes: protobuf would take twice as long, and would copy
large bodies twice.

Usual is how Envoy writes them: the phase is the first field, header names are in lower case, values
in `raw_value`, nothing is repeated. All else is left to protobuf, which reads the same of a usual
message. Clients choose the values, which may look like fields: so every length is followed, and
nothing is searched for.

Field numbers and wire types: envoy/service/ext_proc/v3/external_processor.proto,
envoy/config/core/v3/base.proto and protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from struct import Struct
from typing import NamedTuple

MAX_NAMES = 1024
"""Names of other headers that are remembered: clients may make up any number."""

HEADERS, BODY = 0x12, 0x22
"""First bytes of messages with the request's headers and with its body."""
_BODIES = BODY, 0x2A  # of the request and of the response

VIEW_FROM_BYTES = 16 * 1024
"""Longer bodies are not copied: each copy of a megabyte takes milliseconds."""

_ENDINGS = {b"": False, b"\x18\x01": True}
_BODY_ENDINGS = {b"": False, b"\x10\x01": True}
_ENTRY = _KEY = _CONTENT = 0x0A  # the first field of its message, with a length
_VALUE = 0x1A


class Names(dict[str, str]):
    """Header names by what precedes their values: the key with its tag and length, and a tag.

    Other names than the `needed` ones are "".
    """

    def __init__(self, needed: Iterable[str]) -> None:
        super().__init__({_prefix(name): name for name in needed if name})

    def __missing__(self, prefix: str) -> str | None:
        """Return "" for another name; None where it is not sure that it is one."""
        name = prefix[2:-1]
        if prefix != _prefix(name) or not name.islower() or not name.isascii():
            return None
        if len(self) < MAX_NAMES:
            self[prefix] = ""
        return ""


def _prefix(name: str) -> str:
    """Return what stands before the value of a header with a name of less than 128 bytes."""
    return f"{_KEY:c}{len(name) & 0x7F:c}{name}{_VALUE:c}"


class Head(NamedTuple):
    """The contents of a message with headers.

    Attributes:
        headers: The needed headers.
        ends: The stream ends with them.
        rest: All but the first field of the message.
        places: Begin and end of each value, of headers that are not needed too.
        needed: The places of `headers`.
    """

    headers: dict[str, str]
    ends: bool
    rest: bytes
    places: Sequence[tuple[int, int]]
    needed: Sequence[slice]


class Layout:
    """Where the values stand in messages that are the same everywhere else: all tags, all lengths,
    all names, and what follows the headers. Most messages have the layout of an earlier one.

    Attributes:
        num_misses: Messages of the same length that differed.
    """

    __slots__ = ("_between", "_fixed", "_needed", "num_misses")

    def __init__(self, message: bytes, head: Head) -> None:
        form, at = [], 0
        for begin, end in head.places:
            form.append(f"{begin - at}s{end - begin}x")
            at = end
        self._between = Struct(f"{''.join(form)}{len(message) - at}s").unpack
        self._fixed = self._between(message)
        self._needed = tuple(zip(head.headers, head.needed, strict=True))
        self.num_misses = 0

    def read(self, message: bytes) -> dict[str, str] | None:
        """Return the needed headers of a message of the same length; None if it differs."""
        if self._between(message) != self._fixed:
            self.num_misses += 1
            return None
        text = message.decode("latin-1")
        return {name: text[place] for name, place in self._needed}


def read_headers(message: bytes, names: Names) -> Head | None:
    """Return what a message with headers says; None if it is not usual."""
    try:
        at, stop = _content(message, 0, HEADERS)
        at, end = _content(message, at, _CONTENT)
        text = message.decode("latin-1")
        found: dict[str, str] = {}
        places: list[tuple[int, int]] = []
        needed: list[slice] = []
        while at < end:
            size = message[at + 1]
            if size < 128:  # and so is the size of the value
                entry_end = at + 2 + size
                value_at = at + 5 + message[at + 3]
                name = names[text[at + 2 : value_at]]
                value_at += 1
                if message[value_at - 1] != entry_end - value_at:
                    return None
            else:
                key_at, entry_end = _content(message, at, _ENTRY)
                value_at = key_at + 2 + message[key_at + 1]
                name = names[text[key_at : value_at + 1]]
                value_at, value_end = _content(message, value_at, _VALUE)
                if value_end != entry_end:
                    return None
            if message[at] != _ENTRY or name is None:
                return None
            if name:
                if name in found:
                    return None
                found[name] = text[value_at:entry_end]
                needed.append(slice(value_at, entry_end))
            places.append((value_at, entry_end))
            at = entry_end
        if at != end or not end <= stop <= len(message):
            return None
        return Head(found, _ENDINGS[message[end:stop]], message[stop:], places, needed)
    except (IndexError, KeyError, ValueError):
        return None


def read_body(message: bytes) -> tuple[bytes | memoryview, bool, bytes] | None:
    """Return the body, whether the stream ends with it, and all but the first field of the message;
    None if it is not usual."""
    try:
        at, stop = _content(message, 0, BODY)
        at, end = _content(message, at, _CONTENT)
        if not end <= stop <= len(message):
            return None
        ends = _BODY_ENDINGS[message[end:stop]]
    except (IndexError, KeyError, ValueError):
        return None
    is_large = end - at > VIEW_FROM_BYTES
    return memoryview(message)[at:end] if is_large else message[at:end], ends, message[stop:]


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
