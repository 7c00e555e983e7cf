"""How an endpoint's failures stand out among those of a pool's endpoints.

An endpoint that fails has few requests of each of many models, and other endpoints too. So its
failures are compared in two ways: kind by kind, and those of all kinds together. Of a kind that
others hardly served, at most `MAX_OF_KIND` count: a model that fails everywhere may have been asked
for there alone. Either way may show that it stands out. But all may have begun to fail at the same
moment. So requests to other endpoints that were sent at the same time, of whatever kind, must not
say otherwise, and there must be some.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from math import exp, inf
from typing import NamedTuple

from extproc.learned.chances import Count, Strata, less, row_log_chance
from extproc.learned.failurestreaks import EndpointEnds, FailureStreak, KindStreak, one_more
from extproc.learned.recentends import RecentEnds
from extproc.learned.tallies import MAX_KINDS, WINDOW_S, Like, ServedRequests, Tally

MAX_OF_KIND, MIN_KNOWN = 2, 10
"""Failures in a row of one kind that count where all kinds are compared together, unless other
endpoints had so many requests of it and hardly failed."""
NUM_PRIOR = 40
"""Requests that count as served elsewhere where a request rarely explains a failure, while at most
one has failed elsewhere."""
MAX_RARE_RATIO = 0.1
"""Of requests that fail: with a higher one, it is not rare. One alone always is."""
NUM_BEFORE = 26
"""Requests of other endpoints that a streak is compared with: enough for six failures. Those from
before the streak count as far as there are fewer since."""
MIN_BESIDE = 3
"""Requests to other endpoints that were sent since a streak began and have ended: with fewer, it is
not known whether they fail, too."""
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


class Comparison:
    """The successes and failures of all endpoints of a pool."""

    def __init__(self) -> None:
        self._all = Tally(MAX_KINDS)
        self._sources = ServedRequests()
        self.recent = RecentEnds(2 * ERROR_BYTES)
        self._half = 0  # of the window that has begun

    def forget_old(self, own: EndpointEnds, now: float) -> None:
        """Forget what is too long ago."""
        half = int(now // (WINDOW_S / 2))
        if half != self._half:
            self._half = half
            self._all.begin_half(half)
            self._sources.begin_half(half)
        if half != own.tally.half:
            own.begin_half(half)

    def served(
        self, own: EndpointEnds, address: str, like: Like, num_bytes: int, sent_at_s: float
    ) -> None:
        """Record a request that an endpoint has served, with an answer of so many bytes."""
        if num_bytes >= ERROR_BYTES:  # a shorter answer may be an error
            self._sources.served(like.source, address)
        self.recent.add(sent_at_s, address, has_failed=False, num_bytes=num_bytes)
        all_counts, own_counts = self._all.new, own.tally.new
        for kind in (like.kind, ANY):
            count, own_count = all_counts.get(kind), own_counts.get(kind)
            if count is None or own_count is None:
                self._count(own, kind, failed=False)
            else:
                count.num += 1
                own_count.num += 1
        if num_bytes < SHORT_BYTES and like.kind in own_counts:
            size = _size(num_bytes)
            for counts in (all_counts, own_counts):
                sizes = counts[like.kind].sizes
                sizes[size] = sizes.get(size, 0) + 1

    def is_hollow(
        self,
        own: EndpointEnds,
        address: str,
        kind: Hashable,
        num_bytes: int,
        *,
        is_text: bool = False,
    ) -> bool:
        """Return whether an answer is less than half as long as 19 of 20 of those that other
        endpoints gave to requests of a kind.

        Where these are few, an answer that should be a generated text (`is_text`) and is as short
        as an error is compared with those of all kinds.
        """
        if not self.knows_lengths(own, kind):
            return is_text and num_bytes < ERROR_BYTES and self._are_texts_long(address)
        most, num_short = _size(2 * num_bytes), 0
        for counts, sign in ((self._all, 1), (own.tally, -1)):
            for sizes in counts.sizes_of(kind):
                num_short += sign * sum(num for size, num in sizes.items() if size <= most)
        return num_short <= MAX_SHORT_RATIO * self._num_served(own, kind)

    def _are_texts_long(self, address: str) -> bool:
        """Return whether hardly any answers of other endpoints are near an error's length."""
        num_served, num_short = self.recent.served_elsewhere(address)
        return num_served >= MIN_ANSWERS and num_short <= MAX_SHORT_RATIO * num_served

    def knows_lengths(self, own: EndpointEnds, kind: Hashable) -> bool:
        """Return whether other endpoints gave enough answers of a kind to tell a hollow one."""
        return self._num_served(own, kind) >= MIN_ANSWERS

    def _num_served(self, own: EndpointEnds, kind: Hashable) -> int:
        elsewhere = self._elsewhere(own, kind)
        return elsewhere.num - elsewhere.num_failed

    def survives(self, own: EndpointEnds, sent_at_s: float) -> bool:
        """Return whether a streak of failures goes on after what was sent then has been served.

        It does where that was sent before the streak began, and all has failed that was sent since.
        Or nearly none elsewhere fails, and a request rarely explains such failures.
        """
        streak = own.streak
        if not sent_at_s < streak.since_s < inf:
            return False
        is_rare = streak.mixed is not None and streak.mixed.is_rare
        return streak.is_pure or (is_rare and self._is_rarest(own))

    def failed(
        self,
        own: EndpointEnds,
        address: str,
        like: Like,
        sent_at_s: float,
        *,
        is_rare: bool = False,
    ) -> bool:
        """Record a failure that its request may explain, rarely or not; return whether it
        counts."""
        is_repeatable = self._sources.is_served_elsewhere(like.source, address)
        streak = own.streak
        if not (own.is_new(like.source) or is_repeatable):
            return False
        streak.add(like.kind, self._ever_elsewhere(own, like.kind), is_rare=is_rare)
        streak.mixed = one_more(streak.mixed, self._ever_mixed(own), is_rare=is_rare)
        self.recent.add(sent_at_s, address, has_failed=True)
        self._count(own, like.kind, failed=True)
        self._count(own, ANY, failed=False)
        self._count(own, EACH, failed=True)
        return True

    def broke(self, own: EndpointEnds) -> None:
        """Record a failure that no request explains."""
        own.streak.add(ANY, self._ever_elsewhere(own, ANY), is_rare=True)
        self._count(own, ANY, failed=True)

    def is_rare_elsewhere(self, own: EndpointEnds) -> bool:
        """Return whether hardly any requests to other endpoints fail."""
        return _is_rare(self._mixed(own))

    def forget(self, own: EndpointEnds) -> None:
        """Forget an endpoint that has left."""
        own.begin_half(self._half)  # it may have had no requests for a while
        for kind in [*own.tally]:
            self._all.take_back(kind, own.tally)

    def judge(self, own: EndpointEnds, streak: FailureStreak, address: str) -> Judgement:
        """Judge the failures in a row that can be compared, of the endpoint with an address.

        Requests of the other endpoints count since the streak began, as all may have begun to fail.
        Some of their earlier requests count too: an endpoint that fails draws all requests.
        """
        by_kind = self._judge_kinds(own, streak.by_kind)
        if streak.mixed is None:
            return by_kind
        mixed = self._judge_all(own, streak)
        found = mixed if mixed.chance < by_kind.chance else by_kind
        beside, among = self.recent.beside(address, streak.since_s, streak.until_s)
        num_elsewhere = beside.num
        if streak.mixed.is_rare and self._is_rarest(own):
            num_elsewhere += NUM_PRIOR
        chance = exp(row_log_chance(streak.mixed.num, num_elsewhere, beside.num_failed))
        excess = 1 - beside.num_failed / num_elsewhere if num_elsewhere else 0.0
        num = max(by_kind.num, mixed.num) if among >= MIN_BESIDE else 0
        return Judgement(num, max(found.chance, chance), min(found.excess, excess))

    def is_shared(self, own: EndpointEnds, streak: FailureStreak, chance: float) -> bool:
        """Return whether other endpoints have failures like those of a streak so likely."""
        shown = self._judge_kinds(own, streak.by_kind), self._judge_all(own, streak)
        return all(each.chance >= chance for each in shown)

    def _judge_kinds(self, own: EndpointEnds, by_kind: Mapping[Hashable, KindStreak]) -> Judgement:
        """Judge kind by kind."""
        total, log_chance, num_expected = 0, 0.0, 0.0
        is_rarest = self._is_rarest(own)
        for kind, part in by_kind.items():
            later = less(self._ever_elsewhere(own, kind), part.since)
            window = self._elsewhere(own, kind)
            num_elsewhere, num_failed = _comparable(later, window)
            if kind is ANY:
                num_elsewhere += NUM_PRIOR if _is_rare(window) else 0
            elif num_elsewhere and part.is_rare and is_rarest:
                num_elsewhere += NUM_PRIOR
            if num_elsewhere:
                total += part.num
                log_chance += row_log_chance(part.num, num_elsewhere, num_failed)
                num_expected += part.num * num_failed / num_elsewhere
        return Judgement(total, exp(log_chance), 1 - num_expected / total if total else 0.0)

    def _judge_all(self, own: EndpointEnds, streak: FailureStreak) -> Judgement:
        """Judge failures of all kinds together."""
        part = streak.mixed
        if part is None:
            return Judgement(0, 1.0, 0.0)
        later, window = less(self._ever_mixed(own), part.since), self._mixed(own)
        num_elsewhere, num_failed = _comparable(later, window)
        if not num_elsewhere:
            return Judgement(0, 1.0, 0.0)
        num = sum(
            each.num if self._is_known(own, kind) else min(each.num, MAX_OF_KIND)
            for kind, each in streak.by_kind.items()
            if kind is not ANY
        )
        if part.is_rare and self._is_rarest(own):
            num_elsewhere += NUM_PRIOR
        chance = exp(row_log_chance(num, num_elsewhere, num_failed))
        return Judgement(num, chance, 1 - num_failed / num_elsewhere)

    def _is_known(self, own: EndpointEnds, kind: Hashable) -> bool:
        """Return whether other endpoints had some requests of a kind and hardly failed."""
        elsewhere = self._elsewhere(own, kind)
        return elsewhere.num >= MIN_KNOWN and elsewhere.num_failed <= MAX_RARE_RATIO * elsewhere.num

    def judge_rates(self, own: EndpointEnds) -> list[Strata]:
        """Return its failure rates: of what requests may explain, and of what they do not."""
        by_request, by_itself = Strata(), Strata()
        for kind in own.tally:
            if kind is not EACH:
                stratum = by_itself if kind is ANY else by_request
                stratum.add(own.tally.of(kind), self._elsewhere(own, kind))
        return [by_request, by_itself]

    def _elsewhere(self, own: EndpointEnds, kind: Hashable) -> Count:
        """Return the other endpoints' counts of a kind within the window."""
        return less(self._all.of(kind), own.tally.of(kind))

    def _ever_elsewhere(self, own: EndpointEnds, kind: Hashable) -> Count:
        return less(self._all.ever(kind), own.tally.ever(kind))

    def _is_rarest(self, own: EndpointEnds) -> bool:
        """Return whether at most one request to other endpoints failed."""
        return self._mixed(own).num_failed <= 1

    def _mixed(self, own: EndpointEnds) -> Count:
        """Return the other endpoints' counts of all kinds together within the window."""
        elsewhere = self._elsewhere(own, ANY)
        return Count(elsewhere.num, elsewhere.num_failed + self._elsewhere(own, EACH).num)

    def _ever_mixed(self, own: EndpointEnds) -> Count:
        elsewhere = self._ever_elsewhere(own, ANY)
        return Count(elsewhere.num, elsewhere.num_failed + self._ever_elsewhere(own, EACH).num)

    def _count(self, own: EndpointEnds, kind: Hashable, *, failed: bool) -> None:
        """Count a request for its endpoint and for all, or for neither."""
        if own.tally.has_room(kind) and self._all.has_room(kind):
            for tally in (self._all, own.tally):
                tally.begin(kind).add(failed=failed)


def _comparable(later: Count, window: Count) -> tuple[float, float]:
    """Return the requests of other endpoints that count beside a streak, and how many failed.

    Args:
        later: Those since the streak began.
        window: Those of the window.
    """
    before = less(window, later)
    wanted = max(0, NUM_BEFORE - later.num)
    weight = min(1.0, wanted / before.num) if before.num else 0.0
    return later.num + weight * before.num, later.num_failed + weight * before.num_failed


def _size(num_bytes: int) -> int:
    """Return a number that grows by one where the bytes grow to 1.4 times."""
    return (num_bytes * num_bytes).bit_length()


def _is_rare(count: Count) -> bool:
    return count.num_failed <= max(1.0, MAX_RARE_RATIO * count.num)
