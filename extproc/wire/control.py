"""Frames that control a connection or a window: SETTINGS, PING, GOAWAY, WINDOW_UPDATE, PRIORITY.

None of them reaches a session. Each kind is counted per window of time, because each costs us
something and the peer nearly nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from extproc.wire import frames
from extproc.wire.headers import HeaderReader
from extproc.wire.lifetime import Lifetime
from extproc.wire.limits import Abuse, ConnectionFault, ErrorCode, Limits, StreamFault
from extproc.wire.outbox import Outbox
from extproc.wire.streams import Streams
from extproc.wire.streamstates import FrameScope

_PING_BYTES: Final = 8
PRIORITY_BYTES: Final = 5
SETTINGS_COST = 200
"""One costs a response (CVE-2019-9515), and a look at the windows of streams."""
ANSWERED_COST = 2
"""PING (CVE-2019-9512), DATA without content (CVE-2019-9518) and WINDOW_UPDATE."""
UPDATES_PER_DATA_FRAME = 10
"""WINDOW_UPDATEs that cost nothing, for each DATA frame that we sent: one for the stream and one
for the connection is common, some clients send smaller steps."""


class FloodMeter:
    """Counts what one connection has spent of `max_control_frames` in `flood_window_s`: the budget
    for frames that carry no request, which cost us more than the peer.
    """

    __slots__ = ("_limit", "_num_sent", "_num_updates", "_outbox", "_spent", "_window_s", "end_s")

    def __init__(self, limits: Limits, outbox: Outbox, now: float) -> None:
        self._limit, self._window_s = limits.max_control_frames, limits.flood_window_s
        self._outbox = outbox
        self._spent = self._num_updates = self._num_sent = 0
        # The end of the window; checked by `Connection` before each read.
        self.end_s = now + limits.flood_window_s

    def restart(self, now: float) -> None:
        """Begin a new window of time."""
        self.end_s = now + self._window_s
        self._spent = self._num_updates = 0
        self._num_sent = self._outbox.data_frames

    def count(self, cost: int = 1) -> None:
        """Count a frame.

        Raises:
            ConnectionFault: Too many.
        """
        self._spent += cost
        if self._spent > self._limit:
            abuse = Abuse.FRAME_FLOOD
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, abuse, abuse)

    def count_update(self) -> None:
        """Count a WINDOW_UPDATE; raise as `count` does."""
        self._num_updates += 1
        num_sent = self._outbox.data_frames - self._num_sent
        if self._num_updates > UPDATES_PER_DATA_FRAME * num_sent:
            self.count(ANSWERED_COST)


# Number of open streams with changed windows for which SETTINGS counts once more.
_STREAMS_PER_COUNT: Final = 4096


@dataclass(eq=False, slots=True)
class ControlFrames:
    """Handles the control frames of one connection."""

    streams: Streams
    reader: HeaderReader
    lifetime: Lifetime
    floods: FloodMeter

    def on_settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        """9113 6.5."""
        # 9113 6.5: stream identifier not 0: PROTOCOL_ERROR.
        if stream_id:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "SETTINGS on a stream")
        # 9113 6.5: ACK with a payload, or a length not a multiple of 6: FRAME_SIZE_ERROR.
        if len(payload) % frames.SETTING.size or (flags & frames.ACK and payload):
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "length of SETTINGS")
        if flags & frames.ACK:
            # 9113 4.3.1, 6.5.3: only now does our table size bind the peer's encoder.
            self.reader.forbid_table()
            self.lifetime.on_settings_acknowledged()
            return
        self.floods.count(SETTINGS_COST)
        # 9113 6.5.3: "The values in the SETTINGS frame MUST be processed in the order they appear".
        windows_bytes = []
        for name, value in frames.SETTING.iter_unpack(payload):
            if name == frames.INITIAL_WINDOW_SIZE:
                # 9113 6.5.2: "Values above the maximum flow-control window size of 2^31-1".
                if value > frames.LARGEST_WINDOW_BYTES:
                    raise ConnectionFault(
                        ErrorCode.FLOW_CONTROL_ERROR, "INITIAL_WINDOW_SIZE above 2^31-1"
                    )
                windows_bytes.append(value)
            else:
                self._apply(name, value)
        if windows_bytes:
            # Updating thousands of streams counts as several frames.
            num_streams = len(self.streams.open)
            self.floods.count(SETTINGS_COST * (num_streams // _STREAMS_PER_COUNT))
            self._resize_windows(max(windows_bytes), windows_bytes[-1])
        # 9113 6.5.3: "MUST immediately emit a SETTINGS frame with the ACK flag set": frames under
        # the old values go before it, frames under the new ones after it.
        self.streams.outbox.seal()
        self.streams.outbox.put(0, frames.SETTINGS_ACK)
        self.streams.outbox.pump()

    def _apply(self, name: int, value: int) -> None:
        """9113 6.5.2: a receiver of "any unknown or unsupported identifier MUST ignore" it."""
        if name == frames.MAX_FRAME_SIZE:
            if not frames.DEFAULT_MAX_FRAME_BYTES <= value <= frames.LARGEST_MAX_FRAME_BYTES:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "MAX_FRAME_SIZE out of range")
            # Small frames let streams take turns; larger ones would save nothing here.
            self.streams.outbox.max_frame_bytes = min(value, frames.DEFAULT_MAX_FRAME_BYTES)
        elif name == frames.ENABLE_PUSH and value > 1:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "ENABLE_PUSH is neither 0 nor 1")

    def _resize_windows(self, largest_bytes: int, initial_bytes: int) -> None:
        """9113 6.9.2: adjust all stream windows by the difference; they may become negative.

        Once per frame, for all its values: a frame may have thousands, a connection thousands of
        streams. Only the largest value can exceed a window's maximum.
        """
        outbox = self.streams.outbox
        before_bytes = outbox.initial_window_bytes
        outbox.initial_window_bytes = initial_bytes
        room_bytes = frames.LARGEST_WINDOW_BYTES - (largest_bytes - before_bytes)
        for stream in self.streams.open.values():
            if stream.window_bytes > room_bytes:
                raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "stream window above 2^31-1")
            outbox.add_stream_window(stream, initial_bytes - before_bytes)

    def on_ping(self, flags: int, stream_id: int, payload: bytes) -> None:
        """9113 6.7."""
        if stream_id:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "PING on a stream")
        if len(payload) != _PING_BYTES:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "length of PING")
        if flags & frames.ACK:
            # 9113 6.7: "An endpoint MUST NOT respond to PING frames containing this flag."
            self.lifetime.on_ping_acknowledged(payload)
            return
        self.floods.count(ANSWERED_COST)
        self.streams.outbox.put(0, frames.ping(payload, is_ack=True))

    def on_window_update(self, _flags: int, stream_id: int, payload: bytes) -> None:
        """9113 6.9."""
        if len(payload) != frames.U32.size:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "length of WINDOW_UPDATE")
        self.floods.count_update()
        increment = frames.U32.unpack(payload)[0] & frames.LARGEST_STREAM_ID
        if stream_id == 0:
            # 9113 6.9: an increment of 0 on the connection is a connection error.
            if not increment:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE of 0")
            self.streams.outbox.add_window(increment)
            return
        stream = self.streams.open.get(stream_id)
        if stream is None:
            self.streams.obey(stream_id, frames.WINDOW_UPDATE)
            return
        # 9113 6.9: "MUST treat the receipt of a WINDOW_UPDATE frame with a flow-control window
        # increment of 0 as a stream error of type PROTOCOL_ERROR".
        if not increment:
            raise StreamFault(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE of 0")
        # 9113 6.9.1: a stream window above 2^31-1 is a stream error of type FLOW_CONTROL_ERROR.
        if not self.streams.outbox.add_stream_window(stream, increment):
            raise StreamFault(ErrorCode.FLOW_CONTROL_ERROR, "stream window above 2^31-1")
        self.streams.outbox.pump()

    def on_rst_stream(self, _flags: int, stream_id: int, payload: bytes) -> None:
        """9113 6.4."""
        streams = self.streams
        if stream_id == 0:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "RST_STREAM on the connection")
        if len(payload) != frames.U32.size:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "length of RST_STREAM")
        scope = streams.obey(stream_id, frames.RST_STREAM)
        if scope is FrameScope.ACCEPT:
            # CVE-2023-44487: however often, as clients of a proxy cause them and others share its
            # connection. It leaves nothing behind, and costs less than an answer.
            streams.on_reset_by_peer(streams.open[stream_id])
        elif streams.closed.age(stream_id):
            # Answered in the same read: the response is not written yet.
            self.streams.outbox.drop_frames(stream_id)
        elif not streams.may_be_late():
            self.floods.count()

    def on_priority(self, _flags: int, stream_id: int, payload: bytes) -> None:
        """9113 5.3.2 deprecates the scheme; 6.3 keeps its checks, and 7540 5.3.1 its own."""
        if stream_id == 0:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "PRIORITY on the connection")
        self.floods.count()
        # 9113 6.3: "A PRIORITY frame with a length other than 5 octets MUST be treated as a stream
        # error of type FRAME_SIZE_ERROR."
        if len(payload) != PRIORITY_BYTES:
            raise StreamFault(ErrorCode.FRAME_SIZE_ERROR, "length of PRIORITY")
        if depends_on_itself(stream_id, payload):
            raise StreamFault(ErrorCode.PROTOCOL_ERROR, "stream depends on itself")

    def on_goaway(self, _flags: int, stream_id: int, payload: bytes) -> None:
        """9113 6.8: the peer opens no new streams; there is nothing to do."""
        if stream_id:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "GOAWAY on a stream")
        if len(payload) < 8:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "length of GOAWAY")


HANDLERS: Final = {
    frames.SETTINGS: ControlFrames.on_settings,
    frames.PING: ControlFrames.on_ping,
    frames.WINDOW_UPDATE: ControlFrames.on_window_update,
    frames.RST_STREAM: ControlFrames.on_rst_stream,
    frames.PRIORITY: ControlFrames.on_priority,
    frames.GOAWAY: ControlFrames.on_goaway,
}
"""Of each type of these frames: given its flags, its stream and its payload."""


def depends_on_itself(stream_id: int, fields: bytes) -> bool:
    """7540 5.3.1: "A stream cannot depend on itself", a stream error of type PROTOCOL_ERROR."""
    return bool(frames.U32.unpack_from(fields)[0] & frames.LARGEST_STREAM_ID == stream_id)
