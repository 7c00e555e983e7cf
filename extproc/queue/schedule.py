"""When the queue makes its next offer, and how fast requests leave it."""

from __future__ import annotations

from collections.abc import Callable
from math import exp, inf

ASK_S = 100e-6
ORDER_S = 2e-6
"""The time that a question to the policy, and a place in the order, take on a slow core."""
REST_RATIO = 10
"""The rest after an offer, over what it took but for those that got an endpoint."""
PEER_OFFERS_FIRST_S = 0.01
"""After another router's word of a request's end, until the room is offered here: the other one
offers it at once, and what it picks is known here by then. Two messages of a router are 2 ms apart
(`peers.updates`), and each has a way."""


class Schedule:
    """Times of offers. The caller adds requests with a time of their own: `next_s`.

    Args:
        at: Has an offer made at a time, instead of the time that it was called with before.
    """

    def __init__(self, at: Callable[[float], None]) -> None:
        self._at = at
        self._freed_s = inf  # when room that was freed may be offered
        self._rests_until_s = -inf
        self._arranged_s = inf

    def freed(self, at_s: float) -> None:
        """Have room that was freed be offered then, or before."""
        self._freed_s = min(self._freed_s, at_s)

    def due_s(self, next_s: float) -> float:
        """Return when the next offer is due."""
        return max(min(self._freed_s, next_s), self._rests_until_s)

    def promised_s(self, next_s: float, *, now: float) -> float | None:
        """Return when a newcomer is asked for that stands in line, None where it need not.

        It does where those that wait are to be asked for once the queue has had its rest, or once
        another router may have taken what was freed.
        """
        if now < self._freed_s < inf:
            return self._freed_s
        is_wanted = now >= min(self._freed_s, next_s)
        return now if is_wanted and now < self._rests_until_s else None

    def begin(self, now: float) -> bool:
        """Begin an offer; return whether it is of room that was freed."""
        is_freed = now >= self._freed_s
        if is_freed:
            self._freed_s = inf
        return is_freed

    def rest(self, num_held: int, num_unplaced: int, *, now: float) -> None:
        """Rest after an offer to so many, of whom so many were asked for in vain."""
        self._rests_until_s = now + REST_RATIO * (ORDER_S * num_held + ASK_S * num_unplaced)

    def forget(self) -> None:
        """Count on no offer that was arranged: it is made now."""
        self._arranged_s = inf

    def arrange(self, due_s: float) -> None:
        """Have an offer made then, unless one is arranged before."""
        if due_s < self._arranged_s:
            self._arranged_s = due_s
            self._at(due_s)


# How fast requests leave the queue.

PACE_S = 5.0
"""Time after which what was seen counts for a third."""


class DispatchPace:
    """The mean time from one dispatch to the next, while requests are held."""

    __slots__ = ("_busy_s", "_num_sent", "_seen_s")

    def __init__(self) -> None:
        self._busy_s = self._num_sent = 0.0
        self._seen_s: float | None = None

    def advance(self, now: float, *, is_held: bool) -> None:
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
