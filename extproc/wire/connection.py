"""One HTTP/2 connection, server side: bytes in, calls of sessions, bytes out.

`receive_pass` reads frames in place. Three kinds of frame make up nearly all traffic and are
handled inline. They are HEADERS that open a stream, DATA with exactly one message, and the late
RST_STREAM of an answered stream. Everything else, and every unusual case of these, goes through
`dispatch` and the table in `streamstates`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from extproc.wire import frames, grpc
from extproc.wire.budget import Budget
from extproc.wire.control import FloodMeter
from extproc.wire.dispatch import FrameHandler
from extproc.wire.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    FRAME_HEADER_BYTES,
    HEADERS,
    RST_STREAM,
    SETTINGS,
)
from extproc.wire.grpc import PREFIX_BYTES
from extproc.wire.headers import HeaderReader
from extproc.wire.lifetime import Lifetime, server_preface
from extproc.wire.limits import DEFAULT_LIMITS, ConnectionFault, Counters, ErrorCode, Limits
from extproc.wire.methods import judge_request
from extproc.wire.mismatches import Mismatch, is_tls
from extproc.wire.outbox import Outbox
from extproc.wire.rpc import Method
from extproc.wire.streams import Streams
from extproc.wire.streamstates import REMEMBERED

_ID_MASK: Final = 0x7FFFFFFF
_RING_MASK: Final = REMEMBERED - 1
_HEAD_BYTES: Final = grpc.MESSAGE_HEAD.size
_RESET_BYTES: Final = frames.U32.size

# A read of 256 KiB holds some dozens of Envoy's messages, or thousands of frames chosen to be
# expensive: 50 ms and more. A pass takes about 2 ms, then other connections have a turn.
_PASS_UNITS: Final = 64  # frames, and messages in them, of about 30 us each at most
_HEADER_BYTES_PER_UNIT: Final = 128  # of a compressed header block
_LIST_BYTES_PER_UNIT: Final = 1024  # of a header list; a byte of the block may be a field of it


class Connection:
    """The protocol of one connection.

    After each `receive_pass`, `tick`, `start_drain` and `on_output_ready`: write
    `data_to_send()`, then close the socket if `is_over`. When the socket is lost: `lose()`.

    Args:
        methods: The methods to serve, by path.
        now: Monotonic seconds.
        host: The peer's IP address; "" where unknown.
        limits: Bounds on the resources of the peer.
        counters: One per server.
        budget: Memory for the bodies of all connections; one per server.
        on_output_ready: Called once when there is output outside of a pass, until it is taken; none
            is needed where `data_to_send` is called after every step.
        on_session_error: Called with an exception of a session and its method's path; it is counted
            anyway.
    """

    def __init__(
        self,
        methods: Mapping[str, Method],
        *,
        now: float,
        host: str = "",
        limits: Limits = DEFAULT_LIMITS,
        counters: Counters | None = None,
        budget: Budget | None = None,
        on_output_ready: Callable[[], None] = lambda: None,
        on_session_error: Callable[[Exception, str], None] = lambda error, path: None,
    ) -> None:
        self.limits = limits
        self.host = host
        self.counters = counters if counters is not None else Counters()
        self.counters.connections_open += 1
        self.budget = budget if budget is not None else Budget()
        self.outbox = Outbox(on_output_ready, self.budget)
        streams = Streams(self.outbox, limits, self.counters, self.budget, on_session_error, host)
        reader = HeaderReader(lambda fields: judge_request(fields, methods), limits, self.counters)
        self.streams = streams
        self._floods = floods = FloodMeter(limits, self.outbox, now)
        self._lifetime = lifetime = Lifetime(streams, now)
        self._handler = FrameHandler(streams, reader, lifetime, floods)
        self.is_failed = self._is_lost = False
        self._unread = bytearray()
        self._preface_left = frames.PREFACE
        self.outbox.is_in_pass = True
        self.outbox.put(0, server_preface(limits))
        self.outbox.is_in_pass = False

    @property
    def is_over(self) -> bool:
        """Whether the connection has ended: write the pending output, then close the socket."""
        return self.is_failed or (self._lifetime.is_final and not self.streams.open)

    # ---- bytes in

    def receive_pass(self, data: bytes, position: int, *, now: float) -> int:
        """Handle a read from `position` on: all, or `_PASS_UNITS` of work.

        Returns:
            The position of the next pass; the length of `data` if nothing is left.
        """
        if self.is_failed:
            return len(data)
        self._lifetime.last_received_s = now
        if now >= self._floods.end_s:
            self._floods.restart(now)
        self.outbox.is_in_pass = True
        try:
            if self._preface_left:
                position = self._read_preface(data, position, now)
            if self._unread:
                position = self._complete_unread(data, position, now)
            position = self._read_frames(data, position, now)
        except ConnectionFault as fault:
            self._fail(fault)
            position = len(data)
        if self.budget.used_bytes > self.budget.max_bytes:
            self.budget.relieve()
        if self.streams.finished:
            self.streams.settle()
        self.outbox.is_in_pass = False
        return position

    def _read_preface(self, data: bytes, position: int, now: float) -> int:
        """9113 3.4: an invalid connection preface is a connection error, PROTOCOL_ERROR."""
        expected = self._preface_left[: len(data) - position]
        if not data.startswith(expected, position):
            if self._preface_left is frames.PREFACE and is_tls(data):
                self.counters.mismatches.note(Mismatch.TLS_TO_PLAINTEXT, self.host, now=now)
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "no HTTP/2 connection preface")
        self._preface_left = self._preface_left[len(expected) :]
        if not self._preface_left:
            self.counters.mismatches.spoke(self.host)
        return position + len(expected)

    def _complete_unread(self, data: bytes, position: int, now: float) -> int:
        """Finish the frame that the last read cut; return the position of the next one."""
        unread = self._unread
        start = min(len(data), position + max(0, frames.FRAME_HEADER_BYTES - len(unread)))
        unread += data[position:start]
        if len(unread) < frames.FRAME_HEADER_BYTES:
            return start
        length = frames.FRAME_HEADER.unpack_from(unread)[0] >> 8
        size = frames.FRAME_HEADER_BYTES + _checked(length)
        cut = min(len(data), start + size - len(unread))
        unread += memoryview(data)[start:cut]
        if len(unread) == size:
            whole = bytes(unread)
            unread.clear()
            self._read_frames(whole, 0, now)
        return cut

    def _read_frames(self, data: bytes, position: int, now: float) -> int:
        """Handle the whole frames from `position` on, and keep the last, incomplete one.

        Returns the position of the next pass, which is not the end if this one was full.
        """
        handler, streams = self._handler, self.streams
        reader = handler.reader
        streams_open, slots = streams.open, streams.closed.slots
        read_header, read_head = frames.FRAME_HEADER.unpack_from, grpc.MESSAGE_HEAD.unpack_from
        max_bytes, half_bytes = self.limits.max_message_bytes, self.limits.stream_window_bytes >> 1
        max_frame_bytes, budget = frames.DEFAULT_MAX_FRAME_BYTES, self.budget
        end, taken_bytes, units_left = len(data), 0, _PASS_UNITS
        while units_left > 0 and end - position >= FRAME_HEADER_BYTES:
            units_left -= 1
            if end - position < _HEAD_BYTES:
                word, flags, stream_id = read_header(data, position)
                compressed, size = 1, 0
            else:  # with what may be a message's prefix
                word, flags, stream_id, compressed, size = read_head(data, position)
            length, kind = word >> 8, word & 0xFF
            start = position + FRAME_HEADER_BYTES
            stop = start + length
            if length > max_frame_bytes:
                _checked(length)
            if stop > end:
                break
            position = stop
            if handler.expected_kind is not None:
                handler.check_expected(kind, flags, stream_id & _ID_MASK)
            if kind == DATA:
                # 9113 6.9: all DATA counts towards the connection window.
                taken_bytes += length
                stream = streams_open.get(stream_id)
                if stream is not None and stream.is_plain and not flags & ~END_STREAM:
                    partial = stream.partial
                    if partial is None:
                        is_whole = not compressed and size == length - PREFIX_BYTES
                        if is_whole and size <= max_bytes:
                            if flags:
                                stream.is_half_closed, stream.is_plain = True, False
                            try:
                                stream.session.receive(data[start + PREFIX_BYTES : stop])
                            except Exception as error:
                                streams.fail_session(stream, error)
                            if stream.is_ended:
                                continue
                            if flags:
                                streams.end_request(stream)
                                continue
                            stream.unacknowledged_bytes += length
                            if stream.unacknowledged_bytes >= half_bytes:
                                streams.count_data_of(stream, 0)
                            continue
                    elif 0 < length < partial.missing_bytes and not flags:
                        partial.add(data[start:stop])
                        budget.add(stream, length)
                        streams.count_data_of(stream, length)
                        continue
            elif kind == HEADERS:
                units_left -= length // _HEADER_BYTES_PER_UNIT
                if (
                    streams.last_id < stream_id <= _ID_MASK
                    and stream_id & 1
                    and flags & ~END_STREAM == END_HEADERS
                ):
                    before_bytes = reader.list_bytes
                    handler.open(stream_id, flags, data[start:stop], now)
                    units_left -= (reader.list_bytes - before_bytes) // _LIST_BYTES_PER_UNIT
                    continue
            elif kind == RST_STREAM and length == _RESET_BYTES:
                slot = (stream_id >> 1) & _RING_MASK
                if slots[slot] == stream_id << 1 and stream_id:
                    slots[slot] = stream_id << 1 | 1
                    self.outbox.drop_frames(stream_id)
                    continue
            before = streams.num_delivered
            handler.handle(kind, flags, stream_id & _ID_MASK, data[start:stop], now)
            units_left -= streams.num_delivered - before  # one frame may hold thousands
            if kind == SETTINGS:
                units_left = 0  # it may have changed the windows of all open streams
        if taken_bytes:
            streams.count_data(taken_bytes)
        if units_left <= 0:
            return position
        self._unread += data[position:]
        return end

    # ---- time and end

    def tick(self, *, now: float) -> None:
        """Enforce the time limits; to be called about once a second."""
        if self.is_failed:
            return
        self.outbox.is_in_pass = True
        self.streams.expire(now)
        try:
            self._lifetime.tick(now=now)
        except ConnectionFault as fault:
            self._fail(fault)
        self.streams.settle()
        self.outbox.is_in_pass = False

    def start_drain(self, *, now: float) -> None:
        """Ask the peer to reconnect elsewhere, without losing a call."""
        if not self.is_failed:
            self._lifetime.start_drain(now=now)

    def data_to_send(self) -> bytes:
        """Return all bytes to write now."""
        outbox = self.outbox
        outbox.is_in_pass = True
        if self.streams.finished:
            self.streams.settle()
        if outbox.queued_bytes > self.limits.max_queued_bytes:
            # More than needed, as this looks at all streams.
            self.streams.shed(self.limits.max_queued_bytes // 8 * 7)
            self.streams.settle()
        outbox.is_in_pass = False
        return outbox.take()

    def _fail(self, fault: ConnectionFault) -> None:
        """9113 5.4.1: GOAWAY with the last stream seen, then close."""
        if fault.abuse is not None:
            self.counters.abuse[fault.abuse] += 1
        self.counters.connection_faults += 1
        self.is_failed = True
        self.outbox.seal()
        self.outbox.put(0, frames.goaway(self.streams.last_id, fault.code, str(fault).encode()))
        self.streams.lose_all()
        self.streams.settle()

    def lose(self) -> None:
        """End every open call after the loss of the socket. Idempotent."""
        if not self._is_lost:
            self._is_lost = self.is_failed = True
            self.counters.connections_open -= 1
            self.streams.lose_all()
            self.streams.settle()


def _checked(length: int) -> int:
    """9113 4.2: "An endpoint MUST send an error code of FRAME_SIZE_ERROR if a frame exceeds the
    size defined in SETTINGS_MAX_FRAME_SIZE".
    """
    if length > frames.DEFAULT_MAX_FRAME_BYTES:
        raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "frame too large")
    return length
