"""Recent successes and failures of endpoints by kind of request, as a base for comparison.

A kind is a model and a path. Counts cover the last half to whole `WINDOW_S`, so that what is kept
is bounded: `MAX_KINDS` kinds in the pool, `MAX_OWN_KINDS` of one endpoint, `MAX_SOURCES` requests.
Requests beyond these bounds do not count.

An endpoint that fails has few requests of each of many models, and other endpoints too. So its
failures are compared in two ways: kind by kind, and those of all kinds together, of each at most
`MAX_OF_KIND`: a model that fails everywhere may have been asked for there alone. Either may show
that it stands out. But all may have begun to fail at the same moment. So requests to other
endpoints that were sent at the same time, of whatever kind, must not say otherwise.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Mapping
from heapq import nlargest
from math import exp, inf, lgamma, log
from typing import Any, NamedTuple

from msgspec import Struct

WINDOW_S = 30.0
"""Counts cover the last half to whole window; as long as the base ejection."""
MAX_KINDS = 1024
MAX_OWN_KINDS = 256
MAX_SOURCES = 4096
MAX_FAILED = 256
"""Sources kept of an endpoint's failures, for half of the window."""
MAX_OF_KIND = 2
"""Failures in a row of one kind that count where all kinds are compared together."""
NUM_PRIOR = 40
"""Requests that count as served elsewhere where a request rarely explains a failure, while at most
one has failed elsewhere."""
MAX_RARE_RATIO = 0.1
"""Of requests that fail: with a higher one, it is not rare. One alone always is."""
NUM_BEFORE = 26
"""Requests of other endpoints that a row of failures is compared with: enough for six. Those from
before the row count as far as there are fewer since."""
NUM_RECENT, NUM_BESIDE = 1024, 40
"""The latest requests of all kinds that are remembered, and those of other endpoints that a row is
compared with."""
MIN_FAILED = 2
"""Failures elsewhere, more than half of the requests, that show what all endpoints do now."""
ANY = None
"""The kind of all requests, for failures that no request explains."""
EACH = True
"""The kind of the failures that a request may explain, of whatever model."""
HOLLOW_BYTES, SHORT_BYTES = 1024, 3072
"""Longer answers are never hollow, or not counted by their size."""
ERROR_BYTES = 256
"""A shorter answer does not show that its request can be served."""
MAX_SHORT_RATIO = 0.05
"""Of other endpoints' answers that are as short as a hollow one, or up to twice as long."""
MIN_ANSWERS = 10
"""Other endpoints' answers of a kind without which none is hollow."""


# How probable it is that an endpoint fails as it does, if it is like the others.


class Count(Struct, gc=False):
    """Requests that ended, and those of them that failed."""

    num: int = 0
    num_failed: int = 0


