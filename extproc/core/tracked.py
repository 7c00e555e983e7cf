"""One endpoint's state in the pool: its reports, our requests there, and the view made of both."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from types import MappingProxyType

from msgspec import Struct

from extproc.core.cachesize import MAX_BODY_BYTES
from extproc.core.floor import Floor
from extproc.core.outliers import Outliers
from extproc.core.prompts import Prompts
from extproc.core.residency import Residency
from extproc.core.traits import PoolSettings
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


class InFlight(Struct, frozen=True):
    """A pick that has not finished, and the endpoint object that it is counted on."""

    pick: Pick
    started_at_s: float
    tracked: Tracked
    adapter: str | None = None  # that it counts for there, None for a base model
    trial: int = 0  # of outlier detection: the result of `Outliers.begin`
    place: int | None = None  # of its adapter there, where its first token tells (`cachesize`)
    group: str = ""  # of the endpoint when it was picked


class ToldFlight(Struct, eq=False):
    """Another router's pick that has not ended, and the endpoint object that it is counted on.

    Attributes:
        adapter: That it counts for there; None until the endpoint lists the adapter named `name`.
    """

    id: str
    tracked: Tracked
    name: str | None
    told_at_s: float
    picked_at_s: float
    body_bytes: int
    adapter: str | None = None


class Tracked:
    """One endpoint's mutable state.

    Attributes:
        group: Of `PoolSettings.groups`, "" for none; its `traits` are this endpoint's.
    """

    __slots__ = (
        *("adapters", "returned_at_s", "endpoint", "flights", "foreign", "gpu_adapters"),
        *("is_unreachable", "is_waited_for", "models", "num_foreign", "num_loads", "num_silences"),
        *("registered", "report", "reported_at_s", "residency", "restarted_at_s", "view"),
        *("cpu_adapters", "group", "prompts", "steady", "told", "traits", "view_expires_s"),
        *("num_others_reported", "num_told_before"),
    )

    def __init__(self, endpoint: Endpoint, settings: PoolSettings) -> None:
        self.endpoint = endpoint
        self.group = settings.group_of(endpoint)
        self.traits = traits = settings.traits_of(self.group)
        self.report: LoadReport | None = None
        self.reported_at_s: float | None = None
        self.models: dict[str, ModelCard] | None = None
        self.registered: frozenset[str] | None = None
        self.flights: dict[str, InFlight] = {}
        self.adapters: dict[str, int] = {}
        self.foreign: dict[str, int] = {}
        self.num_foreign = 0
        self.gpu_adapters: tuple[str, ...] = ()  # these two as of the last view
        self.cpu_adapters: tuple[str, ...] = ()
        self.num_loads = 0
        self.told: dict[str, ToldFlight] = {}
        self.num_told_before = 0  # those of `told` that were picked before the last report
        self.num_others_reported = 0  # requests that the last report leaves beside ours
        self.prompts = Prompts(traits.costs)
        self.steady = Floor()
        self.is_unreachable = False
        self.is_waited_for = True
        self.num_silences = 0
        self.restarted_at_s = self.returned_at_s = -inf
        self.residency = Residency(max_loras=traits.max_loras, max_cpu_loras=traits.max_cpu_loras)
        self.view: EndpointView | None = None
        self.view_expires_s = 0.0

    def describe(self, endpoint: Endpoint, settings: PoolSettings) -> None:
        """Apply what discovery and the configuration say of it; other traits hold from now on.

        The size of its cache is the configured one again: what was learned, its group has learned.
        """
        self.endpoint, self.view = endpoint, None
        group = settings.group_of(endpoint)
        traits = settings.traits_of(group)
        if (group, traits) != (self.group, self.traits):
            self.group, self.traits, self.prompts.costs = group, traits, traits.costs
            sizes = {"max_loras": traits.max_loras, "max_cpu_loras": traits.max_cpu_loras}
            self.residency.configure(**sizes)

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
        for flight in self.told.values():
            if flight.adapter is None:
                flight.adapter = self.listed_adapter(flight.name)
                self._count(flight.adapter)

    def restart(self, now: float) -> None:
        """Forget the state of the process before the restart."""
        self.is_waited_for = now - self.restarted_at_s >= MIN_LIFE_S
        self.num_silences, self.restarted_at_s = 0, now
        self.set_models(None)
        self.residency.forget()
        self.prompts.forget()
        self.steady = Floor()

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
        self.prompts.unfinished_bytes += flight.pick.request.body_bytes
        self._count(flight.adapter)

    def end(self, flight: InFlight, *, now: float, has_run: bool) -> None:
        """Stop counting a pick; `has_run` is False if the engine cannot have worked on it."""
        del self.flights[flight.pick.id]
        self.prompts.unfinished_bytes -= flight.pick.request.body_bytes
        self._discount(flight.adapter, now=now, has_run=has_run)

    def note(self, adapter: str | None, *, now: float, has_run: bool) -> None:
        """Note a pick of another endpoint, which refused it: the engine here has worked on it."""
        self._count(adapter)
        self._discount(adapter, now=now, has_run=has_run)

    def begin_told(self, flight: ToldFlight) -> None:
        """Count another router's pick here."""
        flight.adapter = self.listed_adapter(flight.name)
        picked_at_s, now = flight.picked_at_s, flight.told_at_s
        self.queue(flight.adapter, flight.body_bytes, at_s=picked_at_s, now=now)
        if self.is_reported(flight):
            self.num_foreign = max(0, self.num_foreign - 1)  # the report has counted it already
            self.num_told_before += 1
        self.told[flight.id] = flight
        self.prompts.unfinished_bytes += flight.body_bytes
        self._count(flight.adapter)

    def end_told(self, flight: ToldFlight, *, now: float, has_run: bool) -> None:
        """Stop counting another router's pick; see `end`."""
        del self.told[flight.id]
        self.num_told_before -= self.is_reported(flight)
        self.prompts.unfinished_bytes -= flight.body_bytes
        self._discount(flight.adapter, now=now, has_run=has_run)

    def is_reported(self, flight: ToldFlight) -> bool:
        """Return whether another router's pick is old enough for the last report to count it."""
        return self.reported_at_s is not None and flight.picked_at_s <= self.reported_at_s

    def leave_to_reports(self, flights: Sequence[ToldFlight]) -> None:
        """Count picks whose ends nobody will tell as others' requests, until a report shows less.

        They do not wait to be steady: it was not by the reports that routers chose this endpoint.
        """
        self.num_foreign += len(flights)
        self.steady.rise(len(flights))
        self.foreign |= {each.adapter: 1 for each in flights if each.adapter is not None}
        self.view = None

    def queue(self, adapter: str | None, body_bytes: int, *, at_s: float, now: float) -> None:
        """Add a prompt and its adapter's load, sent at `at_s`, to what is to be computed here.

        What is resident is as of the last view: to know it as of now would sort all adapters for
        each pick that is told.
        """
        costs = self.prompts.costs
        work_s = body_bytes * costs.prompt_s_per_byte
        if adapter is not None and adapter not in self.adapters:
            work_s += costs.load_s(adapter, self.gpu_adapters, self.cpu_adapters)
        self.prompts.add(work_s, at_s=at_s, now=now)

    def listed_adapter(self, name: str | None) -> str | None:
        """Return `name` if it is an adapter by the endpoint's own list."""
        card = None if self.models is None or name is None else self.models.get(name)
        return None if card is None or card.parent is None else card.id

    def _count(self, adapter: str | None) -> None:
        if adapter is not None:
            self.adapters[adapter] = self.adapters.get(adapter, 0) + 1
            self.residency.start(adapter)
        self.view = None

    def _discount(self, adapter: str | None, *, now: float, has_run: bool) -> None:
        if adapter is not None:
            left = self.adapters[adapter] - 1
            if left:
                self.adapters[adapter] = left
            else:
                del self.adapters[adapter]
            self.residency.finish(adapter, now=now, has_run=has_run)
        self.view = None

    def oldest_s(self, now: float) -> float:
        """Return the age of our oldest pick here, 0 without any."""
        return now - min((each.started_at_s for each in self.flights.values()), default=now)

    def count_loads(self) -> None:
        """Count the adapters that have come into a GPU slot since the last call."""
        adapters = self.residency.gpu_adapters
        if adapters != self.gpu_adapters:
            self.num_loads += len(set(adapters).difference(self.gpu_adapters))
            self.gpu_adapters = adapters

    def estimate_foreign(self, report: LoadReport, *, now: float) -> None:
        """Estimate others' requests: those in the report that neither we nor a router that tells
        us has sent, and the adapters that nobody known has a request for.

        How many there are is a scrape old, and the same for every router that reads it: routers
        that chose by it would all go to the same endpoint, then all to the next. So only the part
        that has been there for seconds counts for the choice, the rest for admission alone, and
        each adapter as one request.
        """
        total = report.num_running + report.num_waiting
        self.num_others_reported = max(0, total - len(self.flights))
        self.num_told_before = sum(map(self.is_reported, self.told.values()))
        self.num_foreign = max(0, self.num_others_reported - len(self.told))
        self.steady.record(self.num_foreign, now=now)
        # An idle engine's page may still name those that were active last.
        ours = self.adapters
        self.foreign = {a: 1 for a in report.active_adapters if a not in ours} if total else {}

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
        pending = {**self.foreign, **self.adapters} if is_known else dict(self.adapters)
        steady = min(self.steady.low, self.num_foreign) if is_known else 0
        residency, endpoint = self.residency, self.endpoint
        self.count_loads()
        self.cpu_adapters = residency.cpu_adapters
        self.view = EndpointView(
            address=address,
            name=endpoint.name or address,
            is_ready=endpoint.is_ready,
            is_known=is_known,
            reported_at_s=at_s,
            registered=self.registered,
            gpu_adapters=self.gpu_adapters,
            cpu_adapters=self.cpu_adapters,
            pending_by_adapter=MappingProxyType(pending),
            num_pending=len(self.flights) + len(self.told) + steady,
            num_foreign=self.num_foreign - steady if is_known else 0,
            num_in_flight=len(self.flights),
            num_told=len(self.told),
            num_unseen=max(0, self.num_told_before - self.num_others_reported) if is_known else 0,
            num_running=report.num_running,
            num_waiting=report.num_waiting,
            num_deferred=report.num_deferred or 0,
            kv_usage_ratio=report.kv_usage_ratio or 0.0,
            max_loras=report.max_loras or self.traits.max_loras,
            max_lora_rank=self.traits.max_lora_rank,
            reported_adapters=report.active_adapters,
            num_adapter_loads=self.num_loads,
            prompts_done_s=self.prompts.done_s,
            costs=self.prompts.costs,
            is_owing=self.is_owing(is_known),
            is_unreachable=self.is_unreachable,
            is_ejected=outliers.is_ejected(address, now=now),
        )
        return self.view


def is_restart(before: LoadReport | None, after: LoadReport) -> bool:
    """Return whether the process restarted between two reports."""
    if before is None or before.process_start_wall_s is None or after.process_start_wall_s is None:
        return False
    return abs(after.process_start_wall_s - before.process_start_wall_s) > RESTART_TOLERANCE_S
