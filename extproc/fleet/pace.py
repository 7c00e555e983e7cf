"""How often pods are asked for their load reports.

1. A pod where something runs is asked every `interval_s`.
2. A quiet pod is asked less often: nobody whom we know of has a request there, and its report has
   said the same, that nothing runs or waits, for `QUIET_AFTER_S`. From one question to the next the
   time grows by `QUIET_GROWTH`. Routers that do not tell us theirs may send there too, and are seen
   that much later: `MAX_QUIET_S` bounds it. A pick, other news in a report, a failure or a closed
   connection end it.
3. While the event loop is late, requests come first: all pods are asked less often.
4. None of this lets a report get older than `AGE_SHARE` of the time after which it expires.
"""

from __future__ import annotations

from typing import Final

from extproc.types import LoadReport

QUIET_AFTER_S: Final = 1.0
"""Twenty reports at the usual interval: requests that follow each other leave shorter gaps."""
QUIET_GROWTH: Final = 1.5
"""From the usual 50 ms to the bound in eight questions, two seconds."""
MAX_QUIET_S: Final = 1.0
"""Between two questions to a quiet pod. Foreign requests there count for a choice only after
`foreign.ALONE_S` (1.5 s) or `STEADY_S` anyway: a router sees them at most a second later.
"""
AGE_SHARE: Final = 0.5
"""Of a report's expiry: one question may go unanswered for as long again."""
LATE_S: Final = 0.01
"""Delay of the event loop from which it is late: every request waits for as long in addition. No
pass of ours over pods or adapters takes more than half of that."""
LATE_GROWTH: Final = 1.25
LATE_DECAY: Final = 0.9
"""With each look at the delay, ten a second. Two looks in time undo a late one, so the interval
grows where more than a third are late, and is the usual one a few seconds after that ended."""


class Pace:
    """The intervals of all pods.

    Args:
        interval_s: The configured one.
        expiry_s: Age from which a report is not trusted.

    Attributes:
        interval_s: From the start of one question to a busy pod to the start of the next, now.
    """

    def __init__(self, interval_s: float, expiry_s: float) -> None:
        self.interval_s = self._least_s = interval_s
        self._expiry_s = expiry_s

    def configure(self, expiry_s: float) -> None:
        """Apply another expiry."""
        self._expiry_s = expiry_s
        self.interval_s = self.bounded(self.interval_s)

    def delayed(self, delay_s: float) -> None:
        """Record by how much the event loop was late, about ten times a second."""
        change = LATE_GROWTH if delay_s > LATE_S else LATE_DECAY
        self.interval_s = self.bounded(self.interval_s * change, late_s=delay_s)

    def bounded(self, interval_s: float, *, late_s: float = 0.0) -> float:
        """Return `interval_s`, or less, so that a report is young enough when the next one comes,
        `late_s` after the question. Of `late_s`, half of the bound at most counts: beyond that,
        more questions bring no report sooner. The result is never less than configured.
        """
        most_s = self._expiry_s * AGE_SHARE
        return max(self._least_s, min(interval_s, most_s - min(late_s, most_s / 2)))


class Quiet:
    """Follows whether one pod is quiet.

    Attributes:
        rest_s: From the last question to the next; 0 for a pod that is not quiet.
    """

    __slots__ = ("_asked_at_s", "_before", "_pace", "_since_s", "_state", "rest_s")

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        # The last report, and the picks counted before; None while none has come since a question.
        self._state: tuple[LoadReport, int | None] | None = None
        self._before: tuple[LoadReport, int | None] | None = None
        self._since_s = self._asked_at_s = 0.0
        self.rest_s = 0.0

    def asked(self) -> None:
        """Record that it is asked: until the report comes, it is not quiet."""
        self._before, self._state = self._state, None

    def reported(
        self, report: LoadReport, num_picks: int | None, *, asked_at_s: float, taken_at_s: float
    ) -> None:
        """Record the report that was asked for.

        Args:
            num_picks: That were ever counted there; None while one of them has not ended.
        """
        self._state = report, num_picks
        self._asked_at_s = asked_at_s
        is_empty = report.has_counts and not report.num_running + report.num_waiting
        if num_picks is None or not is_empty or self._state != self._before:
            self._since_s, self.rest_s = taken_at_s, 0.0
        elif taken_at_s - self._since_s >= QUIET_AFTER_S:
            rest_s = max(self.rest_s, self._pace.interval_s)
            self.rest_s = min(rest_s * QUIET_GROWTH, MAX_QUIET_S)

    def can_wait(self, num_picks: int | None, *, now: float) -> bool:
        """Return whether it need not be asked before another of the usual intervals has passed."""
        if not self.rest_s or self._state is None or self._state[1] != num_picks:
            return False
        due_s = self._asked_at_s + self._pace.bounded(self.rest_s)
        return now + self._pace.interval_s <= due_s