class Growing(Count, kw_only=True):
    """A count that another one grows with, which began earlier: `ever`.

    Attributes:
        sizes: Of those served, how many had answers of a size (`_size`).
    """

    ever: Count
    sizes: dict[int, int] = {}

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

    def sizes_of(self, kind: Hashable) -> Iterator[Mapping[int, int]]:
        """Yield the answers served within the window by size."""
        for counts in (self.new, self._old):
            if kind in counts:
                yield counts[kind].sizes

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
        is_rare: Requests rarely explain such failures.
    """

    num: int
    since: Count
    is_rare: bool


class Judgement(NamedTuple):
    """How the failures in a row stand out.

    Attributes:
        num: Failures that can be compared.
        chance: Of so many with the failure rate of the other endpoints.
        excess: Over that rate, 0 to 1.
    """

    num: int
    chance: float
    excess: float


class Row:
    """An endpoint's failures since it last served anything.

    Attributes:
        mixed: The first of each kind together.
        num: Those of all kinds that their requests may explain.
        since_s: When the first one was sent, and `until_s` the last one.
        is_pure: All that was sent since, up to the last one, has failed. Then it does not matter
            that what was sent before is served.
    """

    __slots__ = ("by_kind", "is_pure", "mixed", "num", "since_s", "until_s")

    def __init__(self) -> None:
        self.since_s, self.until_s, self.is_pure = inf, -inf, True
        self.by_kind: dict[Hashable, Part] = {}
        self.mixed: Part | None = None
        self.num = 0

    def sent(self, at_s: float, outlived_s: float) -> None:
        """Note when a failed request was sent, and when the newest one before that is in flight."""
        self.since_s, self.until_s = min(self.since_s, at_s), max(self.until_s, at_s)
        self.is_pure = self.is_pure and outlived_s < self.since_s

    def survives(self, sent_at_s: float) -> bool:
        """Return whether it goes on after what was sent then has been served."""
        return self.is_pure and sent_at_s < self.since_s < inf

    def add(self, kind: Hashable, since: Count, *, is_rare: bool) -> int:
        """Count a failure; `since` is that of a first one. Return how many of its kind are in."""
        part = self.by_kind[kind] = _one_more(self.by_kind.get(kind), since, is_rare=is_rare)
        return part.num


def _one_more(before: Part | None, since: Count, *, is_rare: bool) -> Part:
    if before is None:
        return Part(1, since, is_rare)
    return Part(before.num + 1, before.since, before.is_rare and is_rare)


class Own:
    """One endpoint's successes and failures."""

    __slots__ = ("_sources", "row", "tally")

    def __init__(self) -> None:
        self.tally = Tally(MAX_OWN_KINDS)
        self.row = Row()
        self._sources: set[int] = set()

    def turn(self, half: int) -> None:
        """Start a half of the window, by its number."""
        self.tally.turn(half)
        self._sources.clear()

    def is_new(self, source: int) -> bool:
        """Return whether a source has not failed in this half of the window; remember it."""
        is_new = source not in self._sources and len(self._sources) < MAX_FAILED
        if is_new:
            self._sources.add(source)
        return is_new


