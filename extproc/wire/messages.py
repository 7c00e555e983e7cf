"""gRPC messages out of DATA, however the peer splits them (gRPC "Data Frames": "implementations
should make no assumptions about their alignment").

The most common frame, with exactly one message, is delivered by `Connection` itself.
"""

from __future__ import annotations

from typing import Final

from extproc.wire import frames, grpc
from extproc.wire.limits import Abuse
from extproc.wire.service import Code
from extproc.wire.stream import WireStream
from extproc.wire.streams import Streams

# Shorter than any message with its prefix.
_REFUSED: Final = 0


def handle_content(streams: Streams, stream: WireStream, content: bytes, *, now: float) -> None:
    """Handle content of a stream: deliver complete messages, keep the rest."""
    start, stop = 0, len(content)
    while start < stop and not stream.is_ended:
        if stream.partial is None:
            prefix = content[start : start + grpc.PREFIX_BYTES]
            size = _announced_bytes(streams, stream, prefix)
            if size == _REFUSED:
                return
            if size is not None and start + size <= stop:
                message = content[start + grpc.PREFIX_BYTES : start + size]
                streams.deliver(stream, message)
                start += size
                continue
            stream.partial = bytearray()
            streams.partial_since_s[stream.id] = now
        start = _grow(streams, stream, stream.partial, content, start)


def _grow(
    streams: Streams, stream: WireStream, partial: bytearray, content: bytes, start: int
) -> int:
    """Extend an incomplete message; return the position after the part of `content` used."""
    size = _announced_bytes(streams, stream, partial[: grpc.PREFIX_BYTES])
    wanted = (size or grpc.PREFIX_BYTES) - len(partial)
    added = memoryview(content)[start : start + wanted]
    partial += added
    streams.budget.add(stream, len(added))
    if size is None:
        size = _announced_bytes(streams, stream, partial)
    if len(partial) == size:
        message = bytes(memoryview(partial)[grpc.PREFIX_BYTES :])
        streams.forget_partial(stream)
        partial.clear()  # callers still have it, and the message is a copy
        streams.budget.add(stream, -size)
        streams.deliver(stream, message)
    return start + len(added)


def _announced_bytes(streams: Streams, stream: WireStream, prefix: bytes | bytearray) -> int | None:
    """Return the length of a message and its prefix; None if the prefix is incomplete.

    If the message is compressed or too long, end the stream and return `_REFUSED`.
    """
    if len(prefix) < grpc.PREFIX_BYTES:
        return None
    if prefix[0]:
        _refuse_compressed(stream, prefix[0])
        return _REFUSED
    size: int = frames.U32.unpack_from(prefix, 1)[0]
    if size > streams.limits.max_message_bytes:
        streams.counters.abuse[Abuse.MESSAGE_TOO_LARGE] += 1
        stream.end(Code.RESOURCE_EXHAUSTED, f"message of {size} bytes exceeds the limit")
        return _REFUSED
    return grpc.PREFIX_BYTES + size


def _refuse_compressed(stream: WireStream, flag: int) -> None:
    if flag != 1:
        stream.end(Code.INTERNAL, f"compressed flag is {flag}")
    elif stream.encoding == grpc.IDENTITY:
        # gRPC: "If the Message-Encoding header is omitted then the Compressed-Flag must be 0."
        stream.end(Code.INTERNAL, "compressed message without grpc-encoding")
    else:
        # gRPC doc/compression.md: UNIMPLEMENTED, and grpc-accept-encoding lists what is supported.
        details = f"grpc-encoding {stream.encoding} is not supported"
        accepted = grpc.literal(b"grpc-accept-encoding", grpc.IDENTITY.encode())
        stream.end_with(grpc.trailer_block(Code.UNIMPLEMENTED, details) + accepted)
