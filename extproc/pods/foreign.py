"""The requests of other routers on one endpoint: by their messages, and by its load reports.

And how much of a report is believed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Container
from math import inf

from msgspec.structs import replace

from extproc.types import LoadReport

STEADY_S = 15.0
"""Routers that herd move hundreds of requests from one endpoint to the next within a second."""
ALONE_S = 4.0
"""The same where all routers that are known tell us theirs: the rest is no herd, as far as we know.
Ten routers that do not know of each other herd at 1.5 s, and hardly at 4 (zipf-steep of
`evaluation` at 101/s: 11 % and 4 % missed)."""
MAX_YOUNG = 1_024
"""The latest beginnings and ends that are remembered of an endpoint: of a second or two."""


class SteadyMinimum:
    """The least of the values of the last seconds, up to twice as many as asked for; 0 at first."""

    def __init__(self) -> None:
        self.low = 0
        self._current = 0
        self._since_s = -inf

    def record(self, value: int, *, now: float, steady_s: float = STEADY_S) -> None:
        """Record a value; those of the last `steady_s` count."""
        if now - self._since_s >= steady_s:
            self.low, self._current, self._since_s = self._current, value, now
        if value < self._current:
            self._current = value
        if value < self.low:
            self.low = value

    def rise(self, by: int) -> None:
        """Take all values so far for higher by so much: that has been there too."""
        self.low += by
        self._current += by


class ForeignRequests:
    """Counts other routers' requests on one endpoint; as its reports do, by sequences.

    Attributes:
        num_from_peers: Their sequences that have not ended, of `num_requests`.
        num_foreign: Further requests by the last report: of routers that send us no picks.
        adapters: Adapters that the last report names and that may be of routers that send us no
            picks.
        num_reported: Requests that the last report leaves beside ours.
        num_before: Of `num_from_peers`, those that began before the last report.
        counts_first: The requests that the next report shows count for the choice at once: routers
            that choose by reports have not looked yet.
    """

    def __init__(self) -> None:
        self.adapters: dict[str, int] = {}
        self.num_foreign = self.num_reported = self.num_before = 0
        self.num_from_peers = self.num_requests = 0
        self._steady = SteadyMinimum()
        self._total = self._shown = 0  # of the last report, and foreign when that became so
        self._reported_at_s = -inf
        # When it was told, when they began, and how many; less where they ended.
        self._young: deque[tuple[float, float, int]] = deque(maxlen=MAX_YOUNG)
        self.counts_first = False

    @property
    def num_steady(self) -> int:
        """The part of `num_foreign` that has been there for a while."""
        return min(self._steady.low, self.num_foreign)

    def num_since(self, at_s: float) -> int:
        """Return how many of the sequences told began after some time."""
        if at_s == -inf:
            return self.num_from_peers
        num_since = 0
        for heard_s, began_s, num in reversed(self._young):
            if heard_s <= at_s:
                break  # and all that was told before
            if began_s > at_s:
                num_since += num
        return min(max(0, num_since), self.num_from_peers)

    def restarted(self) -> None:
        """Forget how long other routers' requests have been there."""
        self._steady, self._total, self._shown = SteadyMinimum(), 0, 0

    def picked(self, num: int, num_sequences: int, now: float) -> None:
        """Count requests that have just begun."""
        self.num_requests += num
        self.num_from_peers += num_sequences
        self._young.append((now, now, num_sequences))

    def ended(self, num: int, num_sequences: int, began_s: float, now: float) -> None:
        """Stop counting requests that began at some time, and of which it is told now."""
        self.num_requests -= num
        self.num_from_peers -= num_sequences
        self._young.append((now, began_s, -num_sequences))
        if began_s <= self._reported_at_s:
            self.num_before = max(0, self.num_before - num_sequences)
        if self.num_before > self.num_from_peers:
            self.num_before = self.num_from_peers

    def recount(self, num: int, num_sequences: int) -> None:
        """Count so many more that were not told when they began, or less that ended untold."""
        self.num_requests += num
        self.num_from_peers += num_sequences
        if self._reported_at_s > -inf:
            self.num_before = min(max(0, self.num_before + num_sequences), self.num_from_peers)
        if num_sequences > 0:  # the report has counted them already
            self.num_foreign = max(0, self.num_foreign - num_sequences)

    def leave_to_reports(self, num_sequences: int, adapter: str | None) -> None:
        """Count requests whose ends nobody will tell as foreign ones, until a report shows less.

        They do not wait to be steady: it was not by the reports that routers chose this endpoint.
        """
        self.num_foreign += num_sequences
        self._shown += num_sequences
        self._steady.rise(num_sequences)
        if adapter is not None:
            self.adapters = {**self.adapters, adapter: 1}

    def reported(
        self,
        report: LoadReport,
        num_ours: int,
        our_adapters: Collection[str],
        *,
        steady_s: float = STEADY_S,
        now: float,
    ) -> None:
        """Estimate foreign requests: those in the report that no known router has sent, and the
        adapters that no known request is for.

        Their number is a scrape old, and the same for every router that reads it. Routers that
        chose by it would all go to the same endpoint, then all to the next. So only the part that
        has been there for seconds counts for the choice. The rest counts for admission alone, and
        each adapter as one request. Where there are more foreign requests than adapters without a
        request of ours, the remaining adapters may have foreign requests too. Such an adapter runs
        on when our last request ends.
        """
        self._reported_at_s = now
        total = report.num_running + report.num_waiting
        self.num_reported = max(0, total - num_ours)
        self.num_before = self.num_from_peers
        self.num_foreign = max(0, self.num_reported - self.num_from_peers)
        if self.counts_first:
            self.counts_first = False
            self._steady.rise(self.num_foreign)
        if total != self._total:
            self._total, self._shown = total, self.num_foreign
        # As many as before although ours have ended: the report may be old (`ReportTrust`).
        is_herd = steady_s == STEADY_S
        value = self.num_foreign if is_herd else min(self.num_foreign, self._shown)
        self._steady.record(value, now=now, steady_s=steady_s)
        # An idle engine's page may still name those that were active last.
        active = report.active_adapters if total else ()
        self.adapters = {each: 1 for each in active if each not in our_adapters}
        if self.num_foreign > len(self.adapters):
            self.adapters = dict.fromkeys(active, 1)


