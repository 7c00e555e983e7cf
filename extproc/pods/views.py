"""Keeps the columns of a pool's endpoints true.

No request changes most of what is known of an endpoint. These *facts* are made anew where a report,
a listing or a call of ours has brought news. An endpoint in no trouble writes what a request
changes there into its row at once (`PodRow.columns`). Any other one is *stale* after each change:
its row is made anew when somebody asks. Written in place a row takes some 0.5 us, made anew 3.5,
with its facts 7.5.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush
from math import inf

from extproc.learned.outliers import Outliers
from extproc.pods.columns import Columns
from extproc.pods.endpointstate import EndpointState
from extproc.pods.podrow import PodRow, Trouble
from extproc.pods.podstate import mixes_weights
from extproc.pods.serverflags import PoolSettings
from extproc.types import EndpointView, LoadReport


class Views:
    """The columns of some endpoints, which are sorted by address.

    Attributes:
        stale: The rows that are no longer true; they add themselves.
    """

    def __init__(self, settings: PoolSettings, outliers: Outliers) -> None:
        self._settings, self._outliers = settings, outliers
        self.stale: dict[PodRow, None] = {}
        self._endpoints: list[EndpointState] = []
        self._columns: Columns | None = None
        self._due: list[tuple[float, int]] = []  # a heap: when to look whether a row has expired
        self._num_reads = 0

    def configure(self, settings: PoolSettings) -> None:
        """Apply other thresholds to what is made from now on."""
        self._settings = settings

    def set_endpoints(self, endpoints: Iterable[EndpointState]) -> None:
        """Replace the endpoints."""
        endpoints = list(endpoints)
        if endpoints != self._endpoints:
            self._endpoints, self._columns = endpoints, None

    def columns(self, *, now: float) -> Columns:
        """Return the columns at `now`; true until something is recorded."""
        columns = self._columns
        if columns is None:
            columns = self._columns = self._new_columns(now)
        elif self._due and now > self._due[0][0]:
            self._expire(now)
        if self.stale:
            endpoints = self._endpoints
            for row in self.stale:
                number = row.number
                if number < len(endpoints) and endpoints[number].row is row:  # else it has left
                    self._replace(columns, endpoints[number], now)
            self.stale.clear()
        self._num_reads += 1
        return columns

    def renew(self, pod: EndpointState, *, now: float) -> None:
        """Make an endpoint's row at once, if the last one was read. In a large pool many reports
        come between two decisions, and each decision would have to make all of these rows.
        """
        if self._columns is not None and pod.row.num_reads < self._num_reads:
            self.stale.pop(pod.row, None)
            self._replace(self._columns, pod, now)

    def _new_columns(self, now: float) -> Columns:
        self._due.clear()
        self.stale.clear()
        endpoints = self._endpoints
        columns = Columns([each.address for each in endpoints], [each.load for each in endpoints])
        for number, each in enumerate(endpoints):
            each.row.number, each.row.due_s = number, inf
            self._replace(columns, each, now)
        return columns

    def _expire(self, now: float) -> None:
        """Touch the rows that have expired. Most rows that are due were made anew meanwhile, and
        are due later."""
        due = self._due
        while due and now > due[0][0]:
            at_s, number = heappop(due)
            row = self._endpoints[number].row
            if at_s == row.due_s:  # else it became due earlier
                row.due_s = inf
                if now > row.expires_s:
                    row.touch()
                elif row.expires_s < inf:
                    self._schedule_expiry(row)

    def _schedule_expiry(self, row: PodRow) -> None:
        row.due_s = row.expires_s
        heappush(self._due, (row.due_s, row.number))

    def _replace(self, columns: Columns, pod: EndpointState, now: float) -> None:
        """Make an endpoint's row at `now`."""
        row, health, load = pod.row, pod.health, pod.load
        facts, ours, foreign = row.facts, pod.load.residency.in_flight, load.foreign.adapters
        if facts is None or now > row.facts_until_s:
            facts = row.facts = self._facts(pod, now)
        pending = {**foreign, **ours} if row.is_known and foreign else {**ours}
        standing = self._outliers.standing(pod.address, now=now)
        is_ejected, is_in_doubt, is_suspect, ends_s, is_well = standing
        expires_s = row.facts_until_s
        if now <= ends_s < expires_s:
            expires_s = ends_s
        num_failed = health.count_failures(pending, now) if health.failures else 0
        if num_failed:
            expires_s = min(expires_s, health.failures[0][0])
        row.expires_s = expires_s
        if expires_s < row.due_s:
            self._schedule_expiry(row)
        row.num_reads = self._num_reads
        is_gone = is_in_doubt or (health.is_unreachable and not health.answers)
        row.trouble = trouble = Trouble(num_failed, is_ejected, is_gone, is_suspect)
        has_flaw = health.is_unreachable or facts.is_silent or any(trouble[1:])
        is_idle = load.fullness.is_idle
        is_open = facts.is_ready and not (has_flaw or (not is_idle and load.is_full))
        columns.set(row.number, facts, pending, is_open=is_open)
        row.columns = columns
        load.settle()
        if num_failed or is_gone or not (is_well and is_idle):
            row.columns = None

    def _facts(self, pod: EndpointState, now: float) -> EndpointView:
        settings, report, at_s = self._settings, pod.reports.report, pod.reports.reported_at_s
        expires_s = pod.reports.expires_s(settings)
        is_known = pod.row.is_known = now <= expires_s
        pod.row.facts_until_s = expires_s if is_known else inf
        is_asleep, version = report is not None and report.is_asleep, pod.health.version or ""
        if report is None or not is_known:
            # Only what routers have sent counts, and what the engine had at its start.
            report = LoadReport(max_loras=report.max_loras if report else None)
            pod.load.residency.lapse()
        endpoint, flags = pod.endpoint, pod.flags
        is_awake = not is_asleep and pod.health.died_at_s is None
        return EndpointView(
            endpoint.address,
            endpoint.name or endpoint.address,
            is_ready=endpoint.is_ready and is_awake,
            is_known=is_known,
            reported_at_s=at_s,
            registered=pod.listed.registered,
            num_running=report.num_running,
            num_waiting=report.num_waiting,
            num_deferred=report.num_deferred or 0,
            kv_usage_ratio=report.kv_usage_ratio or 0.0,
            max_loras=report.max_loras or flags.max_loras,
            max_lora_rank=flags.max_lora_rank,
            reported_adapters=report.active_adapters,
            costs=pod.load.prompts.costs,
            is_owing=pod.listed.is_owing(is_known=is_known),
            is_unreachable=pod.health.is_unreachable,
            is_silent=not (is_known or pod.health.answers),
            has_old_report=is_known and pod.reports.trust.is_old,
            is_asleep=is_asleep,
            died_at_s=pod.health.died_at_s,
            engine_version=version,
            mixes_weights=mixes_weights(version, settings.safe_loads_since),
            is_last_resort=endpoint.is_last_resort and is_awake,
        )
