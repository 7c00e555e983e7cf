"""One endpoint's state in the pool: its reports, our requests there, and the view made of both."""

from __future__ import annotations

from math import inf
from types import MappingProxyType

from msgspec import Struct

from extproc.core.cachesize import MAX_BODY_BYTES
from extproc.core.outliers import Outliers, Verdict
from extproc.core.residency import Residency
from extproc.core.types import (
    Endpoint,
    EndpointView,
    LoadReport,
    ModelCard,
    Pick,
    RequestInfo,
)

RESTART_TOLERANCE_S = 1.0
"""Start times of one process are equal up to float printing; a restart takes longer than this."""
MAX_SILENCES = 3
"""Failed listings after which an endpoint with load reports is no longer waited for."""
MIN_LIFE_S = 10.0
"""A process that restarts sooner than this is neither waited for nor tried."""


class PoolSettings(Struct, frozen=True):
    """Settings of the pool.

    Attributes:
        max_loras: Adapter slots per endpoint where its metrics page does not say; None for unknown.
        max_cpu_loras: Adapters in each endpoint's CPU cache; None means as many as GPU slots, which
            is vLLM's default.
    """

    report_expiry_s: float = 2.0  # age from which a load report is not trusted
    max_loras: int | None = None
    max_cpu_loras: int | None = None


class InFlight(Struct, frozen=True):
    """A pick that has not finished, and the endpoint object that it is counted on."""

    pick: Pick
    started_at_s: float
    tracked: Tracked
    adapter: str | None = None  # that it counts for there, None for a base model
    trial: int = 0  # of outlier detection: the result of `Outliers.begin`
    place: int | None = None  # of its adapter there, where its first token tells (`cachesize`)


