"""The abuses of the table in docs/wire.md as reads and ticks: one entry for each way to a limit.

Each goes as far as its limit and one further, in the way that costs us most of those that the row
names: header blocks differ from each other, so that none is answered from memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from extproc.wire import Abuse, frames
from extproc.wire.budget import DEFAULT_MAX_BYTES
from extproc.wire.control import ANSWERED_COST, SETTINGS_COST
from extproc.wire.grpc import literal
from extproc.wire.limits import DEFAULT_LIMITS as LIMITS

ECHO: Final = "/bench.Echo/Echo"

_READ_BYTES: Final = 64 * 1024
_TICK_S: Final = 0.5
_FIELDS: Final = {
    b":method": b"POST",
    b":scheme": b"http",
    b":path": ECHO.encode(),
    b"te": b"trailers",
    b"content-type": b"application/grpc",
}
_BLOCK: Final = b"".join(literal(name, value) for name, value in _FIELDS.items())
_PING: Final = frames.ping(bytes(8))
_FULL_DATA_BYTES: Final = frames.DEFAULT_MAX_FRAME_BYTES


def open_stream(stream_id: int, *, before: bytes = b"", after: bytes = b"") -> bytes:
    """HEADERS with a field that no other has; `before` and `after` join its block."""
    fresh = literal(b"x-request-id", b"%016d" % stream_id)
    block = before + _BLOCK + fresh + after
    return frames.frame(frames.HEADERS, frames.END_HEADERS, stream_id, block)


_UNACKNOWLEDGED: Final = frames.PREFACE + frames.settings({})
_IDLE: Final = _UNACKNOWLEDGED + frames.SETTINGS_ACK
# 7541 6.3: behind our SETTINGS the first block begins with a size update to 0.
READY: Final = _IDLE + open_stream(1, before=b"\x20")
"""A handshake and stream 1, open."""

# One field of 3.9 KB in the dynamic table, which lasts until our SETTINGS are acknowledged; then
# three of it for three octets: just below the limit of a header list.
_TABLE_FIELD: Final = b"\x40\x01a" + literal(b"", b"x" * 3900)[2:]
_FULL_LIST: Final = b"\xbe" * 3
_BOMB_READY: Final = _UNACKNOWLEDGED + open_stream(1, after=_TABLE_FIELD)


@dataclass(frozen=True, slots=True)
class Step:
    """One call of the core: a read, or a tick where there is no data.

    Attributes:
        data: What is read; whole frames.
        now_s: Seconds since the connection.
        connection: Which of the attacker's.
    """

    data: bytes = b""
    now_s: float = 0.0
    connection: int = 0


@dataclass(frozen=True, slots=True)
class Attack:
    """One way to a limit.

    Attributes:
        abuse: The limit.
        what: What is sent.
        ending: How it ends, as `bench.abuse.read_ending` names it.
        make_steps: Makes what is done.
        hello: What comes before and is not counted.
    """

    abuse: Abuse
    what: str
    ending: str
    make_steps: Callable[[], list[Step]]
    hello: bytes = READY


def split_frames(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Cut whole frames apart: type, stream and payload of each."""
    position = 0
    while position < len(data):
        word, _, stream_id = frames.FRAME_HEADER.unpack_from(data, position)
        start = position + frames.FRAME_HEADER_BYTES
        position = start + (word >> 8)
        yield word & 0xFF, stream_id, data[start:position]


# ---- what steps are made of


def _reads(parts: Iterable[bytes], connection: int = 0) -> list[Step]:
    """Join parts, each of whole frames, to reads."""
    steps, read = [], bytearray()
    for part in parts:
        if read and len(read) + len(part) > _READ_BYTES:
            steps.append(Step(bytes(read), connection=connection))
            read.clear()
        read += part
    return [*steps, Step(bytes(read), connection=connection)]


def _flood(frame: bytes, limit: int) -> Callable[[], list[Step]]:
    return lambda: _reads([frame] * (limit + 1))


def _ticks(until_s: float, *, is_silent: bool = False) -> list[Step]:
    """Time passes; a peer that is not silent sends PING often enough to be no dead one."""
    steps = []
    for i in range(1, int(until_s / _TICK_S) + 2):
        now_s = i * _TICK_S
        steps.append(Step(now_s=now_s))
        if not is_silent and now_s % 20 == 0:
            steps.append(Step(_PING, now_s))
    return steps


