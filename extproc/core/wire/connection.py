"""One HTTP/2 connection, server side: bytes in, sessions called, bytes out.

`receive_pass` reads frame by frame in place. Three kinds of frame make up nearly all traffic and
are handled where they are found: a HEADERS frame that opens a stream, a DATA frame that holds
exactly one message, the late RST_STREAM of a stream that we have answered. Everything else, and
everything odd about these, goes through `dispatch` and the table in `states`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from extproc.core.budget import Budget
from extproc.core.wire import dispatch, frames, grpc
from extproc.core.wire.errors import ConnectionFault, ErrorCode
from extproc.core.wire.floods import FloodMeter
from extproc.core.wire.flow import GivenWindows
from extproc.core.wire.headers import HeaderReader
from extproc.core.wire.lifetime import Lifetime
from extproc.core.wire.limits import DEFAULT_LIMITS, Abuse, Counters, Limits
from extproc.core.wire.outbox import Outbox
from extproc.core.wire.requests import judge_request
from extproc.core.wire.service import MethodLike
from extproc.core.wire.states import REMEMBERED
from extproc.core.wire.stream import WireStream
from extproc.core.wire.streams import Streams

_ID_MASK: Final = 0x7FFFFFFF
_RING_MASK: Final = REMEMBERED - 1

# A read of 256 KiB holds some dozens of Envoy's messages, or thousands of frames that somebody
# chose for their cost: 50 ms and more. A pass takes about 2 ms, then other connections have a turn.
_PASS_UNITS: Final = 64  # frames, of about 30 us each at most
_HEADER_BYTES_PER_UNIT: Final = 128  # of a compressed header block, which may hold a field a byte


def _nothing() -> None:
    """Nobody flushes late output: whoever drives the connection asks after every step."""


def _ignore(error: Exception, path: str) -> None:
    """Nobody logs what sessions raise; it is counted."""


class Connection:
    """The protocol of one connection; owned by whoever owns its socket.

    After each `receive_pass` (or `receive`), `tick`, `start_drain` and `on_output_ready`: write
    `data_to_send()`, then close the socket if `is_over`. When the socket is gone: `lose()`.

    Args:
        methods: What is served, by path.
        now: Monotonic seconds.
        limits: What the peer may make us keep or do.
        counters: Where it is counted; one per server.
        budget: What all connections together may hold of bodies; one per server.
        on_output_ready: Called once when there is output outside of a pass, until it is taken.
        on_session_error: Called with what a session raised and its method's path.
    """

    def __init__(
        self,
        methods: Mapping[str, MethodLike],
        *,
        now: float,
        limits: Limits = DEFAULT_LIMITS,
        counters: Counters | None = None,
        budget: Budget | None = None,
        on_output_ready: Callable[[], None] = _nothing,
        on_session_error: Callable[[Exception, str], None] = _ignore,
    ) -> None:
        self.limits = limits
        self.counters = counters if counters is not None else Counters()
        self.counters.connections_opened += 1
        self.counters.connections_open += 1
        self.now_s = now
        self.budget = budget if budget is not None else Budget()
        self.outbox = Outbox(on_output_ready, self.budget)
        self.reader = HeaderReader(
            lambda fields: judge_request(fields, methods), limits, self.counters
        )
        self.streams = Streams(self.outbox, limits, self.counters, self.budget, on_session_error)
        self.windows = GivenWindows(limits, self.streams)
        self.floods = FloodMeter(limits, self.outbox, now)
        self.lifetime = Lifetime(now)
        # The only frame type allowed next: SETTINGS first, CONTINUATION within a header block.
        self.expected_kind: int | None = frames.SETTINGS
        self.open_block: dispatch.OpenBlock | None = None
        self.is_failed = False
        self._is_lost = False
        self._unread = bytearray()
        self._preface_left = frames.PREFACE
        self._put_preface()

    def _put_preface(self) -> None:
        """9113 3.4: "The server connection preface consists of a potentially empty SETTINGS"."""
        limits, outbox = self.limits, self.outbox
        outbox.is_in_pass = True
        values = {
            frames.HEADER_TABLE_SIZE: 0,
            frames.MAX_CONCURRENT_STREAMS: limits.max_streams_per_connection,
            frames.INITIAL_WINDOW_SIZE: limits.stream_window_bytes,
            frames.MAX_HEADER_LIST_SIZE: limits.max_header_list_bytes,
        }
        outbox.put(0, frames.settings(values))
        increment = limits.connection_window_bytes - frames.DEFAULT_WINDOW_BYTES
        if increment > 0:
            outbox.put(0, frames.window_update(0, increment))
        outbox.is_in_pass = False

    @property
    def is_over(self) -> bool:
        """Nothing more will come or go: write what is there, then close the socket."""
        return self.is_failed or (self.lifetime.is_final and not self.streams.open)

    # ---- bytes in

    def receive(self, data: bytes, *, now: float) -> None:
        """Handle everything that a read brought, in as many passes as it takes."""
        position = 0
        while position < len(data):
            position = self.receive_pass(data, position, now=now)

    def receive_pass(self, data: bytes, position: int, *, now: float) -> int:
        """Handle what a read brought, from `position` on: all, or `_PASS_UNITS` of work.

        Raises nothing, whatever it is.

        Returns:
            Where the next pass goes on; the length of `data` when nothing is left.
        """
        if self.is_failed:
            return len(data)
        self.now_s = now
        self.lifetime.last_received_s = now
        if now >= self.floods.end_s:
            self.floods.restart(now)
        self.outbox.is_in_pass = True
        try:
            if self._preface_left:
                position = self._read_preface(data, position)
            if self._unread:
                position = self._complete_unread(data, position)
            position = self._read_frames(data, position)
        except ConnectionFault as fault:
            self.fail(fault)
            position = len(data)
        if self.budget.is_exceeded:
            self.budget.relieve()
        self.streams.settle()
        self.outbox.is_in_pass = False
        return position

    def _read_preface(self, data: bytes, position: int) -> int:
        """9113 3.4: an invalid connection preface is a connection error, PROTOCOL_ERROR."""
        expected = self._preface_left[: len(data) - position]
        if not data.startswith(expected, position):
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "no HTTP/2 connection preface")
        self._preface_left = self._preface_left[len(expected) :]
        return position + len(expected)

    def _complete_unread(self, data: bytes, position: int) -> int:
        """Finish the frame that the last read cut; return where the next one begins."""
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
            self._read_frames(whole, 0)
        return cut

    def _read_frames(self, data: bytes, position: int) -> int:
        """Handle the whole frames from `position` on, and keep the one that is cut.

        Returns where the next pass goes on; it had enough to do when that is not the end.
        """
        streams, slots = self.streams, self.streams.closed.slots
        streams_open = streams.open
        read_header, read_u32 = frames.FRAME_HEADER.unpack_from, frames.U32.unpack_from
        quick_bytes = self.limits.max_message_bytes + grpc.PREFIX_BYTES
        end, taken_bytes, units_left = len(data), 0, _PASS_UNITS
        while units_left > 0 and end - position >= frames.FRAME_HEADER_BYTES:
            units_left -= 1
            word, flags, stream_id = read_header(data, position)
            length, kind = word >> 8, word & 0xFF
            start = position + frames.FRAME_HEADER_BYTES
            stop = start + length
            if length > frames.DEFAULT_MAX_FRAME_BYTES:
                _checked(length)
            if stop > end:
                break
            position = stop
            if self.expected_kind is not None:
                dispatch.check_expected(self, kind, flags, stream_id & _ID_MASK)
            if kind == frames.DATA:
                # 9113 6.9: DATA counts towards the connection window whatever becomes of it.
                taken_bytes += length
                stream = streams_open.get(stream_id)
                if (
                    stream is not None
                    and stream.is_plain
                    and stream.partial is None
                    and not flags & frames.PADDED
                    and grpc.PREFIX_BYTES <= length <= quick_bytes
                    and not data[start]
                    and read_u32(data, start + 1)[0] == length - grpc.PREFIX_BYTES
                ):
                    if flags & frames.END_STREAM:
                        stream.is_half_closed, stream.is_plain = True, False
                    try:
                        stream.session.receive(data[start + grpc.PREFIX_BYTES : stop])
                    except Exception as error:
                        streams.fail_session(stream, error)
                    if not stream.is_ended:
                        if stream.is_half_closed:
                            streams.end_request(stream)
                        else:
                            self.windows.take_for(stream, length)
                    continue
            elif kind == frames.HEADERS:
                units_left -= length // _HEADER_BYTES_PER_UNIT
                if (
                    streams.last_id < stream_id <= _ID_MASK
                    and stream_id & 1
                    and flags & ~frames.END_STREAM == frames.END_HEADERS
                ):
                    self.open_stream(stream_id, flags, data[start:stop])
                    continue
            elif kind == frames.RST_STREAM and length == frames.U32.size:
                slot = (stream_id >> 1) & _RING_MASK
                if slots[slot] == stream_id << 1 and stream_id:
                    slots[slot] = stream_id << 1 | 1
                    self.outbox.drop_frames(stream_id)
                    continue
            dispatch.handle(self, kind, flags, stream_id & _ID_MASK, data[start:stop])
            if kind == frames.SETTINGS:
                units_left = 0  # it may have moved the windows of all open streams
        self.windows.take(taken_bytes)
        if units_left <= 0:
            return position
        self._unread += data[position:]
        return end

    def open_stream(self, stream_id: int, flags: int, block: bytes) -> None:
        """Begin a request: a header block on an identifier above all before (9113 5.1.1)."""
        counters, streams = self.counters, self.streams
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
            or streams.is_full
            or request.content_length is not None
        ) and (dispatch.turn_down(self, stream_id, flags, request) or method is None):
            return
        stream = WireStream(streams, stream_id, request)
        streams.open[stream_id] = stream
        counters.streams_opened += 1
        counters.streams_open += 1
        if request.timeout_s is not None:
            streams.deadlines_s[stream_id] = self.now_s + request.timeout_s
        if flags & frames.END_STREAM:
            stream.is_half_closed, stream.is_plain = True, False
        try:
            stream.session = method.open(stream, request.metadata)
        except Exception as error:
            streams.fail_session(stream, error)
        if stream.is_half_closed:
            streams.end_request(stream)

    # ---- time and end

    def tick(self, *, now: float) -> None:
        """Look what has taken too long; to be called about once a second."""
        if self.is_failed:
            return
        self.now_s = now
        self.outbox.is_in_pass = True
        self.streams.expire(now)
        try:
            self.lifetime.tick(self)
        except ConnectionFault as fault:
            self.fail(fault)
        self.streams.settle()
        self.outbox.is_in_pass = False

    def start_drain(self, *, now: float) -> None:
        """Let the peer go elsewhere, without losing a call."""
        self.now_s = now
        if not self.is_failed:
            self.lifetime.start_drain(self)

    def pause_sending(self) -> None:
        """The socket takes no more; what is queued waits, reading goes on."""
        self.outbox.pause()

    def resume_sending(self) -> None:
        """The socket has room again."""
        self.outbox.resume()

    def data_to_send(self) -> bytes:
        """Take everything that may be written now."""
        outbox = self.outbox
        outbox.is_in_pass = True
        self.streams.settle()
        if outbox.queued_bytes > self.limits.max_queued_bytes:
            self.fail(
                ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "slow reader", Abuse.SLOW_READER)
            )
        outbox.is_in_pass = False
        return outbox.take()

    def fail(self, fault: ConnectionFault) -> None:
        """9113 5.4.1: GOAWAY with the last stream that we have seen, then close."""
        if fault.abuse is not None:
            self.counters.abuse[fault.abuse] += 1
        self.counters.connection_faults += 1
        self.is_failed = True
        self.outbox.seal()
        self.outbox.put(0, frames.goaway(self.streams.last_id, fault.code, str(fault).encode()))
        self.streams.lose_all()
        self.streams.settle()

    def lose(self) -> None:
        """The socket is gone: every open call is over. Harmless when called again."""
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
