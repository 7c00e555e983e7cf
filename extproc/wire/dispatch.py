"""All but the most common frames: first the checks, then the table, then the effect.

Raises `ConnectionFault`; stream faults end here, in RST_STREAM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from extproc.wire import frames, grpc
from extproc.wire.control import (
    ANSWERED_COST,
    HANDLERS,
    PRIORITY_BYTES,
    depends_on_itself,
)
from extproc.wire.grpccall import WireStream
from extproc.wire.headers import TOO_LARGE
from extproc.wire.limits import Abuse, ConnectionFault, ErrorCode, StreamFault
from extproc.wire.methods import judge_trailers
from extproc.wire.opening import Opener
from extproc.wire.rpc import Code
from extproc.wire.streams import Streams
from extproc.wire.streamstates import FrameScope, StreamState

# Shorter than any message with its prefix.
_REFUSED: Final = 0
# A flag of our own for HEADERS whose priority fields name its own stream.
_SELF_DEPENDENT: Final = 0x100


@dataclass(slots=True)
class _OpenBlock:
    """A header block before its END_HEADERS (9113 4.3, 6.10)."""

    stream_id: int
    flags: int
    block: bytes
    num_continuations: int = 0
    is_too_large: bool = False


@dataclass(eq=False, slots=True)
class FrameHandler(Opener):
    """Handles any frame of one connection, by the methods of three files.

    Attributes:
        expected_kind: The only frame type allowed next: SETTINGS first, CONTINUATION within a
            header block; None where any may come.
    """

    expected_kind: int | None = frames.SETTINGS
    _open_block: _OpenBlock | None = None

    def check_expected(self, kind: int, flags: int, stream_id: int) -> None:
        """Check a frame where only one kind is allowed: the first one, or in a header block."""
        block = self._open_block
        if block is None:
            # 9113 3.4: the client's preface "MUST be followed by a SETTINGS frame".
            if kind != frames.SETTINGS or flags & frames.ACK:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "no SETTINGS after the preface")
            self.expected_kind = None
        elif kind != frames.CONTINUATION or stream_id != block.stream_id:
            # 9113 6.2, 6.10: "A receiver MUST treat the receipt of any other type of frame or the
            # receipt of a frame on a different stream as a connection error of type
            # PROTOCOL_ERROR."
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "frame within a header block")

    def handle(self, kind: int, flags: int, stream_id: int, payload: bytes, now: float) -> None:
        """Handle any frame; `stream_id` is without its reserved bit (9113 4.1: ignored)."""
        handler = HANDLERS.get(kind)
        try:
            if handler is not None:
                handler(self, flags, stream_id, payload)
            elif kind == frames.DATA:
                self._on_data(flags, stream_id, payload, now)
            elif kind == frames.HEADERS:
                self._on_headers(flags, stream_id, payload, now)
            elif kind == frames.CONTINUATION:
                self._on_continuation(flags, payload, now)
            elif kind == frames.PUSH_PROMISE:
                # 9113 8.4: "A client cannot push. Thus, servers MUST treat the receipt of a
                # PUSH_PROMISE frame as a connection error of type PROTOCOL_ERROR."
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "PUSH_PROMISE from a client")
            else:
                # 9113 4.1, 5.5: "Implementations MUST ignore and discard frames of unknown types."
                self.floods.count()
        except StreamFault as fault:
            self._reset(stream_id, fault)

    def _reset(self, stream_id: int, fault: StreamFault) -> None:
        state = self.streams.state(stream_id)
        if state is not StreamState.FORGOTTEN:
            self.floods.count()
        if state is StreamState.IDLE or not stream_id & 1:
            # 9113 6.4: "RST_STREAM frames MUST NOT be sent for a stream in the idle state"; a
            # stream error may be treated as a connection error instead (9113 5.4.2).
            raise ConnectionFault(fault.code, str(fault)) from None
        if state is not StreamState.CLOSED_BY_US:
            self.streams.reset(stream_id, fault.code)

    # ---- DATA

    def _on_data(self, flags: int, stream_id: int, payload: bytes, now: float) -> None:
        """9113 6.1."""
        streams = self.streams
        if stream_id == 0:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "DATA on the connection")
        content = _strip_padding(flags, payload)
        if streams.obey(stream_id, frames.DATA) is not FrameScope.ACCEPT:
            return  # Sent before the peer knew our end: as much as the stream's window allows.
        stream = streams.open[stream_id]
        has_ended = bool(flags & frames.END_STREAM)
        if not content and not has_ended:
            self.floods.count(ANSWERED_COST)
        if stream.content_left is not None:
            stream.content_left -= len(content)
            _check_content_length(stream, has_ended=has_ended)
        handle_content(streams, stream, content, now=now)
        if has_ended:
            streams.end_request(stream)
        elif not stream.is_ended:
            # 9113 6.9.1: padding counts too.
            streams.count_data_of(stream, len(payload))

    # ---- HEADERS and CONTINUATION

    def _on_headers(self, flags: int, stream_id: int, payload: bytes, now: float) -> None:
        """9113 6.2."""
        # 9113 5.1.1: clients use odd identifiers; 0 is the connection.
        if not stream_id & 1:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "HEADERS on an even identifier")
        block = _strip_padding(flags, payload)
        if flags & frames.PRIORITY_FLAG:
            if len(block) < PRIORITY_BYTES:
                raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "no room for priority fields")
            if depends_on_itself(stream_id, block):
                flags |= _SELF_DEPENDENT
            block = block[PRIORITY_BYTES:]
        if flags & frames.END_HEADERS:
            self._on_block(flags, stream_id, block, now)
            return
        self._open_block = _OpenBlock(stream_id, flags, block)
        self.expected_kind = frames.CONTINUATION

    def _on_continuation(self, flags: int, payload: bytes, now: float) -> None:
        """9113 6.10, and CVE-2024-27316: a header block is bounded, in frames and in bytes."""
        open_block, limits = self._open_block, self.streams.limits
        if open_block is None:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "CONTINUATION without a header block")
        open_block.num_continuations += 1
        if open_block.num_continuations > limits.max_continuation_frames:
            raise ConnectionFault(
                ErrorCode.ENHANCE_YOUR_CALM, "too many CONTINUATION", Abuse.CONTINUATION_FLOOD
            )
        if len(open_block.block) + len(payload) <= limits.max_header_block_bytes:
            open_block.block += payload
        elif self.reader.is_stateless and open_block.stream_id > self.streams.last_id:
            open_block.is_too_large = True
        else:
            raise ConnectionFault(
                ErrorCode.ENHANCE_YOUR_CALM, "header block too large", Abuse.HEADER_BLOCK
            )
        if not flags & frames.END_HEADERS:
            return
        self._open_block = self.expected_kind = None
        if open_block.is_too_large:
            self.streams.counters.abuse[Abuse.HEADER_BLOCK] += 1
            self.refuse(open_block.stream_id, open_block.flags, TOO_LARGE)
        else:
            self._on_block(open_block.flags, open_block.stream_id, open_block.block, now)

    def _on_block(self, flags: int, stream_id: int, block: bytes, now: float) -> None:
        """Handle a whole header block: of a new request, or of trailers."""
        streams = self.streams
        if stream_id > streams.last_id:
            if flags & _SELF_DEPENDENT:
                self.reader.read_fields(block)
                streams.last_id = stream_id
                raise StreamFault(ErrorCode.PROTOCOL_ERROR, "stream depends on itself")
            self.open(stream_id, flags, block, now)
            return
        # 9113 4.3: every block passes the decoder, even one that is then discarded.
        scope, code = streams.verdict(stream_id, frames.HEADERS)
        if scope is FrameScope.CONNECTION_ERROR:
            raise ConnectionFault(code, "HEADERS on a closed stream")
        fields = self.reader.read_fields(block)
        if scope is FrameScope.STREAM_ERROR:
            raise StreamFault(code, "HEADERS on a half-closed stream")
        if scope is FrameScope.DISCARD:
            self.floods.count()
            return
        # 9113 8.1: a second header block is trailers, and ends the stream.
        malformed = judge_trailers(fields)
        if malformed or not flags & frames.END_STREAM:
            raise StreamFault(ErrorCode.PROTOCOL_ERROR, malformed or "HEADERS inside a request")
        stream = streams.open[stream_id]
        _check_content_length(stream, has_ended=True)
        streams.end_request(stream)


def _check_content_length(stream: WireStream, *, has_ended: bool) -> None:
    """9113 8.1.1: a content-length that does not equal the sum of the DATA is malformed."""
    left = stream.content_left
    if left is not None and (left < 0 or (has_ended and left)):
        raise StreamFault(ErrorCode.PROTOCOL_ERROR, "content-length does not match the content")


def _strip_padding(flags: int, payload: bytes) -> bytes:
    """9113 6.1, 6.2: padding as long as the payload is a connection error, PROTOCOL_ERROR."""
    if not flags & frames.PADDED:
        return payload
    if not payload:
        raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "no pad length")
    if payload[0] >= len(payload):
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "padding as long as the payload")
    return payload[1 : len(payload) - payload[0]]


def handle_content(streams: Streams, stream: WireStream, content: bytes, *, now: float) -> None:
    """Handle content of a stream: deliver complete messages, keep the rest, however the peer splits
    them (gRPC "Data Frames": "implementations should make no assumptions about their alignment").

    The most common frame, with exactly one message, is delivered by `Connection` itself.
    """
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
            stream.partial = grpc.Partial()
            streams.partial_since_s[stream.id] = now
        start = _grow(streams, stream, stream.partial, content, start)


def _grow(
    streams: Streams, stream: WireStream, partial: grpc.Partial, content: bytes, start: int
) -> int:
    """Extend an incomplete message; return the position after the part of `content` used."""
    is_announced = partial.missing_bytes >= 0
    if is_announced:
        part = content[start : start + partial.missing_bytes]
        partial.add(part)
    else:
        part = content[start : start + grpc.PREFIX_BYTES - len(partial.prefix)]
        partial.add_to_prefix(part)
    streams.budget.add(stream, len(part))
    if not is_announced:
        size = _announced_bytes(streams, stream, partial.prefix)
        if size:
            partial.announce(size - grpc.PREFIX_BYTES)
    if not partial.missing_bytes:
        message = partial.message()
        streams.forget_partial(stream)
        streams.budget.add(stream, -grpc.PREFIX_BYTES - len(message))
        streams.deliver(stream, message)
    return start + len(part)


def _announced_bytes(streams: Streams, stream: WireStream, prefix: bytes) -> int | None:
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
        streams.refuse(stream, size)
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