def _data(stream_id: int, content: bytes) -> bytes:
    return frames.frame(frames.DATA, 0, stream_id, content)


def _prefix(message_bytes: int) -> bytes:
    return b"\x00" + frames.U32.pack(message_bytes)


def _ids(first: int, num: int) -> range:
    return range(first, first + 2 * num, 2)


# ---- steps of those that are no plain flood


def _streams(num_connections: int = 1, *, after: bytes = b"") -> list[Step]:
    """As many streams as one connection may have, and on the last one more."""
    ids = _ids(3, LIMITS.max_streams_per_connection)
    steps = []
    for connection in range(num_connections):
        mine = ids if connection == num_connections - 1 else ids[:-1]
        steps += _reads((open_stream(i, after=after) for i in mine), connection)
    return steps


def _half_messages() -> list[Step]:
    """Messages but for their last bytes: the largest, one after the other, while windows are given
    back; then as much as fits into a window, on as many streams as the budget has room for.
    """
    size_bytes = LIMITS.max_message_bytes
    num_large = DEFAULT_MAX_BYTES // size_bytes - 1
    num_small = (DEFAULT_MAX_BYTES - num_large * size_bytes) // LIMITS.stream_window_bytes + 1
    ids = _ids(3, num_large + num_small)
    begin = _prefix(size_bytes).ljust(_FULL_DATA_BYTES, b"\0")
    steps = []
    for stream_id in ids[:num_large]:
        first, more = _data(stream_id, begin), _data(stream_id, bytes(_FULL_DATA_BYTES))
        steps += _reads([open_stream(stream_id), first, more, more])
        # The same object again and again, so that the load itself needs no memory.
        num_left = size_bytes // _FULL_DATA_BYTES - 3
        steps += [Step(more * 3)] * (num_left // 3) + [Step(more * (num_left % 3) or _PING)]
    for stream_id in ids[num_large:]:
        first, more = _data(stream_id, begin), _data(stream_id, bytes(_FULL_DATA_BYTES))
        num_left = LIMITS.stream_window_bytes // _FULL_DATA_BYTES - 1
        steps += _reads([open_stream(stream_id), first, *[more] * num_left])
    return steps


def _stalled_messages() -> list[Step]:
    """On every stream that the connection may have."""
    ids = _ids(3, LIMITS.max_streams_per_connection - 1)
    opened = _reads(open_stream(i) + _data(i, _prefix(1000)) for i in ids)
    return opened + _ticks(LIMITS.message_timeout_s)


def _moved_windows() -> list[Step]:
    """SETTINGS that each move the window of every stream that the connection may have."""
    opened = _reads(open_stream(i) for i in _ids(3, LIMITS.max_streams_per_connection - 1))
    sizes = (65_536 + i % 2 for i in range(_NUM_SETTINGS + 1))
    return opened + _reads(frames.settings({frames.INITIAL_WINDOW_SIZE: size}) for size in sizes)


def _resets() -> list[Step]:
    """Requests that have to be reset, as they are malformed."""
    ids = _ids(3, LIMITS.max_control_frames + 1)
    return _reads(open_stream(i, after=literal(b"connection", b"x")) for i in ids)


def _unread_answers(size_bytes: int) -> list[Step]:
    """Requests whose answers find no window."""
    content = bytes(_FULL_DATA_BYTES - 5)
    read = _data(1, _prefix(len(content)) + content) * 3
    return [Step(read)] * (size_bytes // len(read))


def _stand_still() -> list[Step]:
    # The first tick is the first to see what is queued.
    return _unread_answers(LIMITS.max_queued_bytes) + _ticks(LIMITS.stall_timeout_s + _TICK_S)


def _block(fragment: bytes, num_continuations: int) -> list[Step]:
    """A header block that does not end."""
    more = frames.frame(frames.CONTINUATION, 0, 3, fragment)
    return _reads([frames.frame(frames.HEADERS, 0, 3, fragment), *[more] * num_continuations])


_NUM_SETTINGS: Final = LIMITS.max_control_frames // SETTINGS_COST
_NUM_ANSWERED: Final = LIMITS.max_control_frames // ANSWERED_COST
_CALM: Final = "GOAWAY ENHANCE_YOUR_CALM"
_SILENCE_S: Final = LIMITS.keepalive_s + LIMITS.keepalive_timeout_s + 2 * _TICK_S
_PRIORITY: Final = frames.frame(frames.PRIORITY, 0, 1, bytes(5))
_TOO_LONG: Final = _data(1, _prefix(LIMITS.max_message_bytes + 1))
_MANY: Final = f"{LIMITS.max_streams_per_connection:,} streams"

ATTACKS: Final = (
    Attack(Abuse.TOO_MANY_STREAMS, "streams of a connection", "REFUSED_STREAM", _streams),
    Attack(
        Abuse.TOO_MANY_STREAMS,
        "the same, each with 12 KB of headers by reference",
        "REFUSED_STREAM",
        lambda: _streams(after=_FULL_LIST),
        hello=_BOMB_READY,
    ),
    Attack(Abuse.TOO_MANY_STREAMS, "streams of all", "REFUSED_STREAM", lambda: _streams(4)),
    Attack(
        Abuse.BUFFERED_BYTES,
        "half-received messages of all",
        "RESOURCE_EXHAUSTED",
        _half_messages,
    ),
    Attack(
        Abuse.MESSAGE_TOO_LARGE, "a long message", "RESOURCE_EXHAUSTED", lambda: [Step(_TOO_LONG)]
    ),
    Attack(
        Abuse.STALLED_MESSAGE,
        f"messages announced for {_MANY}",
        "DEADLINE_EXCEEDED",
        _stalled_messages,
    ),
    Attack(
        Abuse.HEADER_BLOCK,
        "a long header block",
        _CALM,
        lambda: _block(bytes(_FULL_DATA_BYTES), LIMITS.max_header_block_bytes // _FULL_DATA_BYTES),
        hello=_BOMB_READY,
    ),
    Attack(
        Abuse.HEADER_LIST,
        "HPACK bomb",
        _CALM,
        lambda: [Step(open_stream(3, after=b"\xbe" * 16_000))],
        hello=_BOMB_READY,
    ),
    Attack(
        Abuse.CONTINUATION_FLOOD,
        "CONTINUATION without end",
        _CALM,
        lambda: _block(b"", LIMITS.max_continuation_frames + 1),
    ),
    Attack(Abuse.FRAME_FLOOD, "malformed requests", _CALM, _resets),
    Attack(
        Abuse.FRAME_FLOOD,
        "SETTINGS",
        _CALM,
        _flood(frames.settings({}), _NUM_SETTINGS),
    ),
    Attack(Abuse.FRAME_FLOOD, f"SETTINGS that move windows of {_MANY}", _CALM, _moved_windows),
    Attack(Abuse.FRAME_FLOOD, "PING", _CALM, _flood(_PING, _NUM_ANSWERED)),
    Attack(
        Abuse.FRAME_FLOOD,
        "DATA without content",
        _CALM,
        _flood(_data(1, b""), _NUM_ANSWERED),
    ),
    Attack(
        Abuse.FRAME_FLOOD,
        "WINDOW_UPDATE",
        _CALM,
        _flood(frames.window_update(1, 1), _NUM_ANSWERED),
    ),
    Attack(Abuse.FRAME_FLOOD, "PRIORITY", _CALM, _flood(_PRIORITY, LIMITS.max_control_frames)),
    Attack(
        Abuse.SLOW_READER,
        "answers not read",
        "ENHANCE_YOUR_CALM",
        lambda: _unread_answers(2 * LIMITS.max_queued_bytes),
    ),
    Attack(Abuse.SLOW_READER, "answers not read, standing still", _CALM, _stand_still),
    Attack(
        Abuse.HANDSHAKE_TIMEOUT,
        "nothing at all",
        "GOAWAY SETTINGS_TIMEOUT",
        lambda: _ticks(LIMITS.handshake_timeout_s, is_silent=True),
        hello=b"",
    ),
    Attack(
        Abuse.HALF_OPEN,
        "silence",
        "GOAWAY NO_ERROR",
        lambda: _ticks(_SILENCE_S, is_silent=True),
    ),
    Attack(Abuse.IDLE, "no stream", "drained", lambda: _ticks(LIMITS.idle_timeout_s), hello=_IDLE),
)