class Tracked:
    """One endpoint's mutable state."""

    __slots__ = (
        *("adapters", "returned_at_s", "endpoint", "flights", "foreign", "gpu_adapters"),
        *("is_unreachable", "is_waited_for", "models", "num_foreign", "num_loads", "num_silences"),
        *("registered", "report", "reported_at_s", "residency", "restarted_at_s", "view"),
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
        self.is_unreachable = False
        self.is_waited_for = True
        self.num_silences = 0
        self.restarted_at_s = self.returned_at_s = -inf
        self.residency = Residency(
            max_loras=settings.max_loras, max_cpu_loras=settings.max_cpu_loras
        )
        self.view: EndpointView | None = None
        self.view_expires_s = 0.0

    def answered(
        self, outliers: Outliers, asked_at_s: float, *, now: float, restarted: bool = False
    ) -> None:
        """Record that it answered a call of ours."""
        address = self.endpoint.address
        outliers.record_answer(address, asked_at_s=asked_at_s)
        if restarted or self.is_unreachable:
            if now - self.returned_at_s >= MIN_LIFE_S:
                outliers.record_restart(address, now=now)
            self.returned_at_s = now
        self.is_unreachable, self.view = False, None

    def set_models(self, models: dict[str, ModelCard] | None) -> None:
        """Replace the models registered there; None for unknown."""
        self.models, self.view = models, None
        self.registered = None if models is None else frozenset(models)

    def restart(self, now: float) -> None:
        """Forget the state of the process before the restart."""
        self.is_waited_for = now - self.restarted_at_s >= MIN_LIFE_S
        self.num_silences, self.restarted_at_s = 0, now
        self.set_models(None)
        self.residency.forget()

    def is_owing(self, is_known: bool) -> bool:
        """Return whether its models are still to be listed: new or restarted, not just silent."""
        if self.models is not None or not self.is_waited_for:
            return False
        return self.num_silences < (MAX_SILENCES if is_known else 1)

    def adapter_of(self, pick: Pick) -> str | None:
        """Return the adapter that a pick is for here, by the endpoint's list if it has the name."""
        request = pick.request
        card = None if self.models is None else self.models.get(request.model)
        if card is None:
            return request.adapter
        return None if card.parent is None else card.id

    def place_of(self, request: RequestInfo, adapter: str | None) -> int | None:
        """Return the place of a request's adapter, None where its first token tells nothing."""
        report, slots = self.report, self.residency.num_slots
        if adapter is None or slots is None or request.body_bytes > MAX_BODY_BYTES:
            return None
        if report is None or report.cpu_adapters is not None:
            return None
        if adapter in self.adapters or adapter in self.foreign:
            return None
        has_free_slot = len(self.adapters.keys() | self.foreign.keys()) < slots
        return self.residency.place(adapter) if has_free_slot else None

    def begin(self, flight: InFlight) -> None:
        """Count a pick here."""
        self.flights[flight.pick.id] = flight
        adapter = flight.adapter
        if adapter is not None:
            self.adapters[adapter] = self.adapters.get(adapter, 0) + 1
            self.residency.start(adapter)
        self.view = None

    def end(self, flight: InFlight, *, now: float, has_run: bool) -> None:
        """Stop counting a pick; `has_run` is False if the engine cannot have worked on it."""
        del self.flights[flight.pick.id]
        adapter = flight.adapter
        if adapter is not None:
            left = self.adapters[adapter] - 1
            if left:
                self.adapters[adapter] = left
            else:
                del self.adapters[adapter]
            self.residency.finish(adapter, now=now, has_run=has_run)
        self.view = None

    def count_loads(self) -> None:
        """Count the adapters that have come into a GPU slot since the last call."""
        adapters = self.residency.gpu_adapters
        if adapters != self.gpu_adapters:
            self.num_loads += len(set(adapters).difference(self.gpu_adapters))
            self.gpu_adapters = adapters

    def estimate_foreign(self, report: LoadReport) -> None:
        """Estimate others' requests: those in the report that we did not dispatch.

        The engine names active adapters without counts, so these requests are spread evenly over
        the active adapters that we have nothing in flight for, at least one each.
        """
        total = report.num_running + report.num_waiting
        self.num_foreign = max(0, total - len(self.flights))
        names = [name for name in report.active_adapters if name not in self.adapters]
        share = max(1, self.num_foreign // len(names)) if names and self.num_foreign else 0
        self.foreign = dict.fromkeys(names, share) if share else {}

    def pending_of_all(self) -> dict[str, int]:
        """Return the requests per adapter: others' as of the last report, and ours as of now."""
        pending = dict(self.foreign)
        for adapter, count in self.adapters.items():
            pending[adapter] = pending.get(adapter, 0) + count
        return pending

    def make_view(self, now: float, settings: PoolSettings, outliers: Outliers) -> EndpointView:
        """Build the view at `now`; it is kept in `view` until something changes or expires."""
        report, at_s = self.report, self.reported_at_s
        expires_s = inf if at_s is None else at_s + settings.report_expiry_s
        is_known = at_s is not None and now <= expires_s
        address = self.endpoint.address
        ends_s = outliers.until_s(address)
        self.view_expires_s = min(expires_s if is_known else inf, ends_s if now <= ends_s else inf)
        if report is None or not is_known:
            report = LoadReport(max_loras=report.max_loras if report else None)
        pending, num_pending = self.adapters, len(self.flights)
        if is_known and self.num_foreign:
            pending, num_pending = self.pending_of_all(), num_pending + self.num_foreign
        residency, endpoint = self.residency, self.endpoint
        self.count_loads()
        self.view = EndpointView(
            address=address,
            name=endpoint.name or address,
            is_ready=endpoint.is_ready,
            is_known=is_known,
            reported_at_s=at_s,
            registered=self.registered,
            gpu_adapters=self.gpu_adapters,
            cpu_adapters=residency.cpu_adapters,
            pending_by_adapter=MappingProxyType(dict(pending)),
            num_pending=num_pending,
            num_in_flight=len(self.flights),
            num_running=report.num_running,
            num_waiting=report.num_waiting,
            num_deferred=report.num_deferred or 0,
            kv_usage_ratio=report.kv_usage_ratio or 0.0,
            max_loras=report.max_loras or settings.max_loras,
            num_adapter_loads=self.num_loads,
            is_owing=self.is_owing(is_known),
            is_unreachable=self.is_unreachable,
            is_ejected=outliers.is_ejected(address, now=now),
        )
        return self.view


def card_to_keep(before: ModelCard | None, now: ModelCard) -> ModelCard:
    """Return the card to keep: vLLM's `created` is the time of its response, not the model's."""
    if before is None or (before.parent, before.root) != (now.parent, now.root):
        return now
    return before


def is_restart(before: LoadReport | None, after: LoadReport) -> bool:
    """Return whether the process restarted between two reports."""
    if before is None or before.process_start_wall_s is None or after.process_start_wall_s is None:
        return False
    return abs(after.process_start_wall_s - before.process_start_wall_s) > RESTART_TOLERANCE_S


def verdicts(
    pick: Pick, verdict: Verdict, *, address: str = "", num_attempts: int = 1
) -> dict[str, Verdict]:
    """Return the verdict on each endpoint that a pick was sent to, by address.

    `verdict` and `address` ("" for the pick's own) are those of the last attempt, the only one that
    the data plane reports. It tries a pick's endpoints and alternates in order. A request that is
    retried is assumed not to have reached the endpoint: our Envoy configurations retry nothing
    else. Where an address is dialled twice, only the last attempt counts.
    """
    tried = (*pick.endpoints, *pick.alternates)[: max(1, num_attempts)]
    said = dict.fromkeys(tried[: max(0, num_attempts - 1)], Verdict.UNREACHABLE)
    return {**said, address or tried[-1]: verdict}
