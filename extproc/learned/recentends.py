"""The latest requests of a pool that have ended, by when they were sent."""

from __future__ import annotations

from collections import deque
from heapq import nlargest
from math import inf

from msgspec import Struct

from extproc.learned.chances import Count

NUM_RECENT, NUM_BESIDE = 1024, 40
"""The latest requests of all kinds that are remembered, and those of other endpoints that a row is
compared with."""
MIN_FAILED = 2
"""Failures elsewhere, more than half of the requests, that show what all endpoints do now."""


class _Ended(Struct, frozen=True, order=True, gc=False):
    """A request that has ended."""

    sent_at_s: float
    address: str
    has_failed: bool
    is_short: bool  # the answer, where it was served


class RecentEnds:
    """The latest `NUM_RECENT` of a pool.

    Args:
        short_bytes: Shorter answers count as short.
    """

    __slots__ = ("_ended", "_served", "_short_bytes")

    def __init__(self, short_bytes: int) -> None:
        self._ended = deque[_Ended]()
        self._short_bytes = short_bytes
        # By address and whether the answer was shorter than this. An answer is looked at as it
        # ends, many in one message: to count them then takes 0.1 ms each.
        self._served: dict[tuple[str, bool], int] = {}

    def add(self, sent_at_s: float, address: str, *, has_failed: bool, num_bytes: int = 0) -> None:
        """Record the end of a request."""
        served, is_short = self._served, num_bytes < self._short_bytes
        if len(self._ended) == NUM_RECENT:
            gone = self._ended.popleft()
            if not gone.has_failed:
                before = gone.address, gone.is_short
                served[before] -= 1
                if not served[before]:
                    del served[before]
        self._ended.append(_Ended(sent_at_s, address, has_failed, is_short))
        if not has_failed:
            kind = address, is_short
            served[kind] = served.get(kind, 0) + 1

    def served_elsewhere(self, address: str) -> tuple[int, int]:
        """Return how many other endpoints have served, and how many of the answers were short."""
        others = [(kind[1], num) for kind, num in self._served.items() if kind[0] != address]
        return sum(num for _, num in others), sum(num for is_short, num in others if is_short)

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
