"""The views of a pool's endpoints, made anew where something has changed.

No request changes most of a view. These *facts* are made anew where a report, a listing or a call
of ours has brought news. The rest is made at each pick and each end as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf
from types import MappingProxyType
from typing import Any

from extproc.fleet.columns import Columns
from extproc.fleet.outliers import Outliers
from extproc.fleet.podstate import mixes_weights
from extproc.fleet.serverflags import PoolSettings
from extproc.fleet.tracked import Tracked
from extproc.types import EndpointView, LoadReport

_Facts = tuple[Any, ...]
"""The first attributes of a view, in their order."""
_make: Callable[..., EndpointView] = EndpointView
_read_only = MappingProxyType
_IS_KNOWN = EndpointView.__struct_fields__.index("is_known")


class Views:
    """The views of some endpoints, which are sorted by address.

    Attributes:
        stale: The endpoints whose views are no longer true; they add themselves.
    """

    def __init__(self, settings: PoolSettings, outliers: Outliers) -> None:
        self._settings, self._outliers = settings, outliers
        self.stale: dict[Tracked, None] = {}
        self._endpoints: list[Tracked] = []
        self._columns: Columns | None = None
        self._until_s = inf  # before that, no other view expires
        self._num_reads = 0
        self._made_at: list[int] = []  # reads before each view was made, by row

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
        """Make an endpoint's view at once, if the last one was read. In a large pool many reports
        come between two decisions, and each decision would have to make all of these views.
        """
        if self._columns is not None and self._made_at[tracked.row] < self._num_reads:
            self.stale.pop(tracked, None)
            self._replace(self._columns, tracked, now)

    def _new_columns(self, now: float) -> Columns:
        self._until_s = inf
        self.stale.clear()
        for row, each in enumerate(self._endpoints):
            each.row = row
        self._made_at = [0] * len(self._endpoints)
        return Columns([self._view(each, now) for each in self._endpoints])

    def _expire(self, now: float) -> None:
        self._until_s = inf
        for each in self._endpoints:
            if now > each.view_expires_s:
                each.touch()
            self._until_s = min(self._until_s, each.view_expires_s)

    def _replace(self, columns: Columns, tracked: Tracked, now: float) -> None:
        before, facts = columns.views[tracked.row], tracked.facts
        view = self._view(tracked, now)
        is_closed = view.is_full or view.is_ejected or view._is_gone or view._is_suspect
        was_closed = before.is_full or before.is_ejected or before._is_gone or before._is_suspect
        if facts is not tracked.facts or is_closed or was_closed:
            columns.set(tracked.row, view)
        else:
            columns.recount(tracked.row, view, tracked.changed)
        tracked.changed.clear()

    def _view(self, tracked: Tracked, now: float) -> EndpointView:
        """Make the view of an endpoint at `now`."""
        facts, others, adapters = tracked.facts, tracked.others, tracked.adapters
        if facts is None or now > tracked.facts_until_s:
            facts = tracked.facts = self._facts(tracked, now)
        num_ours, num_told, is_known = tracked.num_sequences, others.num_told, facts[_IS_KNOWN]
        num_pending, num_foreign, num_unseen = num_ours + num_told, 0, 0
        is_mixed = is_known and others.adapters
        pending = {**others.adapters, **adapters} if is_mixed else adapters.copy()
        if is_known and others.num_foreign:
            steady = others.num_steady
            num_foreign = others.num_foreign - steady
            num_pending += steady
        if is_known and others.num_before:
            num_unseen = others.num_unseen
        num_there = num_pending + num_foreign
        standing = self._outliers.standing(tracked.address, now=now)
        is_ejected, is_in_doubt, is_suspect, ends_s = standing
        expires_s = tracked.facts_until_s
        if now <= ends_s < expires_s:
            expires_s = ends_s
        if tracked.failures and (num_failed := tracked.count_failures(pending, now)):
            # They count for a choice, and no request is rejected for them.
            num_pending, num_unseen = num_pending + num_failed, num_unseen + num_failed
            expires_s = min(expires_s, tracked.failures[0][0])
        tracked.view_expires_s = expires_s
        if expires_s < self._until_s:
            self._until_s = expires_s
        self._made_at[tracked.row] = self._num_reads
        gpu_adapters, cpu_adapters = tracked.arrange()
        most, num_taken = tracked.room.places(
            num_there, tracked.traits.max_in_flight, is_known=is_known, now=now
        )
        view = tracked.view = _make(
            *facts,
            gpu_adapters,
            cpu_adapters,
            _read_only(pending),
            num_pending,
            num_ours,
            num_told,
            num_unseen,
            num_foreign,
            tracked.num_loads,
            tracked.prompts.done_s,
            is_ejected,
            is_in_doubt or (tracked.is_unreachable and not tracked.answers),
            is_suspect,
            tracked.fullness.is_full(num_there),
            num_taken < most,
            tracked.response_s,
        )
        return view

    def _facts(self, tracked: Tracked, now: float) -> _Facts:
        settings, report, at_s = self._settings, tracked.report, tracked.reported_at_s
        is_known = tracked.is_fresh(now, settings)
        tracked.facts_until_s = inf
        if at_s is not None and is_known:
            tracked.facts_until_s = at_s + settings.report_expiry_s
        elif now < tracked.room.lost_s:
            tracked.facts_until_s = tracked.room.lost_s
        is_asleep, version = report is not None and report.is_asleep, tracked.version or ""
        if report is None or not is_known:
            # Only what routers have sent counts, and what the engine had at its start.
            report = LoadReport(max_loras=report.max_loras if report else None)
            tracked.residency.lapse()
        endpoint, traits = tracked.endpoint, tracked.traits
        is_awake = not is_asleep and tracked.died_at_s is None
        return (
            endpoint.address,
            endpoint.name or endpoint.address,
            endpoint.is_ready and is_awake,
            is_known,
            at_s,
            tracked.registered,
            report.num_running,
            report.num_waiting,
            report.num_deferred or 0,
            report.kv_usage_ratio or 0.0,
            report.max_loras or traits.max_loras,
            traits.max_lora_rank,
            report.active_adapters,
            tracked.prompts.costs,
            tracked.is_owing(is_known),
            tracked.is_unreachable,
            not (is_known or tracked.answers),
            is_known and tracked.belief.is_old,
            is_asleep,
            tracked.died_at_s,
            version,
            mixes_weights(version, settings.safe_loads_since),
            endpoint.is_last_resort and is_awake,
        )
