"""The latest requests of a pool that have ended, by when they were sent."""

from __future__ import annotations

from collections import deque
from heapq import nlargest
from math import inf
from typing import NamedTuple

from extproc.fleet.chances import Count

NUM_RECENT, NUM_BESIDE = 1024, 40
"""The latest requests of all kinds that are remembered, and those of other endpoints that a row is
compared with."""
MIN_FAILED = 2
"""Failures elsewhere, more than half of the requests, that show what all endpoints do now."""


class _Ended(NamedTuple):
    """A request that has ended."""

    sent_at_s: float
    address: str
    has_failed: bool
    num_bytes: int  # of the answer, where it was served


class RecentEnds:
    """The latest `NUM_RECENT` of a pool."""

    __slots__ = ("_ended",)

    def __init__(self) -> None:
        self._ended = deque[_Ended](maxlen=NUM_RECENT)

    def add(self, sent_at_s: float, address: str, *, has_failed: bool, num_bytes: int = 0) -> None:
        """Record the end of a request."""
        self._ended.append(_Ended(sent_at_s, address, has_failed, num_bytes))

    def served_elsewhere(self, address: str, short_bytes: int) -> tuple[int, int]:
        """Return how many other endpoints have served, and how many of the answers were shorter
        than this.
        """
        others = [
            each.num_bytes
            for each in self._ended
            if each.address != address and not each.has_failed
        ]
        return len(others), sum(num_bytes < short_bytes for num_bytes in others)

    def excess(self, address: str) -> float:
        """Return how far the share of failures of an endpoint is above that of others.

        0 if others had too few at the time of its latest failures: one that gets none for a while
        has none that fail, either.
        """
        own = [each for each in self._ended if each.address == address]
        failed = [each.sent_at_s for each in own if each.has_failed][-NUM_BESIDE:]
        others, among = self.beside(address, min(failed, default=inf), inf)
        if not failed or among < len(failed) / 4:
            return 0.0
        ratio = sum(each.has_failed for each in own) / len(own)
        return ratio - others.num_failed / others.num

    def beside(self, address: str, since_s: float, until_s: float) -> tuple[Count, int]:
        """Return the requests to other endpoints that an endpoint's own can be compared with.

        They are those that were sent in the given time, at most `NUM_BESIDE`. Where there are
        fewer, those before fill up. The second number is of those in time.
        """
        others = [
            each for each in self._ended if each.address != address and each.sent_at_s <= until_s
        ]
        among = [each for each in others if each.sent_at_s >= since_s][-NUM_BESIDE:]
        num, num_failed = len(among), sum(each.has_failed for each in among)
        if num_failed >= MIN_FAILED and 2 * num_failed > num:
            return Count(num, num_failed), num  # what was sent before was of another time
        before = nlargest(NUM_BESIDE - num, (each for each in others if each.sent_at_s < since_s))
        num_failed += sum(each.has_failed for each in before)
        return Count(num + len(before), num_failed), num
