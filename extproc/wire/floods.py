"""The budget for frames that carry no request: those cost us more than the peer."""

from __future__ import annotations

from extproc.wire.errors import ConnectionFault, ErrorCode
from extproc.wire.limits import Abuse, Limits
from extproc.wire.outbox import Outbox

SETTINGS_COST = 200
"""One costs a response (CVE-2019-9515), and a look at the windows of streams."""
ANSWERED_COST = 2
"""PING (CVE-2019-9512), DATA without content (CVE-2019-9518) and WINDOW_UPDATE."""
UPDATES_PER_DATA_FRAME = 10
"""WINDOW_UPDATEs that cost nothing, for each DATA frame that we sent: one for the stream and one
for the connection is common, some clients send smaller steps."""


class FloodMeter:
    """Counts what one connection has spent of `max_control_frames` in `flood_window_s`."""

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