# How much of a load report is believed.
#
# An engine says what runs and waits in each of its steps. When all of its requests are aborted at
# once there is no further step, so its page shows them until the next request
# (vllm-project/vllm#29928). But an engine with running requests makes steps, and those move its
# counters.
#
# Rules:
# 1. A report is old, whenever it was taken, if it shows more requests than routers know to be
#    there, and nothing in it that changes with work has changed for `STILL_S`.
# 2. Of an old report, and of one whose numbers cannot be read, only as many requests count as
#    routers know to be there, and only adapters that they have requests for.
# 3. Engines that do not count step by step (`LoadReport.work_tokens`) are believed.

STILL_S = 10.0
"""Longer than a step: the longest has a whole chunk of a prompt, 8,192 tokens, which a slow server
computes at 1,000 a second."""


class ReportTrust:
    """The trust in one endpoint's reports.

    Attributes:
        is_old: The last one is old.
    """

    def __init__(self) -> None:
        self.is_old = self._is_counted = False
        self._shown: tuple[object, ...] = ()
        self._moved_s = 0.0

    def stood_s(self, now: float) -> float:
        """Return for how long nothing has changed that changes with work, by the last report; 0
        where that says nothing."""
        return now - self._moved_s if self._is_counted else 0.0

    def of(
        self, report: LoadReport, num_known: int, adapters: Container[str], *, now: float
    ) -> LoadReport:
        """Return the trust in a report of `now`, where `num_known` requests are known to be there,
        for these adapters among more.
        """
        num_running, num_waiting = report.num_running, report.num_waiting
        counted = report.num_deferred, report.work_tokens
        shown = (num_running, num_waiting, report.kv_usage_ratio, *counted)
        if shown != self._shown:
            self._shown, self._moved_s = shown, now
        self._is_counted = report.work_tokens is not None
        is_still = self.stood_s(now) >= STILL_S
        self.is_old = is_still and num_running + num_waiting > num_known
        if report.has_counts and not self.is_old:
            return report
        num_running = min(num_running, num_known) if report.has_counts else num_known
        return replace(
            report,
            num_running=num_running,
            num_waiting=num_known - num_running,
            num_deferred=None,
            kv_usage_ratio=None if self.is_old else report.kv_usage_ratio,
            active_adapters=frozenset(each for each in report.active_adapters if each in adapters),
        )
