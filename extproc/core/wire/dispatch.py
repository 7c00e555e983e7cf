"""Frames that are not the common ones: checks first, then the table, then what they ask.

Raises `ConnectionFault` for the connection; stream faults end here, in RST_STREAM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from extproc.core.wire import control, frames, grpc, messages
from extproc.core.wire.errors import ConnectionFault, ErrorCode, StreamFault
from extproc.core.wire.limits import Abuse
from extproc.core.wire.requests import Request, judge_trailers
from extproc.core.wire.states import Scope, State
from extproc.core.wire.stream import WireStream

if TYPE_CHECKING:
    from extproc.core.wire.connection import Connection

_PRIORITY_FIELDS_BYTES: Final = 5


@dataclass(slots=True)
class OpenBlock:
    """A header block whose END_HEADERS has not come (9113 4.3, 6.10)."""

    stream_id: int
    flags: int
    block: bytes
    num_continuations: int = 0


def check_expected(connection: Connection, kind: int, flags: int, stream_id: int) -> None:
    """Judge a frame where only one kind may come: the first of all, or within a header block."""
    block = connection.open_block
    if block is None:
        # 9113 3.4: the client's preface "MUST be followed by a SETTINGS frame".
        if kind != frames.SETTINGS or flags & frames.ACK:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "no SETTINGS behind the preface")
        connection.expected_kind = None
    elif kind != frames.CONTINUATION or stream_id != block.stream_id:
        # 9113 6.2, 6.10: "A receiver MUST treat the receipt of any other type of frame or the
        # receipt of a frame on a different stream as a connection error of type PROTOCOL_ERROR."
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "frame within a header block")


def handle(connection: Connection, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
    """Handle any frame. `stream_id` comes without its reserved bit (9113 4.1: ignored)."""
    try:
        if kind == frames.DATA:
            _on_data(connection, flags, stream_id, payload)
        elif kind == frames.HEADERS:
            _on_headers(connection, flags, stream_id, payload)
        elif kind == frames.CONTINUATION:
            _on_continuation(connection, flags, payload)
        elif kind == frames.RST_STREAM:
            control.on_rst_stream(connection, stream_id, payload)
        elif kind == frames.WINDOW_UPDATE:
            control.on_window_update(connection, stream_id, payload)
        elif kind == frames.SETTINGS:
            control.on_settings(connection, flags, stream_id, payload)
        elif kind == frames.PING:
            control.on_ping(connection, flags, stream_id, payload)
        elif kind == frames.PRIORITY:
            control.on_priority(connection, stream_id, payload)
        elif kind == frames.GOAWAY:
            control.on_goaway(stream_id, payload)
        elif kind == frames.PUSH_PROMISE:
            # 9113 8.4: "A client cannot push. Thus, servers MUST treat the receipt of a
            # PUSH_PROMISE frame as a connection error of type PROTOCOL_ERROR."
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "PUSH_PROMISE from a client")
        else:
            # 9113 4.1, 5.5: "Implementations MUST ignore and discard frames of unknown types."
            connection.floods.count(Abuse.OTHER_FRAME_FLOOD)
    except StreamFault as fault:
        connection.floods.count(Abuse.RAPID_RESET)
        state = connection.streams.state(stream_id)
        if state is State.IDLE or not stream_id & 1:
            # 9113 6.4: "RST_STREAM frames MUST NOT be sent for a stream in the idle state"; a
            # stream error may be treated as a connection error instead (9113 5.4.2).
            raise ConnectionFault(fault.code, str(fault)) from None
        if state is not State.CLOSED_BY_US:
            connection.streams.reset(stream_id, fault.code)


# ---- DATA


def _on_data(connection: Connection, flags: int, stream_id: int, payload: bytes) -> None:
    """9113 6.1."""
    if stream_id == 0:
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "DATA on the connection")
    content = _strip_padding(flags, payload)
    if connection.streams.obey(stream_id, frames.DATA) is not Scope.ACCEPT:
        connection.floods.count(Abuse.OTHER_FRAME_FLOOD)
        return
    stream = connection.streams.open[stream_id]
    has_ended = bool(flags & frames.END_STREAM)
    if not content and not has_ended:
        connection.floods.count(Abuse.EMPTY_FRAME_FLOOD)
    if stream.content_left is not None:
        stream.content_left -= len(content)
        _check_content_length(stream, has_ended=has_ended)
    messages.take_content(connection, stream, content)
    if has_ended:
        connection.streams.end_request(stream)
    elif not stream.is_ended:
        # 9113 6.9.1: padding counts too.
        connection.windows.take_for(stream, len(payload))


def _check_content_length(stream: WireStream, *, has_ended: bool) -> None:
    """9113 8.1.1: content-length that does not equal the sum of the DATA is malformed."""
    left = stream.content_left
    if left is not None and (left < 0 or (has_ended and left)):
        raise StreamFault(ErrorCode.PROTOCOL_ERROR, "content-length does not fit the content")


def _strip_padding(flags: int, payload: bytes) -> bytes:
    """9113 6.1, 6.2: padding as long as the payload is a connection error, PROTOCOL_ERROR."""
    if not flags & frames.PADDED:
        return payload
    if not payload:
        raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "no pad length")
    if payload[0] >= len(payload):
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "padding as long as the payload")
    return payload[1 : len(payload) - payload[0]]


# ---- HEADERS and CONTINUATION


def _on_headers(connection: Connection, flags: int, stream_id: int, payload: bytes) -> None:
    """9113 6.2."""
    # 9113 5.1.1: clients use odd identifiers; 0 is the connection.
    if not stream_id & 1:
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "HEADERS on an even identifier")
    block = _strip_padding(flags, payload)
    if flags & frames.PRIORITY_FLAG:
        if len(block) < _PRIORITY_FIELDS_BYTES:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "no room for priority fields")
        if control.depends_on_itself(stream_id, block):
            flags |= control.SELF_DEPENDENT
        block = block[_PRIORITY_FIELDS_BYTES:]
    if flags & frames.END_HEADERS:
        _on_block(connection, flags, stream_id, block)
        return
    connection.open_block = OpenBlock(stream_id, flags, block)
    connection.expected_kind = frames.CONTINUATION


def _on_continuation(connection: Connection, flags: int, payload: bytes) -> None:
    """9113 6.10, and CVE-2024-27316: a header block has an end, in frames and in bytes."""
    open_block = connection.open_block
    if open_block is None:
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "CONTINUATION without a header block")
    open_block.block += payload
    open_block.num_continuations += 1
    if open_block.num_continuations > connection.limits.max_continuation_frames:
        raise ConnectionFault(
            ErrorCode.ENHANCE_YOUR_CALM, "too many CONTINUATION", Abuse.CONTINUATION_FLOOD
        )
    if len(open_block.block) > connection.limits.max_header_block_bytes:
        raise ConnectionFault(
            ErrorCode.ENHANCE_YOUR_CALM, "header block too large", Abuse.HEADER_BLOCK
        )
    if flags & frames.END_HEADERS:
        connection.open_block = connection.expected_kind = None
        _on_block(connection, open_block.flags, open_block.stream_id, open_block.block)


def _on_block(connection: Connection, flags: int, stream_id: int, block: bytes) -> None:
    """A whole header block: of a new request, or of trailers."""
    streams = connection.streams
    if stream_id > streams.last_id:
        if flags & control.SELF_DEPENDENT:
            connection.reader.read_fields(block)
            streams.last_id = stream_id
            raise StreamFault(ErrorCode.PROTOCOL_ERROR, "stream depends on itself")
        connection.open_stream(stream_id, flags, block)
        return
    # 9113 4.3: every block passes the decoder, also one that is then discarded.
    scope, code = streams.verdict(stream_id, frames.HEADERS)
    if scope is Scope.CONNECTION_ERROR:
        raise ConnectionFault(code, "HEADERS on a closed stream")
    fields = connection.reader.read_fields(block)
    if scope is Scope.STREAM_ERROR:
        raise StreamFault(code, "HEADERS on a half-closed stream")
    if scope is Scope.DISCARD:
        connection.floods.count(Abuse.OTHER_FRAME_FLOOD)
        return
    # 9113 8.1: a second header block is trailers, and ends the stream.
    malformed = judge_trailers(fields)
    if malformed or not flags & frames.END_STREAM:
        raise StreamFault(ErrorCode.PROTOCOL_ERROR, malformed or "HEADERS inside a request")
    stream = streams.open[stream_id]
    _check_content_length(stream, has_ended=True)
    streams.end_request(stream)


def turn_down(connection: Connection, stream_id: int, flags: int, request: Request) -> bool:
    """Answer a request that no session gets; false where one should get it after all."""
    streams, counters = connection.streams, connection.counters
    drain = connection.lifetime
    if drain.is_final:
        # 9113 6.8: streams above the last one of GOAWAY are ignored; the peer knows.
        streams.closed.remember(stream_id, is_by_peer=False)
        return True
    if request.malformed or (flags & frames.END_STREAM and request.content_length):
        # 9113 8.1.1: "Malformed requests or responses that are detected MUST be treated as a
        # stream error of type PROTOCOL_ERROR."
        counters.streams_opened += 1
        counters.streams_reset_by_us += 1
        connection.floods.count(Abuse.RAPID_RESET)
        streams.reset(stream_id, ErrorCode.PROTOCOL_ERROR)
        return True
    if streams.is_full:
        # 9113 5.1.2: beyond the announced limit, PROTOCOL_ERROR or REFUSED_STREAM; the latter
        # says that nothing was done, so the peer may try elsewhere.
        counters.streams_refused += 1
        counters.abuse[_why_full(connection)] += 1
        streams.reset(stream_id, ErrorCode.REFUSED_STREAM)
        return True
    if request.http_status:
        _answer(connection, stream_id, flags, request, grpc.http_error_block(request.http_status))
        return True
    code, details = request.code, request.details
    if request.method is not None:
        if not (drain.is_draining and request.method.is_long_lived):
            return False
        code, details = grpc.UNAVAILABLE, "draining"
    block = grpc.RESPONSE_BLOCK + grpc.trailer_block(code, details)
    _answer(connection, stream_id, flags, request, block)
    return True


def _answer(
    connection: Connection, stream_id: int, flags: int, request: Request, block: bytes
) -> None:
    stream = WireStream(connection.streams, stream_id, request)
    stream.is_half_closed = bool(flags & frames.END_STREAM)
    stream.put_end(block)
    connection.counters.streams_opened += 1
    connection.counters.streams_answered += 1
    connection.streams.closed.remember(stream_id, is_by_peer=stream.is_half_closed)


def _why_full(connection: Connection) -> Abuse:
    if connection.budget.is_full:
        return Abuse.BUFFERED_BYTES
    return Abuse.TOO_MANY_STREAMS
