"""The requests of other routers on one endpoint: by their messages, and by its load reports.

And how much of a report is believed.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Sequence
from math import inf
from typing import Generic, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from extproc.types import LoadReport

STEADY_S = 15.0
"""Routers that herd move hundreds of requests from one endpoint to the next within a second."""
ALONE_S = 1.5
"""The same where all routers that are known tell us theirs: the rest is no herd of routers."""


class SteadyMinimum:
    """The least of the values of the last seconds, up to twice as many as asked for; 0 at first."""

    __slots__ = ("_current", "_since_s", "low")

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


At = TypeVar("At")


class PeerFlight(Struct, Generic[At], eq=False):
    """Another router's pick that has not ended, and the endpoint object that it is counted on.

    Attributes:
        adapter: That it counts for there; None until the endpoint lists the adapter named `name`.
    """

    id: str
    tracked: At
    name: str | None
    told_at_s: float
    picked_at_s: float
    body_bytes: int
    num_sequences: int = 1
    adapter: str | None = None


class ForeignRequests(Generic[At]):
    """Counts other routers' requests on one endpoint; as its reports do, by sequences.

    Attributes:
        flights: The received picks that have not ended, in the order of their arrival.
        num_told: Their sequences.
        num_foreign: Further requests by the last report: of routers that send us no picks.
        adapters: Adapters that the last report names and that may be of routers that send us no
            picks.
        num_reported: Requests that the last report leaves beside ours.
        num_before: Of `flights`, those that were picked before the last report.
        counts_first: The requests that the next report shows count for the choice at once: routers
            that choose by reports have not looked yet.
    """

    __slots__ = (
        *("_reported_at_s", "_shown", "_steady", "_total", "adapters", "counts_first"),
        *("flights", "num_before", "num_foreign", "num_reported", "num_told"),
    )

    def __init__(self) -> None:
        self.flights: dict[str, PeerFlight[At]] = {}
        self.adapters: dict[str, int] = {}
        self.num_foreign = self.num_reported = self.num_before = self.num_told = 0
        self._steady = SteadyMinimum()
        self._total = self._shown = 0  # of the last report, and foreign when that became so
        self._reported_at_s: float | None = None
        self.counts_first = False

    @property
    def num_steady(self) -> int:
        """The part of `num_foreign` that has been there for a while."""
        return min(self._steady.low, self.num_foreign)

    @property
    def num_unseen(self) -> int:
        """Received picks that the last report should show beside our requests and does not."""
        return max(0, self.num_before - self.num_reported)

    def restart(self) -> None:
        """Forget how long other routers' requests have been there."""
        self._steady, self._total, self._shown = SteadyMinimum(), 0, 0

    def begin(self, flight: PeerFlight[At]) -> None:
        """Count a pick."""
        num = flight.num_sequences
        if self.is_reported(flight):
            self.num_foreign = max(0, self.num_foreign - num)  # the report has counted it already
            self.num_before += num
        self.flights[flight.id] = flight
        self.num_told += num

    def end(self, flight: PeerFlight[At]) -> None:
        """Stop counting a pick."""
        del self.flights[flight.id]
        self.num_told -= flight.num_sequences
        if self.is_reported(flight):
            self.num_before -= flight.num_sequences

    def is_reported(self, flight: PeerFlight[At]) -> bool:
        """Return whether a pick is old enough for the last report to count it."""
        return self._reported_at_s is not None and flight.picked_at_s <= self._reported_at_s

    def leave_to_reports(self, flights: Sequence[PeerFlight[At]]) -> None:
        """Count picks whose ends nobody will report as foreign requests, until a report shows less.

        They do not wait to be steady: it was not by the reports that routers chose this endpoint.
        """
        num = sum(each.num_sequences for each in flights)
        self.num_foreign += num
        self._shown += num
        self._steady.rise(num)
        self.adapters |= {each.adapter: 1 for each in flights if each.adapter is not None}

    def record_report(
        self,
        report: LoadReport,
        num_ours: int,
        our_adapters: Collection[str],
        *,
        now: float,
        steady_s: float = STEADY_S,
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
        told = self.flights.values()
        self.num_before = sum(each.num_sequences for each in told if self.is_reported(each))
        self.num_foreign = max(0, self.num_reported - self.num_told)
        if self.counts_first:
            self.counts_first = False
            self._steady.rise(self.num_foreign)
        if total != self._total:
            self._total, self._shown = total, self.num_foreign
        # As many as before although ours have ended: the report may be old (`Belief`).
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


class Belief:
    """The trust in one endpoint's reports.

    Attributes:
        is_old: The last one is old.
    """

    __slots__ = ("_moved_s", "_shown", "is_old")

    def __init__(self) -> None:
        self.is_old = False
        self._shown: tuple[object, ...] = ()
        self._moved_s = 0.0

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
        is_still = report.work_tokens is not None and now - self._moved_s >= STILL_S
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
