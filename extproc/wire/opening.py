"""The start of a request: judged by its header block, then given to its method or refused."""

from __future__ import annotations

from dataclasses import dataclass

from extproc.wire import frames, grpc
from extproc.wire.control import ControlFrames
from extproc.wire.grpccall import WireStream
from extproc.wire.limits import Abuse, ErrorCode
from extproc.wire.methods import Request
from extproc.wire.rpc import Code


@dataclass(eq=False, slots=True)
class Opener(ControlFrames):
    """Opens the streams of one connection, beside its control frames."""

    def open(self, stream_id: int, flags: int, block: bytes, now: float) -> None:
        """Begin a request: a header block on a new highest identifier (9113 5.1.1)."""
        streams = self.streams
        counters = streams.counters
        request = self.reader.requests.get(block)
        if request is None:
            request = self.reader.read_request(block)
        else:
            counters.header_blocks_cached += 1
        streams.last_id = stream_id
        method = request.method
        if (
            method is None
            or self.lifetime.is_draining
            or streams.is_full()
            or request.content_length is not None
        ) and (self._refuse(stream_id, flags, request) or method is None):
            return
        stream = WireStream(streams, stream_id, request)
        streams.open[stream_id] = stream
        counters.streams_opened += 1
        counters.streams_open += 1
        if request.timeout_s is not None:
            streams.deadlines_s[stream_id] = now + request.timeout_s
        if flags & frames.END_STREAM:
            stream.is_half_closed, stream.is_plain = True, False
        try:
            stream.session = method.open(stream, request.metadata)
        except Exception as error:
            streams.fail_session(stream, error)
        if stream.is_half_closed:
            streams.end_request(stream)

    def refuse(self, stream_id: int, flags: int, request: Request) -> None:
        """Refuse a request whose header block was not read."""
        self.streams.last_id = stream_id
        self._refuse(stream_id, flags, request)

    def _refuse(self, stream_id: int, flags: int, request: Request) -> bool:
        """Refuse a request without a session; return False if it should have one after all."""
        streams, lifetime = self.streams, self.lifetime
        counters = streams.counters
        if lifetime.is_final:
            # 9113 6.8: streams above the last one of GOAWAY are ignored; the peer knows.
            streams.closed.remember(stream_id, is_by_peer=False)
            return True
        if request.malformed or (flags & frames.END_STREAM and request.content_length):
            # 9113 8.1.1: "Malformed requests or responses that are detected MUST be treated as a
            # stream error of type PROTOCOL_ERROR."
            counters.streams_opened += 1
            counters.streams_reset_by_us += 1
            self.floods.count()
            streams.reset(stream_id, ErrorCode.PROTOCOL_ERROR)
            return True
        if streams.is_full():
            # 9113 5.1.2: beyond the announced limit, PROTOCOL_ERROR or REFUSED_STREAM; after the
            # latter the peer may retry elsewhere.
            counters.streams_refused += 1
            is_short = streams.budget.unsent_bytes >= streams.budget.max_bytes
            counters.abuse[Abuse.BUFFERED_BYTES if is_short else Abuse.TOO_MANY_STREAMS] += 1
            streams.reset(stream_id, ErrorCode.REFUSED_STREAM)
            return True
        if request.http_status:
            # Below gRPC: an HTTP status alone.
            status = grpc.literal(b":status", b"%d" % request.http_status)
            self._respond(stream_id, flags, request, status)
            return True
        code, details = request.code, request.details
        if request.method is not None:
            if not (lifetime.is_draining and request.method.is_long_lived):
                return False
            code, details = Code.UNAVAILABLE, "draining"
        block = grpc.RESPONSE_BLOCK + grpc.trailer_block(code, details)
        self._respond(stream_id, flags, request, block)
        return True

    def _respond(self, stream_id: int, flags: int, request: Request, block: bytes) -> None:
        stream = WireStream(self.streams, stream_id, request)
        stream.is_half_closed = bool(flags & frames.END_STREAM)
        stream.put_end(block)
        self.streams.counters.streams_opened += 1
        self.streams.counters.streams_answered += 1
        self.streams.closed.remember(stream_id, is_by_peer=stream.is_half_closed)
