"""Recent successes and failures of endpoints by kind of request, as a base for comparison.

A kind is a model and a path. Counts cover the last half to whole `WINDOW_S`, so that what is kept
is bounded: `MAX_KINDS` kinds in the pool, `MAX_OWN_KINDS` of one endpoint, `MAX_SOURCES` requests.
Requests beyond these bounds do not count.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from math import exp, lgamma, log
from typing import Any, NamedTuple

from msgspec import Struct

WINDOW_S = 30.0
"""Counts cover the last half to whole window; as long as the base ejection."""
MAX_KINDS = 1024
MAX_OWN_KINDS = 256
MAX_SOURCES = 4096
MAX_ROW = 64
"""Sources kept of failures in a row."""
NUM_PRIOR = 40
"""Requests that count as served elsewhere where no request explains a failure, while that is
rare elsewhere."""
MAX_RARE_RATIO = 0.1
"""Of requests that fail without an explanation: with a higher one, it is not rare."""
NUM_BEFORE = 26
"""Most requests of other endpoints that count from before a row of failures: enough for six."""
ANY = None
"""The kind of all requests, for failures that no request explains."""


# How probable it is that an endpoint fails as it does, if it is like the others.


class Count(Struct, gc=False):
    """Requests that ended, and those of them that failed."""

    num: int = 0
    num_failed: int = 0


class Growing(Count, gc=False, kw_only=True):
    """A count that another one grows with, which began earlier: `ever`."""

    ever: Count

    def add(self, *, failed: bool) -> None:
        """Count a request."""
        self.num += 1
        self.num_failed += failed
        self.ever.num += 1
        self.ever.num_failed += failed


def row_log_chance(num: int, num_others: float, num_failed: float) -> float:
    """Return the logarithm of the chance that `num` requests in a row fail.

    The probability of each is estimated from the ends of requests to other endpoints alone
    (Laplace's rule of succession).
    """
    failed, total = num_failed + 1, num_others + 2
    return lgamma(failed + num) - lgamma(failed) - lgamma(total + num) + lgamma(total)


class Strata:
    """Sums over the kinds that both one endpoint and other endpoints had, for its failure rate."""

    __slots__ = ("_num_all_failed", "_num_expected", "_num_share", "num", "num_failed")

    def __init__(self) -> None:
        self.num = self.num_failed = self._num_all_failed = 0
        self._num_expected = self._num_share = 0.0

    def add(self, own: Count, others: Count) -> None:
        """Add one kind; where other endpoints had none, no failure of its own can be compared."""
        self.num += own.num
        if not others.num:
            return
        failed = own.num_failed + others.num_failed
        self.num_failed += own.num_failed
        self._num_all_failed += failed
        self._num_expected += own.num * others.num_failed / others.num
        self._num_share += failed * own.num / (own.num + others.num)

    def excess_ratio(self) -> float:
        """Return how far its failure rate is above that of other endpoints with the same kinds."""
        return (self.num_failed - self._num_expected) / self.num if self.num else 0.0

    def chance(self) -> float:
        """Return a bound on the chance that so many of all failures are its own (Chernoff's bound).
        There are some failures; each is its own with the probability of its share of the requests.
        """
        ratio, share = (
            self.num_failed / self._num_all_failed,
            self._num_share / self._num_all_failed,
        )
        if ratio <= share:
            return 1.0
        rest = (1 - ratio) * log((1 - ratio) / (1 - share)) if ratio < 1 else 0.0
        return exp(-self._num_all_failed * (ratio * log(ratio / share) + rest))


# The endpoints and their counts.


class Like(NamedTuple):
    """The properties that make requests alike.

    Attributes:
        kind: The model and the path, by which endpoints are compared.
        source: The same for a request that is repeated, and rarely the same for another request.
    """

    kind: Hashable
    source: int


class Tally:
    """Counts by kind: within the window, and since a kind was new.

    Attributes:
        half: Of the window, by its number.
        new: Counts in this half, to be added to.
    """

    __slots__ = ("_ever", "_limit", "_old", "half", "new")

    def __init__(self, limit: int) -> None:
        self._limit, self.half = limit, 0
        self._ever: dict[Hashable, Count] = {}
        self.new: dict[Hashable, Growing] = {}
        self._old: dict[Hashable, Growing] = {}

    def turn(self, half: int) -> None:
        """Start a half of the window, by its number, when it is due."""
        if half > self.half:
            self._old = self.new if half == self.half + 1 else {}
            self.half, self.new = half, {}
            self._ever = {kind: self._ever[kind] for kind in self._old}

    def has_room(self, kind: Hashable) -> bool:
        """Return whether requests of a kind can be counted."""
        return kind in self.new or len(self.new) < self._limit

    def begin(self, kind: Hashable) -> Growing:
        """Return the count of a kind in this half, begun if need be; `has_room` has said yes."""
        ever = self._ever.get(kind)
        if ever is None:
            ever = self._ever[kind] = Count()
        return self.new.setdefault(kind, Growing(ever=ever))

    def of(self, kind: Hashable) -> Count:
        """Return the requests of a kind within the window."""
        new, old = self.new.get(kind, _NOTHING), self._old.get(kind, _NOTHING)
        return Count(new.num + old.num, new.num_failed + old.num_failed)

    def take_back(self, kind: Hashable, own: Tally) -> None:
        """Forget what an endpoint has had of a kind: in its own counts, and in these of all."""
        for all_counts, counts in zip(self._all_counts(), own._all_counts(), strict=True):
            if kind in counts:
                less = _less(all_counts[kind], counts.pop(kind))
                all_counts[kind].num, all_counts[kind].num_failed = less.num, less.num_failed

    def _all_counts(self) -> tuple[dict[Hashable, Any], ...]:
        return self.new, self._old, self._ever

    def ever(self, kind: Hashable) -> Count:
        """Return the requests of a kind since it was new; it is forgotten with its last ones.

        The count goes on: take what is needed of it.
        """
        return self._ever.get(kind, _NOTHING)

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self.new.keys() | self._old.keys())


_NOTHING = Count(0, 0)


class Sources:
    """Which requests endpoints have served, within the window."""

    __slots__ = ("_half", "_new", "_old")

    def __init__(self) -> None:
        self._half = 0
        self._new: dict[int, str] = {}
        self._old: dict[int, str] = {}

    def turn(self, half: int) -> None:
        """Start a half of the window, by its number, when it is due."""
        if half > self._half:
            self._old = self._new if half == self._half + 1 else {}
            self._half, self._new = half, {}

    def served(self, source: int, address: str) -> None:
        """Record that an endpoint has served a request."""
        before = self._new.get(source)
        if before is None and len(self._new) < MAX_SOURCES:
            self._new[source] = address
        elif before is not None and before != address:
            self._new[source] = ""  # several have

    def is_served_elsewhere(self, source: int, address: str) -> bool:
        """Return whether another endpoint than this one has served it."""
        return any(half.get(source, address) != address for half in (self._new, self._old))


class Part(NamedTuple):
    """The failures of one kind in a row.

    Attributes:
        since: The other endpoints' counts when the first of them ended.
    """

    num: int
    since: Count


class Row:
    """An endpoint's failures since it last served anything."""

    __slots__ = ("_sources", "by_kind")

    def __init__(self) -> None:
        self.by_kind: dict[Hashable, Part] = {}
        self._sources: set[int] = set()

    def is_new(self, source: int) -> bool:
        """Return whether a source has not failed in this row; remember it."""
        is_new = source not in self._sources and len(self._sources) < MAX_ROW
        if is_new:
            self._sources.add(source)
        return is_new

    def add(self, kind: Hashable, since: Count) -> None:
        """Count a failure; `since` is that of a first one."""
        before = self.by_kind.get(kind)
        self.by_kind[kind] = (
            Part(1, since) if before is None else Part(before.num + 1, before.since)
        )


class Own:
    """One endpoint's successes and failures."""

    __slots__ = ("row", "tally")

    def __init__(self) -> None:
        self.tally = Tally(MAX_OWN_KINDS)
        self.row = Row()


class Comparison:
    """The successes and failures of all endpoints of a pool."""

    def __init__(self) -> None:
        self._all = Tally(MAX_KINDS)
        self._sources = Sources()
        self._half = 0  # of the window, as of the last turn

    def turn(self, own: Own, now: float) -> None:
        """Forget what is too long ago."""
        half = int(now // (WINDOW_S / 2))
        if half != self._half:
            self._half = half
            self._all.turn(half)
            self._sources.turn(half)
        if half != own.tally.half:
            own.tally.turn(half)

    def served(self, own: Own, address: str, like: Like) -> None:
        """Record a request that an endpoint has served."""
        if own.row.by_kind:
            own.row = Row()
        self._sources.served(like.source, address)
        all_counts, own_counts = self._all.new, own.tally.new
        for kind in (like.kind, ANY):
            count, own_count = all_counts.get(kind), own_counts.get(kind)
            if count is None or own_count is None:
                self._count(own, kind, failed=False)
            else:
                count.num += 1
                count.ever.num += 1
                own_count.num += 1
                own_count.ever.num += 1

    def failed(self, own: Own, address: str, like: Like) -> bool:
        """Record a failure that its request may explain; return whether it counts."""
        is_repeatable = self._sources.is_served_elsewhere(like.source, address)
        if not (own.row.is_new(like.source) or is_repeatable):
            return False
        own.row.add(like.kind, self._ever_others(own, like.kind))
        self._count(own, like.kind, failed=True)
        self._count(own, ANY, failed=False)
        return True

    def broke(self, own: Own) -> None:
        """Record a failure that no request explains."""
        own.row.add(ANY, self._ever_others(own, ANY))
        self._count(own, ANY, failed=True)

    def excuse_others(self, own: Own) -> None:
        """Forget an endpoint's failures without an explanation: they are no measure for other
        endpoints.
        """
        self._all.take_back(ANY, own.tally)

    def judge_row(self, own: Own, row: Mapping[Hashable, Part]) -> tuple[int, float, float]:
        """Judge the failures in a row that can be compared. Return their number, the chance of that
        with the failure rate of the other endpoints, and the excess over that rate, 0 to 1.

        Requests of the other endpoints count since the row began, as all may have begun to fail.
        Some of their earlier requests count too: an endpoint that fails draws all requests.
        """
        total, log_chance, num_expected = 0, 0.0, 0.0
        for kind, (num, since) in row.items():
            num_others, num_failed = self._comparable(own, kind, since)
            if num_others:
                total += num
                log_chance += row_log_chance(num, num_others, num_failed)
                num_expected += num * num_failed / num_others
        return total, exp(log_chance), 1 - num_expected / total if total else 0.0

    def judge_rates(self, own: Own) -> list[Strata]:
        """Return its failure rates: of what requests may explain, and of what they do not."""
        by_request, by_itself = Strata(), Strata()
        for kind in own.tally:
            stratum = by_itself if kind is ANY else by_request
            stratum.add(own.tally.of(kind), self._others(own, kind))
        return [by_request, by_itself]

    def _comparable(self, own: Own, kind: Hashable, since: Count) -> tuple[float, float]:
        """Return the requests of other endpoints that count beside a row, and how many of them
        failed.
        """
        later = _less(self._ever_others(own, kind), since)
        before = _less(self._others(own, kind), later)
        weight = min(1.0, NUM_BEFORE / before.num) if before.num else 0.0
        num = later.num + weight * before.num
        if kind is ANY and _is_rare(later) and _is_rare(before):
            num += NUM_PRIOR
        return num, later.num_failed + weight * before.num_failed

    def _others(self, own: Own, kind: Hashable) -> Count:
        """Return the other endpoints' counts of a kind within the window."""
        return _less(self._all.of(kind), own.tally.of(kind))

    def _ever_others(self, own: Own, kind: Hashable) -> Count:
        return _less(self._all.ever(kind), own.tally.ever(kind))

    def _count(self, own: Own, kind: Hashable, *, failed: bool) -> None:
        """Count a request for its endpoint and for all, or for neither."""
        if own.tally.has_room(kind) and self._all.has_room(kind):
            self._all.begin(kind).add(failed=failed)
            own.tally.begin(kind).add(failed=failed)


def _is_rare(count: Count) -> bool:
    return count.num_failed <= MAX_RARE_RATIO * count.num


def _less(count: Count, other: Count) -> Count:
    """Return the difference; a count that has begun anew since is what it is."""
    if count.num < other.num:
        return Count(count.num, count.num_failed)
    return Count(count.num - other.num, max(0, count.num_failed - other.num_failed))
