"""What attackers say in HTTP/2: streams, messages, and floods, one for each way to a limit.

A flood goes beyond its limit, as far as a megabyte lets it, in the way that costs most of those
that its row of the table in docs/archive/wire-evidence.md names. Header blocks differ from each
other, so that none is answered from memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from itertools import repeat
from typing import Final, NamedTuple

from extproc.wire import Abuse, frames
from extproc.wire.grpc import literal
from extproc.wire.limits import DEFAULT_LIMITS as LIMITS

EXT_PROC: Final = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
_UNKNOWN: Final = "/fuzz.Unknown/Call"
_MAX_FLOOD_BYTES: Final = 2**20
_FRAME_BYTES: Final = frames.DEFAULT_MAX_FRAME_BYTES
_MANY_STREAMS: Final = 1000


def open_stream(
    stream_id: int, path: str = EXT_PROC, *, more: bytes = b"", is_ready: bool = True
) -> bytes:
    """HEADERS with a field that no other has; `more` joins its block.

    Args:
        stream_id: Odd.
        path: Of the method.
        more: Further fields.
        is_ready: Our SETTINGS are acknowledged.
    """
    fields = {
        b":method": b"POST",
        b":scheme": b"http",
        b":path": path.encode(),
        b"te": b"trailers",
        b"content-type": b"application/grpc",
        b"x-request-id": b"%016d" % stream_id,
    }
    block = b"".join(literal(name, value) for name, value in fields.items())
    # 7541 6.3: behind our SETTINGS the first block begins with a size update to 0.
    first = b"\x20" if stream_id == 1 and is_ready else b""
    return frames.frame(frames.HEADERS, frames.END_HEADERS, stream_id, first + block + more)


def data(stream_id: int, content: bytes) -> bytes:
    """One frame of DATA."""
    return frames.frame(frames.DATA, 0, stream_id, content)


def message(stream_id: int, content: bytes) -> bytes:
    """A gRPC message, in as many frames as it takes."""
    whole = prefix(len(content)) + content
    parts = (whole[at : at + _FRAME_BYTES] for at in range(0, len(whole), _FRAME_BYTES))
    return b"".join(data(stream_id, part) for part in parts)


def prefix(num_bytes: int) -> bytes:
    """What announces a gRPC message."""
    return b"\0" + frames.U32.pack(num_bytes)


READY: Final = frames.PREFACE + frames.settings({}) + frames.SETTINGS_ACK + open_stream(1)
"""A handshake and stream 1, open."""

# One field of 3.9 KB in the dynamic table, which lasts until our SETTINGS are acknowledged; then
# three of it for three octets: just below the limit of a header list.
_TABLE_FIELD: Final = b"\x40\x01a" + literal(b"", b"x" * 3900)[2:]
_FULL_LIST: Final = b"\xbe" * 3
_BOMB_READY: Final = (
    frames.PREFACE + frames.settings({}) + open_stream(1, more=_TABLE_FIELD, is_ready=False)
)


class Flood(NamedTuple):
    """One way to a limit.

    Attributes:
        limit: Which.
        parts: Makes what is sent, whole frames.
        hello: What comes before.
    """

    limit: Abuse
    parts: Callable[[], Iterable[bytes]]
    hello: bytes = READY


@functools.cache
def flood_bytes(flood: Flood) -> bytes:
    """Return what a flood says, with its hello."""
    found = bytearray(flood.hello)
    for part in flood.parts():
        found += part
        if len(found) > _MAX_FLOOD_BYTES:
            break
    return bytes(found)


def _often(frame: bytes) -> Callable[[], Iterable[bytes]]:
    return lambda: repeat(frame, LIMITS.max_control_frames + 1)


def _streams(more: bytes = b"", then: bytes = b"") -> Iterator[bytes]:
    """As many streams as one connection may have, and one more; on each the same."""
    for stream_id in range(3, 2 * LIMITS.max_streams_per_connection + 5, 2):
        opened = open_stream(stream_id, _UNKNOWN, more=more)
        yield opened + (data(stream_id, then) if then else b"")


def _moved_windows() -> Iterator[bytes]:
    """SETTINGS that each move the window of every stream."""
    yield from (open_stream(stream_id, _UNKNOWN) for stream_id in range(3, 2 * _MANY_STREAMS, 2))
    sizes = (65_536 + number % 2 for number in range(LIMITS.max_control_frames + 1))
    yield from (frames.settings({frames.INITIAL_WINDOW_SIZE: size}) for size in sizes)


def _block(fragment: bytes, num: int) -> Iterator[bytes]:
    """A header block that does not end."""
    yield frames.frame(frames.HEADERS, 0, 3, fragment)
    yield from repeat(frames.frame(frames.CONTINUATION, 0, 3, fragment), num)


_FULL: Final = bytes(_FRAME_BYTES)
_BEGUN: Final = prefix(LIMITS.max_message_bytes).ljust(_FRAME_BYTES, b"\0")
_ANSWERED: Final = prefix(_FRAME_BYTES - 5).ljust(_FRAME_BYTES, b"\0")

FLOODS: Final = (
    Flood(Abuse.TOO_MANY_STREAMS, _streams),
    Flood(Abuse.TOO_MANY_STREAMS, lambda: _streams(_FULL_LIST), _BOMB_READY),
    Flood(Abuse.BUFFERED_BYTES, lambda: _streams(then=_BEGUN)),
    Flood(Abuse.MESSAGE_TOO_LARGE, lambda: [data(1, prefix(LIMITS.max_message_bytes + 1))]),
    Flood(Abuse.STALLED_MESSAGE, lambda: _streams(then=prefix(1000))),
    Flood(
        Abuse.HEADER_BLOCK,
        lambda: _block(_FULL, LIMITS.max_header_block_bytes // _FRAME_BYTES),
        _BOMB_READY,
    ),
    Flood(Abuse.HEADER_LIST, lambda: [open_stream(3, more=b"\xbe" * 16_000)], _BOMB_READY),
    Flood(Abuse.CONTINUATION_FLOOD, lambda: _block(b"", LIMITS.max_continuation_frames + 1)),
    # Malformed requests, which have to be reset.
    Flood(Abuse.FRAME_FLOOD, lambda: _streams(literal(b"connection", b"x"))),
    Flood(Abuse.FRAME_FLOOD, _often(frames.settings({}))),
    Flood(Abuse.FRAME_FLOOD, _moved_windows),
    Flood(Abuse.FRAME_FLOOD, _often(frames.ping(bytes(8)))),
    Flood(Abuse.FRAME_FLOOD, _often(data(1, b""))),
    Flood(Abuse.FRAME_FLOOD, _often(frames.window_update(1, 1))),
    Flood(Abuse.FRAME_FLOOD, _often(frames.frame(frames.PRIORITY, 0, 1, bytes(5)))),
    # Answers that find no window.
    Flood(Abuse.SLOW_READER, lambda: repeat(data(1, _ANSWERED), 64)),
    Flood(Abuse.HALF_OPEN, lambda: []),
)
