"""Beginning, silence and end of a connection: everything about it that time decides.

Drain (9113 6.8, and gRPC "GOAWAY Frame"): GOAWAY with the highest identifier says that an end is
near, PING measures that the peer has read it, and only then GOAWAY names the last stream that
counts. Streams that the peer opens in between are served.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from extproc.core.wire import frames, grpc
from extproc.core.wire.errors import ConnectionFault, ErrorCode
from extproc.core.wire.limits import Abuse

if TYPE_CHECKING:
    from extproc.core.wire.connection import Connection

_KEEPALIVE_PING: Final = b"extproc\x00"
_DRAIN_PING: Final = b"extproc\x01"


class Lifetime:
    """Clock of one connection.

    Attributes:
        last_received_s: When the peer last said anything.
        is_draining: The first GOAWAY is out.
        is_final: The last GOAWAY is out; new streams are ignored.
    """

    __slots__ = (
        "_data_frames",
        "_idle_since_s",
        "_keepalive_since_s",
        "_last_id",
        "_opened_s",
        "_settings_acknowledged",
        "_stalled_since_s",
        "drain_since_s",
        "is_draining",
        "is_final",
        "last_received_s",
    )

    def __init__(self, now: float) -> None:
        self.last_received_s = now
        self.is_draining = False
        self.is_final = False
        self.drain_since_s = now
        self._opened_s = now
        self._settings_acknowledged = False
        self._keepalive_since_s: float | None = None
        self._idle_since_s = now
        self._stalled_since_s = now
        self._data_frames = 0
        self._last_id = 0

    def on_settings_acknowledged(self) -> None:
        """The handshake is complete."""
        self._settings_acknowledged = True

    def on_ping_acknowledged(self, connection: Connection, opaque: bytes) -> None:
        """One of our PINGs came back; others are nobody's."""
        if opaque == _DRAIN_PING:
            self.finish_drain(connection)
        elif opaque == _KEEPALIVE_PING:
            self._keepalive_since_s = None

    def start_drain(self, connection: Connection) -> None:
        """Announce the end; streams that outlive requests end now, so that they move on."""
        if self.is_draining:
            return
        self.is_draining = True
        self.drain_since_s = connection.now_s
        connection.outbox.put(0, frames.goaway(frames.LARGEST_STREAM_ID, ErrorCode.NO_ERROR))
        connection.outbox.put(0, frames.ping(_DRAIN_PING))
        for stream in list(connection.streams.open.values()):
            if stream.method is not None and stream.method.is_long_lived:
                stream.end(grpc.UNAVAILABLE, "draining")

    def finish_drain(self, connection: Connection) -> None:
        """Name the last stream that counts."""
        if self.is_draining and not self.is_final:
            self.is_final = True
            last_id = connection.streams.last_id
            connection.outbox.put(0, frames.goaway(last_id, ErrorCode.NO_ERROR))

    def tick(self, connection: Connection) -> None:
        """Look what has taken too long.

        Raises:
            ConnectionFault: The connection has.
        """
        now, limits = connection.now_s, connection.limits
        if not self._settings_acknowledged:
            # 9113 6.5.3: no acknowledgement "within a reasonable amount of time": SETTINGS_TIMEOUT.
            if now - self._opened_s > limits.handshake_timeout_s:
                raise ConnectionFault(
                    ErrorCode.SETTINGS_TIMEOUT, "handshake", Abuse.HANDSHAKE_TIMEOUT
                )
            return
        self._tick_keepalive(connection)
        self._tick_idle(connection)
        self._tick_queue(connection)
        if self.is_draining and now - self.drain_since_s > limits.keepalive_timeout_s:
            self.finish_drain(connection)

    def _tick_keepalive(self, connection: Connection) -> None:
        now, limits = connection.now_s, connection.limits
        since = self._keepalive_since_s
        if since is None or self.last_received_s > since:
            # Any byte is a sign of life, also where the PING itself is still behind others.
            self._keepalive_since_s = None
            if now - self.last_received_s > limits.keepalive_s:
                self._keepalive_since_s = now
                connection.outbox.put(0, frames.ping(_KEEPALIVE_PING))
        elif now - since > limits.keepalive_timeout_s:
            raise ConnectionFault(ErrorCode.NO_ERROR, "peer is silent", Abuse.HALF_OPEN)

    def _tick_idle(self, connection: Connection) -> None:
        now = connection.now_s
        if connection.streams.open or connection.streams.last_id != self._last_id:
            self._last_id = connection.streams.last_id
            self._idle_since_s = now
        elif now - self._idle_since_s > connection.limits.idle_timeout_s and not self.is_draining:
            connection.counters.abuse[Abuse.IDLE] += 1
            self.start_drain(connection)

    def _tick_queue(self, connection: Connection) -> None:
        now, outbox = connection.now_s, connection.outbox
        if not outbox.queued_bytes or outbox.data_frames != self._data_frames:
            self._data_frames = outbox.data_frames
            self._stalled_since_s = now
        elif now - self._stalled_since_s > connection.limits.stall_timeout_s:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "slow reader", Abuse.SLOW_READER)
