"""The endpoints, their load and their adapters: the state that routing is based on.

Rules:
1. `start` and `finish` come exactly once per pick, whatever ends the request; a second `finish` of
   the same pick returns None and changes nothing.
2. A report is true at the moment it was taken. Our dispatches since are added to it, and a report
   older than `report_expiry_s` is not trusted: the endpoint is then unknown, not idle.
3. A finish belongs to the endpoint object that the pick was started on: an endpoint that left and
   came back under the same address starts from zero.
4. An endpoint is believed about itself only. Where a name must mean one thing for all of them, the
   majority decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile

from msgspec.structs import replace

from extproc.core.beginnings import Beginnings, with_cached
from extproc.core.cpucaches import CpuCaches
from extproc.core.modelindex import ModelIndex, card_to_keep
from extproc.core.outliers import Outliers, OutlierSettings
from extproc.core.told import PickObserver, Told, ToldPick
from extproc.core.tracked import InFlight, Tracked, is_restart
from extproc.core.traits import PoolSettings
from extproc.core.types import Endpoint, LoadReport, ModelCard, Pick, Snapshot
from extproc.core.verdicts import Verdict, verdicts

__all__ = ["InFlight", "Pool", "PoolSettings"]


class Pool:
    """All endpoints of one base model, with bookkeeping.

    Attributes:
        caches: The sizes of their CPU caches.
        beginnings: Of prompts, in their KV caches.
    """

    def __init__(
        self, settings: PoolSettings | None = None, outliers: OutlierSettings | None = None
    ) -> None:
        self._settings = settings or PoolSettings()
        self.caches = CpuCaches(self._settings)
        self.beginnings = Beginnings()
        self.outliers = Outliers(outliers)
        self._tracked: dict[str, Tracked] = {}
        self._flights: dict[str, InFlight] = {}
        self._by_request_id: dict[str, str] = {}
        self._models = ModelIndex()
        self._num_routers = 1
        self.told = Told(lambda address: self._tracked.get(address))
        self.observer: PickObserver | None = None

    # --- reports ----------------------------------------------------------------------------

    def configure(self, settings: PoolSettings, outliers: OutlierSettings | None = None) -> None:
        """Apply new thresholds and traits."""
        self._settings = settings
        self.outliers.configure(outliers or OutlierSettings())
        for tracked in self._tracked.values():
            tracked.describe(tracked.endpoint, settings)
        self.caches.configure(settings, self._tracked.values())

    def set_num_routers(self, num_routers: int) -> None:
        """Record how many routers use these endpoints, this one included."""
        self._num_routers = num_routers

    def set_endpoints(self, endpoints: Iterable[Endpoint]) -> None:
        """Replace the set of endpoints; those that stay keep their state."""
        tracked: dict[str, Tracked] = {}
        for endpoint in sorted(endpoints, key=lambda e: e.address):
            known = self._tracked.get(endpoint.address) or Tracked(endpoint, self._settings)
            known.describe(endpoint, self._settings)
            tracked[endpoint.address] = known
        gone = [each for address, each in self._tracked.items() if address not in tracked]
        self._tracked = tracked
        self.caches.set_endpoints(tracked.values())
        self.outliers.set_endpoints(tracked)
        for each in gone:
            each.kv_cache.lose()
            self.told.drop(each)
            self._models.replace(each.models or {}, {}, self._lists())

    def record_report(
        self,
        address: str,
        report: LoadReport,
        *,
        taken_at_s: float,
        asked_at_s: float | None = None,
    ) -> bool:
        """Record a report, true at some moment from `asked_at_s` to `taken_at_s`.

        Return whether it shows that the process restarted.
        """
        tracked = self._tracked.get(address)
        if tracked is None:
            return False
        restarted = is_restart(tracked.report, report)
        if restarted:
            before = tracked.models or {}
            self.told.drop(tracked)
            tracked.restart(taken_at_s)
            self._models.replace(before, {}, self._lists())
        asked_at_s = taken_at_s if asked_at_s is None else asked_at_s
        tracked.answered(self.outliers, asked_at_s, now=taken_at_s, restarted=restarted)
        self.caches.of(tracked).record_reports(None if restarted else tracked.report, report)
        tracked.set_report(report, taken_at_s=taken_at_s)
        tracked.residency.record_report(report, taken_at_s=taken_at_s, asked_at_s=asked_at_s)
        num_ours, adapters = len(tracked.flights), tracked.adapters
        tracked.others.record_report(report, num_ours, adapters, now=taken_at_s)
        return restarted

    def record_models(
        self,
        address: str,
        cards: Sequence[ModelCard],
        *,
        now: float,
        asked_at_s: float | None = None,
    ) -> None:
        """Record the models that an endpoint lists, in its order; requested at `asked_at_s`."""
        tracked = self._tracked.get(address)
        if tracked is None:
            return
        asked_at_s = now if asked_at_s is None else asked_at_s
        tracked.answered(self.outliers, asked_at_s, now=now)
        before = tracked.models or {}
        models = {card.id: card_to_keep(before.get(card.id), card) for card in cards}
        adapters = [card.id for card in cards if card.parent is not None]
        report = tracked.report
        if (report is None or report.process_start_wall_s is None) and before.keys() - models:
            # Without a start time, names that vanish are the only sign of a restart.
            tracked.others.leave_to_reports(self.told.drop(tracked))
            tracked.prompts.bound(now)
            tracked.forget_memory()
        tracked.residency.record_registered(adapters, now=now)
        if models != before or tracked.models is None:
            tracked.set_models(models)
            self._models.replace(before, models, self._lists())
        tracked.num_silences, tracked.view = 0, None

    def record_silence(self, address: str) -> None:
        """Record that an endpoint failed to list its models."""
        tracked = self._tracked.get(address)
        if tracked is not None and tracked.models is None:
            tracked.num_silences, tracked.view = tracked.num_silences + 1, None

    def record_unreachable(self, address: str) -> None:
        """Record that a call of our own could not connect: refused, or no route.

        That holds until a call succeeds, even when all reports have expired. A timeout does not
        count: it may be this process that was stopped.
        """
        tracked = self._tracked.get(address)
        if tracked is not None:
            tracked.is_unreachable, tracked.view = True, None

    def record_orca(self, address: str, load: tuple[float, int]) -> None:
        """Record (KV use, waiting requests) from a response header: newer than the last scrape."""
        tracked = self._tracked.get(address)
        if tracked is None or tracked.report is None:
            return
        kv_usage_ratio, num_waiting = load
        tracked.report = replace(
            tracked.report, kv_usage_ratio=kv_usage_ratio, num_waiting=num_waiting
        )
        tracked.view = None

    # --- accounting -------------------------------------------------------------------------

    def start(self, pick: Pick, *, now: float) -> None:
        """Count a request that is sent to `pick.address` now, which must be in the pool."""
        tracked = self._tracked[pick.address]
        adapter = tracked.adapter_of(pick)
        place = tracked.place_of(pick.request, adapter)
        kept = with_cached(pick, pick.request.cached_bytes)
        self._count(InFlight(kept, now, tracked, adapter, place=place, group=tracked.group), now)
        if pick.request.request_id:
            self._by_request_id[pick.request.request_id] = pick.id

    def start_told(self, pick: Pick, *, now: float) -> bool:
        """Count a pick that we made for another router, as if that one had told of it.

        Return False if there is no room to count it.
        """
        request, address = pick.request, pick.address
        rest_bytes = request.rest_bytes(address)
        self.told.start(ToldPick(pick.id, address, request.adapter, rest_bytes, 0.0), now=now)
        if not self.told.is_counted(pick.id):
            return False
        self.beginnings.add(request, self._tracked[address].kv_cache)
        return True

    def move(self, pick_id: str, address: str, *, now: float) -> bool:
        """Count a pick at `address` instead: the data plane fell back to another endpoint.

        Return False if it does not move: not in flight, already there, or the address unknown.
        """
        flight, tracked = self._flights.get(pick_id), self._tracked.get(address)
        if flight is None or tracked is None or tracked is flight.tracked:
            return False
        flight.tracked.end(flight, now=now, has_run=False)
        flight.tracked.prompts.bound(now)
        self._judge(flight, {}, now=now)
        request = flight.pick.request
        self.beginnings.drop(request, flight.tracked.kv_cache)
        pick = with_cached(flight.pick, self.beginnings.find(request), address)
        self._count(InFlight(pick, flight.started_at_s, tracked, tracked.adapter_of(pick)), now)
        return True

    def finish(
        self,
        pick_id: str,
        *,
        now: float,
        reported_at_s: float | None = None,
        has_run: bool = True,
        verdict: Verdict = Verdict.NONE,
        address: str = "",
        num_attempts: int = 1,
    ) -> InFlight | None:
        """End a pick's accounting; return None if it is not in flight: ended before, or not ours.

        The request ended at `now`, which was reported at `reported_at_s` (None for `now`).
        `has_run` is False if the endpoint's engine cannot have worked on it (refused, not reached).
        For the rest see `verdicts`.
        """
        flight = self._flights.pop(pick_id, None)
        if flight is None:
            return None
        request = flight.pick.request
        if self._by_request_id.get(request.request_id) == pick_id:
            del self._by_request_id[request.request_id]
        judged = verdicts(flight.pick, verdict, address=address, num_attempts=num_attempts)
        served = self._tracked.get(address, flight.tracked)
        has_run_here = has_run and served is flight.tracked
        flight.tracked.end(flight, now=now, has_run=has_run_here)
        flight.tracked.prompts.bound(now if reported_at_s is None else reported_at_s)
        if not has_run_here:
            self.beginnings.drop(request, flight.tracked.kv_cache)
        if served is not flight.tracked:
            served.note(served.adapter_of(flight.pick), now=now, has_run=has_run)
            if has_run:
                served.kv_cache.computed_bytes += request.rest_bytes(address)
                self.beginnings.add(request, served.kv_cache)
        if self.observer is not None:
            self.observer.ended(pick_id, now=now, has_run=has_run_here)
        self._judge(flight, judged, now=now, reported_at_s=reported_at_s)
        return flight

    def pick_id_of(self, request_id: str) -> str | None:
        """Return the newest pick in flight with this `x-request-id`."""
        return self._by_request_id.get(request_id)

    def expire(self, *, now: float, max_age_s: float) -> list[InFlight]:
        """Finish every pick older than `max_age_s`; return them, oldest first.

        Other routers' picks end by an age of their own.
        """
        self.told.expire(now=now)
        flights = self._flights.values()
        old = list(takewhile(lambda each: now - each.started_at_s > max_age_s, flights))
        for flight in old:
            self.finish(flight.pick.id, now=now, has_run=False)
        return old

    def reconcile(self, address: str, *, now: float, grace_s: float) -> list[InFlight]:
        """Finish the oldest picks, as many as the endpoint's last report does not account for.

        A pick younger than `grace_s` when the report was taken may not have arrived there yet and
        is not judged. Other routers' picks end first: of ours we know the end.
        """
        tracked = self._tracked.get(address)
        if tracked is None or tracked.report is None or tracked.reported_at_s is None:
            return []
        report, at_s = tracked.report, tracked.reported_at_s
        total = report.num_running + report.num_waiting
        old = []
        for flight in tracked.flights.values():
            if at_s - flight.started_at_s < grace_s:
                break
            old.append(flight)
        if tracked.others.flights:
            self.told.reconcile(tracked, total - len(old), told_by_s=at_s - grace_s, now=now)
        lost = old[: max(0, len(old) - total)]
        for flight in lost:
            self.finish(flight.pick.id, now=now)
        return lost

    # --- state ------------------------------------------------------------------------------

    @property
    def num_in_flight(self) -> int:
        """Picks that have not finished."""
        return len(self._flights)

    def flights(self) -> Iterable[InFlight]:
        """Return the picks that have not finished."""
        return self._flights.values()

    def oldest_in_flight_s(self, *, now: float) -> dict[str, float]:
        """Return the age in seconds of each endpoint's oldest unfinished pick, 0 without any."""
        return {address: each.oldest_s(now) for address, each in self._tracked.items()}

    def model(self, name: str) -> ModelCard | None:
        """Return the model registered under `name` on any endpoint."""
        return self._models.by_name.get(name)

    @property
    def registry(self) -> Mapping[str, ModelCard]:
        """All models of all endpoints, by name: a new object after each change, never mutated."""
        return self._models.by_name

    def snapshot(self, *, now: float) -> Snapshot:
        """Return the pool at `now`, sorted by address. Only endpoints that changed cost time."""
        views = []
        for tracked in self._tracked.values():
            view = tracked.view
            if view is None or now > tracked.view_expires_s:
                view = tracked.make_view(now, self._settings, self.outliers)
            views.append(view)
        return Snapshot(tuple(views), now, self._num_routers)

    # --- inside -----------------------------------------------------------------------------

    def _count(self, flight: InFlight, now: float) -> None:
        """Count a flight, as a trial if its endpoint is on one."""
        pick, tracked, address = flight.pick, flight.tracked, flight.tracked.endpoint.address
        # Routers that do not tell us theirs are assumed to send as much as this one.
        tracked.prompts.num_alike = max(1, self._num_routers - self.told.num_routers)
        num_bytes = pick.request.rest_bytes(address) * tracked.prompts.num_alike
        tracked.queue(flight.adapter, num_bytes, at_s=flight.started_at_s, now=now)
        self.beginnings.add(pick.request, tracked.kv_cache)
        trial = self.outliers.begin(address, now=now)
        flight = replace(flight, trial=trial) if trial else flight
        self._flights[pick.id] = flight
        tracked.begin(flight)
        if self.observer is not None:
            self.observer.started(pick, address, at_s=flight.started_at_s)

    def _judge(
        self,
        flight: InFlight,
        judged: dict[str, Verdict],
        *,
        now: float,
        reported_at_s: float | None = None,
    ) -> None:
        """Report a request's end, and the verdicts on its endpoints, to outlier detection."""
        counted, at_s = flight.tracked, now if reported_at_s is None else reported_at_s
        for address, verdict in {counted.endpoint.address: Verdict.NONE, **judged}.items():
            tracked = self._tracked.get(address)
            if tracked is None or (tracked is not counted and address == counted.endpoint.address):
                continue  # it has left, even if another has joined under its address
            trial = flight.trial if tracked is counted else 0
            self.outliers.end(address, verdict, now=at_s, ended_s=now, trial=trial)
            tracked.view = None

    def _lists(self) -> Iterable[dict[str, ModelCard] | None]:
        return (tracked.models for tracked in self._tracked.values())
