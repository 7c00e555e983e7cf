"""An endpoint's failures in a row, beside all that it has had."""

from __future__ import annotations

from collections.abc import Hashable
from math import inf
from typing import NamedTuple

from extproc.learned.chances import Count
from extproc.learned.tallies import MAX_OWN_KINDS, Tally

MAX_FAILED = 256
"""Sources kept of an endpoint's failures, for half of the window."""


class KindStreak(NamedTuple):
    """The failures of one kind in a row.

    Attributes:
        since: The other endpoints' counts when the first of them ended.
        is_rare: Requests rarely explain such failures.
    """

    num: int
    since: Count
    is_rare: bool


class FailureStreak:
    """An endpoint's failures since it last served anything.

    Attributes:
        mixed: Those of all kinds that their requests may explain.
        since_s: When the first one was sent, and `until_s` the last one.
        is_pure: All that was sent since, up to the last one, has failed. Then it does not matter
            that what was sent before is served.
    """

    __slots__ = ("by_kind", "is_pure", "mixed", "since_s", "until_s")

    def __init__(self) -> None:
        self.since_s, self.until_s, self.is_pure = inf, -inf, True
        self.by_kind: dict[Hashable, KindStreak] = {}
        self.mixed: KindStreak | None = None

    def sent(self, at_s: float, outlived_s: float) -> None:
        """Note when a failed request was sent, and when the newest one before that is in flight."""
        self.since_s, self.until_s = min(self.since_s, at_s), max(self.until_s, at_s)
        self.is_pure = self.is_pure and outlived_s < self.since_s

    def spans(self, sent_at_s: float) -> bool:
        """Return whether a request was sent while it went on."""
        return self.since_s <= sent_at_s <= self.until_s

    def add(self, kind: Hashable, since: Count, *, is_rare: bool) -> None:
        """Count a failure; `since` is that of a first one of its kind."""
        self.by_kind[kind] = one_more(self.by_kind.get(kind), since, is_rare=is_rare)


def one_more(before: KindStreak | None, since: Count, *, is_rare: bool) -> KindStreak:
    """Return a part with one failure more; `since` is that of a first one."""
    if before is None:
        return KindStreak(1, since, is_rare)
    return KindStreak(before.num + 1, before.since, before.is_rare and is_rare)


class EndpointEnds:
    """One endpoint's successes and failures."""

    __slots__ = ("_sources", "streak", "tally")

    def __init__(self) -> None:
        self.tally = Tally(MAX_OWN_KINDS)
        self.streak = FailureStreak()
        self._sources: set[int] = set()

    def begin_half(self, half: int) -> None:
        """Start a half of the window, by its number."""
        self.tally.begin_half(half)
        self._sources.clear()

    def is_new(self, source: int) -> bool:
        """Return whether a source has not failed in this half of the window; remember it."""
        is_new = source not in self._sources and len(self._sources) < MAX_FAILED
        if is_new:
            self._sources.add(source)
        return is_new