class Comparison:
    """The successes and failures of all endpoints of a pool."""

    def __init__(self) -> None:
        self._all = Tally(MAX_KINDS)
        self._sources = Sources()
        self._recent: deque[tuple[float, str, bool]] = deque(maxlen=NUM_RECENT)
        self._half = 0  # of the window, as of the last turn

    def turn(self, own: Own, now: float) -> None:
        """Forget what is too long ago."""
        half = int(now // (WINDOW_S / 2))
        if half != self._half:
            self._half = half
            self._all.turn(half)
            self._sources.turn(half)
        if half != own.tally.half:
            own.turn(half)

    def served(self, own: Own, address: str, like: Like, num_bytes: int, sent_at_s: float) -> None:
        """Record a request that an endpoint has served, with an answer of so many bytes."""
        if num_bytes >= ERROR_BYTES:  # a shorter answer may be an error
            self._sources.served(like.source, address)
        self._recent.append((sent_at_s, address, False))
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
        if num_bytes < SHORT_BYTES:
            size = _size(num_bytes)
            for tally in (self._all, own.tally):
                found = tally.new.get(like.kind)
                if found is not None:
                    found.sizes[size] = found.sizes.get(size, 0) + 1

    def is_hollow(self, own: Own, kind: Hashable, num_bytes: int) -> bool:
        """Return whether an answer is less than half as long as 19 of 20 of those that other
        endpoints gave to requests of a kind."""
        others = self._others(own, kind)
        num_served = others.num - others.num_failed
        if num_served < MIN_ANSWERS:
            return False
        most, num_short = _size(2 * num_bytes), 0
        for counts, sign in ((self._all, 1), (own.tally, -1)):
            for sizes in counts.sizes_of(kind):
                num_short += sign * sum(num for size, num in sizes.items() if size <= most)
        return num_short <= MAX_SHORT_RATIO * num_served

    def failed(
        self, own: Own, address: str, like: Like, sent_at_s: float, *, is_rare: bool = False
    ) -> bool:
        """Record a failure that its request may explain, rarely or not; return whether it
        counts."""
        is_repeatable = self._sources.is_served_elsewhere(like.source, address)
        row = own.row
        if not (own.is_new(like.source) or is_repeatable):
            return False
        num = row.add(like.kind, self._ever_others(own, like.kind), is_rare=is_rare)
        if num <= MAX_OF_KIND:
            row.mixed = _one_more(row.mixed, self._ever_mixed(own), is_rare=is_rare)
        row.num += 1
        self._recent.append((sent_at_s, address, True))
        self._count(own, like.kind, failed=True)
        self._count(own, ANY, failed=False)
        self._count(own, EACH, failed=True)
        return True

    def broke(self, own: Own) -> None:
        """Record a failure that no request explains."""
        own.row.add(ANY, self._ever_others(own, ANY), is_rare=True)
        self._count(own, ANY, failed=True)

    def is_rare_elsewhere(self, own: Own) -> bool:
        """Return whether hardly any requests to other endpoints fail."""
        return _is_rare(self._mixed(own))

    def forget(self, own: Own) -> None:
        """Forget an endpoint that has left."""
        own.turn(self._half)  # it may have had no requests for a while
        for kind in [*own.tally]:
            self._all.take_back(kind, own.tally)

    def judge(self, own: Own, row: Row, address: str) -> Judgement:
        """Judge the failures in a row that can be compared, of the endpoint with an address.

        Requests of the other endpoints count since the row began, as all may have begun to fail.
        Some of their earlier requests count too: an endpoint that fails draws all requests.
        """
        by_kind = self._judge_kinds(own, row.by_kind)
        mixed = self._judge_all(own, row.mixed)
        found = mixed if mixed.chance < by_kind.chance else by_kind
        if not row.num:
            return found
        num_others, num_failed = self._beside(address, row.since_s, row.until_s)
        if row.mixed is not None and row.mixed.is_rare and self._is_rarest(own):
            num_others += NUM_PRIOR
        chance = exp(row_log_chance(row.num, num_others, num_failed))
        excess = 1 - num_failed / num_others if num_others else 0.0
        return Judgement(found.num, max(found.chance, chance), min(found.excess, excess))

    def recent_excess(self, address: str) -> float:
        """Return how far the share of failures of an endpoint is above that of others, of the
        latest requests of all kinds."""
        num, num_failed = self._beside(address, -inf, inf)
        own = [failed for _, each, failed in self._recent if each == address]
        return sum(own) / max(1, len(own)) - num_failed / max(1, num)

    def _beside(self, address: str, since_s: float, until_s: float) -> tuple[int, int]:
        """Return how many requests to other endpoints can be compared with those to an endpoint
        that were sent in some time, and how many of them failed: those that were sent in that time,
        and where they are few the ones before."""
        others = [each for each in self._recent if each[1] != address and each[0] <= until_s]
        among = [each for each in others if each[0] >= since_s][-NUM_BESIDE:]
        num, num_failed = len(among), sum(failed for _, _, failed in among)
        if num_failed >= MIN_FAILED and 2 * num_failed > num:
            return num, num_failed  # what was sent before was of another time
        before = nlargest(NUM_BESIDE - num, (each for each in others if each[0] < since_s))
        return num + len(before), num_failed + sum(failed for _, _, failed in before)

    def is_shared(self, own: Own, row: Row, chance: float) -> bool:
        """Return whether other endpoints have failures like those of a row with such a chance."""
        shown = self._judge_kinds(own, row.by_kind), self._judge_all(own, row.mixed)
        return all(each.chance >= chance for each in shown)

    def _judge_kinds(self, own: Own, by_kind: Mapping[Hashable, Part]) -> Judgement:
        """Judge kind by kind."""
        total, log_chance, num_expected = 0, 0.0, 0.0
        is_rarest = self._is_rarest(own)
        for kind, part in by_kind.items():
            later, window = _less(self._ever_others(own, kind), part.since), self._others(own, kind)
            num_others, num_failed = _comparable(later, window)
            if kind is ANY:
                num_others += NUM_PRIOR if _is_rare(window) else 0
            elif num_others and part.is_rare and is_rarest:
                num_others += NUM_PRIOR
            if num_others:
                total += part.num
                log_chance += row_log_chance(part.num, num_others, num_failed)
                num_expected += part.num * num_failed / num_others
        return Judgement(total, exp(log_chance), 1 - num_expected / total if total else 0.0)

    def _judge_all(self, own: Own, part: Part | None) -> Judgement:
        """Judge failures of all kinds together."""
        if part is None:
            return Judgement(0, 1.0, 0.0)
        later, window = _less(self._ever_mixed(own), part.since), self._mixed(own)
        num_others, num_failed = _comparable(later, window)
        if not num_others:
            return Judgement(0, 1.0, 0.0)
        if part.is_rare and self._is_rarest(own):
            num_others += NUM_PRIOR
        chance = exp(row_log_chance(part.num, num_others, num_failed))
        return Judgement(part.num, chance, 1 - num_failed / num_others)

    def judge_rates(self, own: Own) -> list[Strata]:
        """Return its failure rates: of what requests may explain, and of what they do not."""
        by_request, by_itself = Strata(), Strata()
        for kind in own.tally:
            if kind is not EACH:
                stratum = by_itself if kind is ANY else by_request
                stratum.add(own.tally.of(kind), self._others(own, kind))
        return [by_request, by_itself]

    def _others(self, own: Own, kind: Hashable) -> Count:
        """Return the other endpoints' counts of a kind within the window."""
        return _less(self._all.of(kind), own.tally.of(kind))

    def _ever_others(self, own: Own, kind: Hashable) -> Count:
        return _less(self._all.ever(kind), own.tally.ever(kind))

    def _is_rarest(self, own: Own) -> bool:
        """Return whether at most one request to other endpoints failed."""
        return self._mixed(own).num_failed <= 1

    def _mixed(self, own: Own) -> Count:
        """Return the other endpoints' counts of all kinds together within the window."""
        others = self._others(own, ANY)
        return Count(others.num, others.num_failed + self._others(own, EACH).num)

    def _ever_mixed(self, own: Own) -> Count:
        others = self._ever_others(own, ANY)
        return Count(others.num, others.num_failed + self._ever_others(own, EACH).num)

    def _count(self, own: Own, kind: Hashable, *, failed: bool) -> None:
        """Count a request for its endpoint and for all, or for neither."""
        if own.tally.has_room(kind) and self._all.has_room(kind):
            self._all.begin(kind).add(failed=failed)
            own.tally.begin(kind).add(failed=failed)


def _comparable(later: Count, window: Count) -> tuple[float, float]:
    """Return the requests of other endpoints that count beside a row, and how many of them failed.

    Args:
        later: Those since the row began.
        window: Those of the window.
    """
    before = _less(window, later)
    wanted = max(0, NUM_BEFORE - later.num)
    weight = min(1.0, wanted / before.num) if before.num else 0.0
    return later.num + weight * before.num, later.num_failed + weight * before.num_failed


def _size(num_bytes: int) -> int:
    """Return a number that grows by one where the bytes grow to 1.4 times."""
    return (num_bytes * num_bytes).bit_length()


def _is_rare(count: Count) -> bool:
    return count.num_failed <= max(1.0, MAX_RARE_RATIO * count.num)


def _less(count: Count, other: Count) -> Count:
    """Return the difference; a count that has begun anew since is what it is."""
    if count.num < other.num:
        return Count(count.num, count.num_failed)
    return Count(count.num - other.num, max(0, count.num_failed - other.num_failed))
