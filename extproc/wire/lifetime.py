"""Handshake, keepalive and end of a connection: everything about it that depends on time.

Drain (9113 6.8, and gRPC "GOAWAY Frame"): a GOAWAY with the highest identifier announces the end. A
PING shows when the peer has read it, and only then a second GOAWAY names the last stream. Streams
that the peer opens in between are served.
"""

from __future__ import annotations

from typing import Final

from extproc.wire import frames
from extproc.wire.limits import Abuse, ConnectionFault, ErrorCode, Limits
from extproc.wire.rpc import Code
from extproc.wire.streams import Streams

_KEEPALIVE_PING: Final = b"extproc\x00"
_DRAIN_PING: Final = b"extproc\x01"


def server_preface(limits: Limits) -> bytes:
    """9113 3.4: "The server connection preface consists of a potentially empty SETTINGS"."""
    values = {
        frames.HEADER_TABLE_SIZE: 0,
        frames.MAX_CONCURRENT_STREAMS: limits.max_streams_per_connection,
        frames.INITIAL_WINDOW_SIZE: limits.stream_window_bytes,
        frames.MAX_HEADER_LIST_SIZE: limits.max_header_list_bytes,
    }
    preface = frames.settings(values)
    increment = limits.connection_window_bytes - frames.DEFAULT_WINDOW_BYTES
    if increment > 0:
        preface += frames.window_update(0, increment)
    return preface


class Lifetime:
    """The time limits of one connection.

    Attributes:
        last_received_s: Time of the peer's last bytes.
        is_draining: The first GOAWAY is sent.
        is_final: The last GOAWAY is sent; new streams are ignored.
    """

    __slots__ = (
        *("_data_frames", "_drain_since_s", "_idle_since_s", "_keepalive_since_s", "_last_id"),
        *("_opened_s", "_settings_acknowledged", "_stalled_since_s", "_streams", "is_draining"),
        *("is_final", "last_received_s"),
    )

    def __init__(self, streams: Streams, now: float) -> None:
        self._streams = streams
        self.last_received_s = now
        self.is_draining = False
        self.is_final = False
        self._drain_since_s = now
        self._opened_s = now
        self._settings_acknowledged = False
        self._keepalive_since_s: float | None = None
        self._idle_since_s = now
        self._stalled_since_s = now
        self._data_frames = 0
        self._last_id = 0

    def on_settings_acknowledged(self) -> None:
        """Complete the handshake."""
        self._settings_acknowledged = True

    def on_ping_acknowledged(self, opaque: bytes) -> None:
        """Handle the acknowledgement of one of our PINGs; ignore any other."""
        if opaque == _DRAIN_PING:
            self._finish_drain()
        elif opaque == _KEEPALIVE_PING:
            self._keepalive_since_s = None

    def start_drain(self, *, now: float) -> None:
        """Announce the end; end streams that outlive requests, so that the peer reopens them."""
        if self.is_draining:
            return
        self.is_draining = True
        self._drain_since_s = now
        outbox = self._streams.outbox
        outbox.put(0, frames.goaway(frames.LARGEST_STREAM_ID, ErrorCode.NO_ERROR))
        outbox.put(0, frames.ping(_DRAIN_PING))
        for stream in list(self._streams.open.values()):
            if stream.method is not None and stream.method.is_long_lived:
                stream.end(Code.UNAVAILABLE, "draining")

    def _finish_drain(self) -> None:
        """Name the last stream."""
        if self.is_draining and not self.is_final:
            self.is_final = True
            goaway = frames.goaway(self._streams.last_id, ErrorCode.NO_ERROR)
            self._streams.outbox.put(0, goaway)

    def tick(self, *, now: float) -> None:
        """Enforce the time limits.

        Raises:
            ConnectionFault: The connection exceeds one.
        """
        limits = self._streams.limits
        if not self._settings_acknowledged:
            # 9113 6.5.3: no acknowledgement "within a reasonable amount of time": SETTINGS_TIMEOUT.
            if now - self._opened_s > limits.handshake_timeout_s:
                raise ConnectionFault(
                    ErrorCode.SETTINGS_TIMEOUT, "handshake", Abuse.HANDSHAKE_TIMEOUT
                )
            return
        self._tick_keepalive(now)
        self._tick_idle(now)
        self._tick_queue(now)
        if self.is_draining and now - self._drain_since_s > limits.keepalive_timeout_s:
            self._finish_drain()

    def _tick_keepalive(self, now: float) -> None:
        limits, since = self._streams.limits, self._keepalive_since_s
        if since is None or self.last_received_s > since:
            # Any byte is a sign of life, even if the PING itself is still queued.
            self._keepalive_since_s = None
            if now - self.last_received_s > limits.keepalive_s:
                self._keepalive_since_s = now
                self._streams.outbox.put(0, frames.ping(_KEEPALIVE_PING))
        elif now - since > limits.keepalive_timeout_s:
            raise ConnectionFault(ErrorCode.NO_ERROR, "peer is silent", Abuse.HALF_OPEN)

    def _tick_idle(self, now: float) -> None:
        streams = self._streams
        if streams.open or streams.last_id != self._last_id:
            self._last_id = streams.last_id
            self._idle_since_s = now
        elif now - self._idle_since_s > streams.limits.idle_timeout_s and not self.is_draining:
            streams.counters.abuse[Abuse.IDLE] += 1
            self.start_drain(now=now)

    def _tick_queue(self, now: float) -> None:
        outbox = self._streams.outbox
        if not outbox.queued_bytes or outbox.data_frames != self._data_frames:
            self._data_frames = outbox.data_frames
            self._stalled_since_s = now
        elif now - self._stalled_since_s > self._streams.limits.stall_timeout_s:
            if outbox.window_bytes > 0:
                # The peer reads, but not these streams.
                self._streams.shed(0)
                return
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "slow reader", Abuse.SLOW_READER)
