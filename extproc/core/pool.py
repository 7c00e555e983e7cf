"""Who exists, who is busy, who holds which adapter: the state that routing stands on.

Rules:
1. `start` and `finish` come exactly once per pick, whatever ends the request; a second `finish` of
   the same pick is answered with None and changes nothing.
2. A report is true at the moment it was taken. What we dispatched since is laid over it, and a
   report older than `report_expiry_s` is not trusted: the endpoint is then unknown, not idle.
3. A finish belongs to the endpoint object that the pick was started on: an endpoint that left and
   came back under the same address starts from zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from extproc.core.residency import Residency
from extproc.core.types import (
    Endpoint,
    EndpointView,
    LoadReport,
    ModelCard,
    Pick,
    Snapshot,
)

RESTART_TOLERANCE_S = 1.0
"""Start times of one process are equal up to float printing; a restart takes longer than this."""


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """What the pool is configured with.

    Attributes:
        report_expiry_s: Age from which a load report is not trusted.
        max_loras: Adapter slots per endpoint where its metrics page does not say; None for unknown.
        max_cpu_loras: Adapters in each endpoint's CPU cache; None means as many as GPU slots, which
            is vLLM's default.
    """

    report_expiry_s: float = 2.0
    max_loras: int | None = None
    max_cpu_loras: int | None = None


@dataclass(frozen=True, slots=True)
class InFlight:
    """A pick that has not finished, and the endpoint object that it was counted on."""

    pick: Pick
    started_at_s: float
    tracked: _Tracked


class _Tracked:
    """One endpoint's mutable state."""

    __slots__ = (
        "adapters",
        "endpoint",
        "flights",
        "foreign",
        "gpu_adapters",
        "models",
        "num_foreign",
        "num_loads",
        "registered",
        "report",
        "reported_at_s",
        "residency",
        "view",
        "view_expires_s",
    )

    def __init__(self, endpoint: Endpoint, settings: PoolSettings) -> None:
        self.endpoint = endpoint
        self.report: LoadReport | None = None
        self.reported_at_s: float | None = None
        self.models: dict[str, ModelCard] | None = None
        self.registered: frozenset[str] | None = None
        self.flights: dict[str, InFlight] = {}
        self.adapters: dict[str, int] = {}
        self.foreign: dict[str, int] = {}
        self.num_foreign = 0
        self.gpu_adapters: tuple[str, ...] = ()
        self.num_loads = 0
        self.residency = Residency(
            max_loras=settings.max_loras, max_cpu_loras=settings.max_cpu_loras
        )
        self.view: EndpointView | None = None
        self.view_expires_s = 0.0

    def set_models(self, models: dict[str, ModelCard] | None) -> None:
        """Replace what is registered there; None for unknown."""
        self.models, self.view = models, None
        self.registered = None if models is None else frozenset(models)

    def count_loads(self) -> None:
        """Count the adapters that have come into a GPU slot since the last call."""
        adapters = self.residency.gpu_adapters
        if adapters != self.gpu_adapters:
            self.num_loads += len(set(adapters).difference(self.gpu_adapters))
            self.gpu_adapters = adapters

    def estimate_foreign(self, report: LoadReport) -> None:
        """Count what others sent: all that the report has and we did not dispatch.

        The engine names active adapters without counts, so what is not ours is spread evenly over
        the active adapters that we have nothing in flight for, at least one each.
        """
        total = report.num_running + report.num_waiting
        self.num_foreign = max(0, total - len(self.flights))
        names = [name for name in report.active_adapters if name not in self.adapters]
        share = max(1, self.num_foreign // len(names)) if names and self.num_foreign else 0
        self.foreign = dict.fromkeys(names, share) if share else {}

    def pending_of_all(self) -> dict[str, int]:
        """Others' requests per adapter at the last report, and ours, those since then included."""
        pending = dict(self.foreign)
        for adapter, count in self.adapters.items():
            pending[adapter] = pending.get(adapter, 0) + count
        return pending


class Pool:
    """All endpoints of one base model, with bookkeeping."""

    def __init__(self, settings: PoolSettings | None = None) -> None:
        self._settings = settings or PoolSettings()
        self._tracked: dict[str, _Tracked] = {}
        self._flights: dict[str, InFlight] = {}
        self._by_request_id: dict[str, str] = {}
        self._models: dict[str, ModelCard] = {}

    # --- what the outside says --------------------------------------------------------------

    def configure(self, settings: PoolSettings) -> None:
        """Take new thresholds; slot counts apply to endpoints that come or restart from now on."""
        self._settings = settings
        for tracked in self._tracked.values():
            tracked.view = None

    def set_endpoints(self, endpoints: Iterable[Endpoint]) -> None:
        """Replace the set of endpoints; those that stay keep their state."""
        tracked: dict[str, _Tracked] = {}
        for endpoint in sorted(endpoints, key=lambda e: e.address):
            known = self._tracked.get(endpoint.address)
            if known is None:
                known = _Tracked(endpoint, self._settings)
            elif known.endpoint != endpoint:
                known.endpoint, known.view = endpoint, None
            tracked[endpoint.address] = known
        self._tracked = tracked
        self._index_models()

    def record_report(
        self,
        address: str,
        report: LoadReport,
        *,
        taken_at_s: float,
        asked_at_s: float | None = None,
    ) -> bool:
        """Take the result of a scrape. True if it shows that the process restarted.

        The report was true at some moment from `asked_at_s` to `taken_at_s`.
        """
        tracked = self._tracked.get(address)
        if tracked is None:
            return False
        restarted = _is_restart(tracked.report, report)
        if restarted:
            self._forget(tracked)
        tracked.report, tracked.reported_at_s = report, taken_at_s
        tracked.residency.record_report(report, taken_at_s=taken_at_s, asked_at_s=asked_at_s)
        tracked.estimate_foreign(report)
        tracked.view = None
        return restarted

    def record_models(self, address: str, cards: Sequence[ModelCard], *, now: float) -> None:
        """Take what an endpoint's `/v1/models` lists, in its order."""
        tracked = self._tracked.get(address)
        if tracked is None:
            return
        before = tracked.models or {}
        models = {card.id: _settled(before.get(card.id), card) for card in cards}
        adapters = [card.id for card in cards if card.parent is not None]
        if _has_start_time(tracked.report) or not (before.keys() - models.keys()):
            tracked.residency.record_registered(adapters, now=now)
        else:
            # Without a start time, names that vanish are the only sign of a restart.
            tracked.residency.forget()
            tracked.residency.record_registered(adapters, now=now)
        tracked.set_models(models)
        if models != before:
            self._index_models()

    def record_orca(self, address: str, load: tuple[float, int]) -> None:
        """Take (KV use, waiting requests) from a response header: newer than the last scrape."""
        tracked = self._tracked.get(address)
        if tracked is None or tracked.report is None:
            return
        kv_usage_ratio, num_waiting = load
        tracked.report = replace(
            tracked.report, kv_usage_ratio=kv_usage_ratio, num_waiting=num_waiting
        )
        tracked.view = None

    def unregister(self, address: str, model: str) -> bool:
        """Drop a name that an endpoint answered 404 for. True if it was registered there."""
        tracked = self._tracked.get(address)
        if tracked is None or not tracked.models or model not in tracked.models:
            return False
        tracked.set_models({k: card for k, card in tracked.models.items() if k != model})
        self._index_models()
        return True

    # --- accounting -------------------------------------------------------------------------

    def start(self, pick: Pick, *, now: float) -> None:
        """Count a request that goes to `pick.address` now.

        Raises:
            KeyError: The address is not in the pool.
        """
        tracked = self._tracked[pick.address]
        flight = InFlight(pick, now, tracked)
        self._flights[pick.id] = tracked.flights[pick.id] = flight
        if pick.request.request_id:
            self._by_request_id[pick.request.request_id] = pick.id
        adapter = pick.request.adapter
        if adapter is not None:
            tracked.adapters[adapter] = tracked.adapters.get(adapter, 0) + 1
            tracked.residency.start(adapter, now=now)
        tracked.view = None

    def finish(self, pick_id: str, *, now: float, has_run: bool = True) -> InFlight | None:
        """End a pick's accounting; None if it is not in flight (finished, expired, not ours).

        Args:
            pick_id: The pick.
            now: When the request ended, which may be a while ago.
            has_run: False if the endpoint's engine cannot have worked on it (refused, not reached).
        """
        flight = self._flights.pop(pick_id, None)
        if flight is None:
            return None
        pick, tracked = flight.pick, flight.tracked
        del tracked.flights[pick_id]
        if self._by_request_id.get(pick.request.request_id) == pick_id:
            del self._by_request_id[pick.request.request_id]
        adapter = pick.request.adapter
        if adapter is not None:
            left = tracked.adapters[adapter] - 1
            if left:
                tracked.adapters[adapter] = left
            else:
                del tracked.adapters[adapter]
            tracked.residency.finish(adapter, now=now, has_run=has_run)
        tracked.view = None
        return flight

    def pick_id_of(self, request_id: str) -> str | None:
        """The newest pick with this `x-request-id`, as long as it is in flight."""
        return self._by_request_id.get(request_id)

    def expire(self, *, now: float, max_age_s: float) -> list[InFlight]:
        """Finish every pick older than `max_age_s`; answer them, oldest first."""
        old = []
        for flight in self._flights.values():
            if now - flight.started_at_s <= max_age_s:
                break
            old.append(flight)
        for flight in old:
            self.finish(flight.pick.id, now=now, has_run=False)
        return old

    def reconcile(self, address: str, *, now: float, grace_s: float) -> list[InFlight]:
        """Finish the picks that the endpoint's last report leaves no room for, oldest first.

        A pick younger than `grace_s` when the report was taken may not have arrived there yet and
        is not judged.
        """
        tracked = self._tracked.get(address)
        if tracked is None or tracked.report is None or tracked.reported_at_s is None:
            return []
        report = tracked.report
        old = []
        for flight in tracked.flights.values():
            if tracked.reported_at_s - flight.started_at_s < grace_s:
                break
            old.append(flight)
        lost = old[: max(0, len(old) - report.num_running - report.num_waiting)]
        for flight in lost:
            self.finish(flight.pick.id, now=now)
        return lost

    # --- what may be read -------------------------------------------------------------------

    @property
    def num_in_flight(self) -> int:
        """Picks that have not finished."""
        return len(self._flights)

    def oldest_in_flight_s(self, address: str, *, now: float) -> float:
        """Age in seconds of the oldest unfinished pick there, 0 if there is none."""
        tracked = self._tracked.get(address)
        if tracked is None or not tracked.flights:
            return 0.0
        return now - next(iter(tracked.flights.values())).started_at_s

    def model(self, name: str) -> ModelCard | None:
        """What is registered under `name` on any endpoint."""
        return self._models.get(name)

    def models(self) -> list[ModelCard]:
        """Everything registered on any endpoint."""
        return list(self._models.values())

    def snapshot(self, *, now: float) -> Snapshot:
        """The pool at `now`, sorted by address. Only endpoints that changed are looked at anew."""
        views = []
        for tracked in self._tracked.values():
            view = tracked.view
            if view is None or now > tracked.view_expires_s:
                view = self._view(tracked, now)
            views.append(view)
        return Snapshot(tuple(views), now)

    # --- inside -----------------------------------------------------------------------------

    def _view(self, tracked: _Tracked, now: float) -> EndpointView:
        report, at_s = tracked.report, tracked.reported_at_s
        expires_s = float("inf") if at_s is None else at_s + self._settings.report_expiry_s
        is_known = at_s is not None and now <= expires_s
        tracked.view_expires_s = expires_s if is_known else float("inf")
        if report is None or not is_known:
            report = LoadReport(max_loras=report.max_loras if report else None)
        pending, num_pending = tracked.adapters, len(tracked.flights)
        if is_known and tracked.num_foreign:
            pending, num_pending = tracked.pending_of_all(), num_pending + tracked.num_foreign
        residency, endpoint = tracked.residency, tracked.endpoint
        tracked.count_loads()
        view = tracked.view = EndpointView(
            address=endpoint.address,
            name=endpoint.name or endpoint.address,
            is_ready=endpoint.is_ready,
            is_known=is_known,
            reported_at_s=at_s,
            registered=tracked.registered,
            gpu_adapters=tracked.gpu_adapters,
            cpu_adapters=residency.cpu_adapters,
            pending_by_adapter=MappingProxyType(dict(pending)),
            num_pending=num_pending,
            num_in_flight=len(tracked.flights),
            num_running=report.num_running,
            num_waiting=report.num_waiting,
            num_deferred=report.num_deferred or 0,
            kv_usage_ratio=report.kv_usage_ratio or 0.0,
            max_loras=report.max_loras or self._settings.max_loras,
            num_adapter_loads=tracked.num_loads,
        )
        return view

    def _forget(self, tracked: _Tracked) -> None:
        tracked.set_models(None)
        tracked.residency.forget()
        self._index_models()

    def _index_models(self) -> None:
        self._models = {
            name: card
            for tracked in self._tracked.values()
            for name, card in (tracked.models or {}).items()
        }


def _settled(before: ModelCard | None, now: ModelCard) -> ModelCard:
    """The card kept of a model: vLLM's `created` is the time of its answer, not the model's."""
    if before is None or (before.parent, before.root) != (now.parent, now.root):
        return now
    return before


def _has_start_time(report: LoadReport | None) -> bool:
    return report is not None and report.process_start_wall_s is not None


def _is_restart(before: LoadReport | None, after: LoadReport) -> bool:
    if before is None or before.process_start_wall_s is None or after.process_start_wall_s is None:
        return False
    return abs(after.process_start_wall_s - before.process_start_wall_s) > RESTART_TOLERANCE_S
