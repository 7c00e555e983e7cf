"""Keeps the columns of a pool's endpoints true.

No request changes most of what is known of an endpoint. These *facts* are made anew where a report,
a listing or a call of ours has brought news. An endpoint in no trouble writes what a request
changes there into its row at once (`Tracked.columns`). Any other one is *stale* after each change:
its row is made anew when somebody asks.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from extproc.learned.outliers import Outliers
from extproc.pods.columns import Columns
from extproc.pods.podstate import mixes_weights
from extproc.pods.serverflags import PoolSettings
from extproc.pods.tracked import Tracked, Trouble
from extproc.types import EndpointView, LoadReport


class Views:
    """The columns of some endpoints, which are sorted by address.

    Attributes:
        stale: The endpoints whose rows are no longer true; they add themselves.
    """

    def __init__(self, settings: PoolSettings, outliers: Outliers) -> None:
        self._settings, self._outliers = settings, outliers
        self.stale: dict[Tracked, None] = {}
        self._endpoints: list[Tracked] = []
        self._columns: Columns | None = None
        self._until_s = inf  # before that, no other row expires
        self._num_reads = 0
        self._made_at: list[int] = []  # reads before each row was made

    def configure(self, settings: PoolSettings) -> None:
        """Apply other thresholds to what is made from now on."""
        self._settings = settings

    def set_endpoints(self, endpoints: Iterable[Tracked]) -> None:
        """Replace the endpoints."""
        endpoints = list(endpoints)
        if endpoints != self._endpoints:
            self._endpoints, self._columns = endpoints, None

    def columns(self, *, now: float) -> Columns:
        """Return the columns at `now`; true until something is recorded."""
        columns = self._columns
        if columns is None:
            columns = self._columns = self._new_columns(now)
        elif now > self._until_s:
            self._expire(now)
        if self.stale:
            endpoints = self._endpoints
            for each in self.stale:
                row = each.row
                if row < len(endpoints) and endpoints[row] is each:  # else it has left
                    self._replace(columns, each, now)
            self.stale.clear()
        self._num_reads += 1
        return columns

    def renew(self, tracked: Tracked, *, now: float) -> None:
        """Make an endpoint's row at once, if the last one was read. In a large pool many reports
        come between two decisions, and each decision would have to make all of these rows.
        """
        if self._columns is not None and self._made_at[tracked.row] < self._num_reads:
            self.stale.pop(tracked, None)
            self._replace(self._columns, tracked, now)

    def _new_columns(self, now: float) -> Columns:
        self._until_s = inf
        self.stale.clear()
        endpoints = self._endpoints
        columns = Columns([each.address for each in endpoints], endpoints)
        self._made_at = [0] * len(endpoints)
        for row, each in enumerate(endpoints):
            each.row = row
            self._replace(columns, each, now)
        return columns

    def _expire(self, now: float) -> None:
        self._until_s = inf
        for each in self._endpoints:
            if now > each.expires_s:
                each.touch()
            self._until_s = min(self._until_s, each.expires_s)

    def _replace(self, columns: Columns, tracked: Tracked, now: float) -> None:
        """Make an endpoint's row at `now`."""
        facts, others = tracked.facts, tracked.others
        if facts is None or now > tracked.facts_until_s:
            facts = tracked.facts = self._facts(tracked, now)
        is_mixed = tracked.is_known and others.adapters
        pending = {**others.adapters, **tracked.adapters} if is_mixed else {**tracked.adapters}
        standing = self._outliers.standing(tracked.address, now=now)
        is_ejected, is_in_doubt, is_suspect, ends_s = standing
        expires_s = tracked.facts_until_s
        if now <= ends_s < expires_s:
            expires_s = ends_s
        num_failed = tracked.count_failures(pending, now)
        if num_failed:
            expires_s = min(expires_s, tracked.failures[0][0])
        tracked.expires_s = expires_s
        if expires_s < self._until_s:
            self._until_s = expires_s
        self._made_at[tracked.row] = self._num_reads
        is_gone = is_in_doubt or (tracked.is_unreachable and not tracked.answers)
        tracked.trouble = Trouble(num_failed, is_ejected, is_gone, is_suspect)
        has_flaw = tracked.is_unreachable or facts._is_silent or any(tracked.trouble[1:])
        is_open = facts.is_ready and not (has_flaw or tracked.is_full)
        columns.set(tracked.row, facts, pending, is_open=is_open)
        tracked.columns = columns
        tracked.settle()
        is_well = self._outliers.is_well(tracked.address) and tracked.fullness.is_idle
        if num_failed or is_gone or not is_well:
            tracked.columns = None

    def _facts(self, tracked: Tracked, now: float) -> EndpointView:
        settings, report, at_s = self._settings, tracked.report, tracked.reported_at_s
        expires_s = tracked.report_expires_s(settings)
        is_known = tracked.is_known = now <= expires_s
        tracked.facts_until_s = expires_s if is_known else inf
        is_asleep, version = report is not None and report.is_asleep, tracked.version or ""
        if report is None or not is_known:
            # Only what routers have sent counts, and what the engine had at its start.
            report = LoadReport(max_loras=report.max_loras if report else None)
            tracked.residency.lapse()
        endpoint, traits = tracked.endpoint, tracked.traits
        is_awake = not is_asleep and tracked.died_at_s is None
        return EndpointView(
            endpoint.address,
            endpoint.name or endpoint.address,
            is_ready=endpoint.is_ready and is_awake,
            is_known=is_known,
            reported_at_s=at_s,
            registered=tracked.registered,
            num_running=report.num_running,
            num_waiting=report.num_waiting,
            _num_deferred=report.num_deferred or 0,
            kv_usage_ratio=report.kv_usage_ratio or 0.0,
            max_loras=report.max_loras or traits.max_loras,
            _max_lora_rank=traits.max_lora_rank,
            _reported_adapters=report.active_adapters,
            costs=tracked.prompts.costs,
            _is_owing=tracked.is_owing(is_known),
            _is_unreachable=tracked.is_unreachable,
            _is_silent=not (is_known or tracked.answers),
            _has_old_report=is_known and tracked.belief.is_old,
            _is_asleep=is_asleep,
            _died_at_s=tracked.died_at_s,
            _engine_version=version,
            _mixes_weights=mixes_weights(version, settings.safe_loads_since),
            _is_last_resort=endpoint.is_last_resort and is_awake,
        )
