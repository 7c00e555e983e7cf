"""One endpoint's process: whether it answers, and how requests have failed there."""

from __future__ import annotations

from collections import deque
from math import inf

from extproc.pods.podrow import PodRow

MIN_LIFE_S = 10.0
"""A process that restarts sooner than this is neither waited for nor tried."""
MAX_FAILURES = 64
"""Failures of an endpoint that count as requests there."""


class PodHealth:
    """The health of one endpoint. A caller that sets any of it takes its row for untrue.

    Attributes:
        answers: The last that is known of it is an answer: to a client, or to a call of ours.
        is_unreachable: Our last call could not connect to it.
        died_at_s: When its health check said last that its engine has stopped; None for running.
        version: Of its engine, "" where it tells none; None before it was asked.
        restarted_at_s: When reports showed that.
        failures: Its last failures: until when each counts as a request there, as long as it would
            take to serve one, and of which adapter. To fail fast is no room.
    """

    def __init__(self, row: PodRow) -> None:
        self._row = row
        self.answers = self.is_unreachable = False
        self.died_at_s: float | None = None
        self.version: str | None = None
        self.restarted_at_s = self._returned_at_s = -inf
        self.failures: deque[tuple[float, str | None]] = deque()

    def answered(self, *, now: float, restarted: bool) -> bool:
        """Record that it answered a call of ours; return whether a process is back that may be
        tried."""
        is_back = False
        if restarted or self.is_unreachable:
            is_back = now - self._returned_at_s >= MIN_LIFE_S
            self._returned_at_s = now
        if self.is_unreachable or not self.answers:
            self.is_unreachable, self.answers = False, True
            self._row.renew()
        return is_back

    def failed(self, adapter: str | None, until_s: float) -> None:
        """Count a failure as a request there, for the choice, until some time."""
        if len(self.failures) < MAX_FAILURES:
            self.failures.append((until_s, adapter))
            self._row.touch()

    def count_failures(self, pending: dict[str, int], now: float) -> int:
        """Return how many of its failures count as requests there; add those of adapters to what is
        `pending`."""
        failures = self.failures
        while failures and failures[0][0] < now:
            failures.popleft()
        for _, adapter in failures:
            if adapter is not None:
                pending[adapter] = pending.get(adapter, 0) + 1
        return len(failures)
