"""How fast requests leave the queue."""

from __future__ import annotations

from math import exp

PACE_S = 5.0
"""Time after which what was seen counts for a third."""


class Pace:
    """The mean time from one dispatch to the next, while requests are held."""

    __slots__ = ("_busy_s", "_num_sent", "_seen_s")

    def __init__(self) -> None:
        self._busy_s = self._num_sent = 0.0
        self._seen_s: float | None = None

    def look(self, now: float, *, is_held: bool) -> None:
        """Count the time since the last call if something was held; to be called at each change.

        Args:
            is_held: Whether something is held from now on.
        """
        if self._seen_s is not None and now > self._seen_s:
            passed_s = now - self._seen_s
            kept = exp(-passed_s / PACE_S)
            self._busy_s, self._num_sent = self._busy_s * kept + passed_s, self._num_sent * kept
        self._seen_s = now if is_held else None

    def sent(self) -> None:
        """Count a dispatch."""
        self._num_sent += 1

    @property
    def service_s(self) -> float:
        """Mean seconds from one dispatch to the next; 0 while none is known."""
        return self._busy_s / self._num_sent if self._num_sent else 0.0
