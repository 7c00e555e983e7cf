"""How much an endpoint takes that has said that it is full.

It refuses requests so that another endpoint takes them; that is no failure.

Rules:
1. A refusal says that an endpoint takes no more than it had, unless its reports have shown more
   within `SHOWN_S`: then the request may be too large for any (vLLM counts `n` of them), so it says
   so only where another endpoint takes the request. Until that is known, it has no room either.
2. The limit holds until the endpoint's first answer to a call of ours (a report or its models)
   after `FIRST_HOLD_S`. Then one more is tried, after further answers 2, 4, 8 and so on, until
   nothing is left of the limit. A refusal meanwhile begins again, and each time the limit holds for
   twice as long, up to `MAX_HOLD_S`.
"""

from __future__ import annotations

TAKEN_S = 0.25
"""A request that was refused and has not ended for so long is with another endpoint: the data plane
tries the next one at once."""
FIRST_HOLD_S = 1.0
"""Where all are full, whoever it is tried with gets the refusal: that is to be rare."""
MAX_HOLD_S = 10.0
MAX_STEP = 64
SHOWN_S = 30.0
"""What reports have shown holds for the last half to whole of it."""
MAX_OPEN = 64
"""Refusals kept of which it is not known yet whether another endpoint took the request."""


class Fullness:
    """What one endpoint's refusals say of its room.

    Attributes:
        limit: Unfinished requests that it takes; None for not known.
    """

    __slots__ = (
        *("_half", "_has_grown", "_hold_s", "_known", "_open", "_shown", "_shown_before"),
        *("_since_s", "_step", "limit"),
    )

    def __init__(self) -> None:
        self.limit: int | None = None
        self._known: int | None = None  # the limit before it was tried to go beyond
        self._hold_s, self._since_s = FIRST_HOLD_S, 0.0
        self._step, self._has_grown = 1, False
        self._open: dict[str, tuple[int, float]] = {}
        self._half = self._shown = self._shown_before = 0

    def reported(self, num_unfinished: int, *, now: float) -> None:
        """Record how many unfinished requests its report shows."""
        half = int(now // (SHOWN_S / 2))
        if half > self._half:
            self._shown_before = self._shown if half == self._half + 1 else 0
            self._half, self._shown = half, 0
        self._shown = max(self._shown, num_unfinished)
        if self.limit is not None and self._known is not None:
            self._known = max(self._known, min(num_unfinished, self.limit))

    def refused(self, pick_id: str, num_pending: int, *, now: float) -> None:
        """Record that it refused a request that was sent beside so many unfinished ones."""
        most = max(self._shown, self._shown_before)
        if num_pending >= (most if self._known is None else min(most, self._known)):
            self._limit_to(num_pending, now)
        elif len(self._open) < MAX_OPEN:
            self._open[pick_id] = num_pending, now

    def settle(self, pick_id: str, *, was_taken: bool) -> None:
        """Record that the request ended: another endpoint took it, or none did."""
        num_pending, at_s = self._open.pop(pick_id, (0, None))
        if was_taken and at_s is not None:
            self._limit_to(num_pending, at_s)

    def answered(self, *, asked_at_s: float) -> None:
        """Record that it answered a call of ours, begun at `asked_at_s`."""
        taken = [each for each, (_, at_s) in self._open.items() if asked_at_s - at_s >= TAKEN_S]
        for pick_id in taken:
            self.settle(pick_id, was_taken=True)
        if self.limit is None or taken or asked_at_s <= self._since_s + self._hold_s:
            return
        self.limit, self._has_grown = self.limit + self._step, True
        self._step *= 2
        if self._step > MAX_STEP:
            self.limit = self._known = None
            self._hold_s = FIRST_HOLD_S

    def is_full(self, num_pending: int) -> bool:
        """Return whether it has no room beside so many unfinished requests."""
        if self.limit is not None and num_pending >= self.limit:
            return True
        return any(num_pending >= at_refusal for at_refusal, _ in self._open.values())

    def _limit_to(self, num_pending: int, now: float) -> None:
        if self._has_grown:
            self._hold_s = min(MAX_HOLD_S, 2 * self._hold_s)
        # Of several that were sent there at once the first one tells, and some were sent before it
        # was tried to go beyond.
        known = num_pending if self._known is None else self._known
        self.limit = self._known = min(num_pending, known)
        self._since_s, self._step, self._has_grown = now, 1, False
