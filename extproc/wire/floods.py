"""Limits per window of time on frames that cost us more than the peer."""

from __future__ import annotations

from extproc.wire.errors import ConnectionFault, ErrorCode
from extproc.wire.limits import Abuse, Limits
from extproc.wire.outbox import Outbox


class FloodMeter:
    """Counts the frames of one connection that are limited per `flood_window_s`."""

    __slots__ = ("_data_frames", "_limits", "_outbox", "_seen", "_window_s", "end_s")

    def __init__(self, limits: Limits, outbox: Outbox, now: float) -> None:
        self._limits = {
            Abuse.RAPID_RESET: limits.max_rapid_resets,
            Abuse.SETTINGS_FLOOD: limits.max_settings_frames,
            Abuse.PING_FLOOD: limits.max_pings,
            Abuse.EMPTY_FRAME_FLOOD: limits.max_empty_frames,
            Abuse.WINDOW_UPDATE_FLOOD: limits.max_window_updates,
            Abuse.OTHER_FRAME_FLOOD: limits.max_other_frames,
        }
        self._outbox = outbox
        self._window_s = limits.flood_window_s
        self._seen: dict[Abuse, int] = {}
        self._data_frames = 0
        # The end of the window; checked by `Connection` before each read.
        self.end_s = now + limits.flood_window_s

    def restart(self, now: float) -> None:
        """Begin a new window of time."""
        self.end_s = now + self._window_s
        self._seen.clear()
        self._data_frames = self._outbox.data_frames

    def count(self, abuse: Abuse, *, weight: int = 1, per_data_frame: int = 0) -> None:
        """Count a frame as `weight`; `per_data_frame` more are allowed for each DATA frame we sent.

        Raises:
            ConnectionFault: Too many.
        """
        seen = self._seen[abuse] = self._seen.get(abuse, 0) + weight
        sent = self._outbox.data_frames - self._data_frames
        if seen > self._limits[abuse] + per_data_frame * sent:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, abuse, abuse)
