"""One endpoint's state in the pool: its reports, and our requests there."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from math import inf
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from extproc.costs import Costs, Probe
from extproc.fleet.columns import Columns, Facts, Load, Resident
from extproc.fleet.concurrency import Fullness, Room
from extproc.fleet.decoding import Decoding
from extproc.fleet.foreign import Belief, ForeignRequests, PeerFlight
from extproc.fleet.modelindex import NOTHING, Listing
from extproc.fleet.outliers import Outliers
from extproc.fleet.podstate import PodState
from extproc.fleet.prefixes import KvCache
from extproc.fleet.prompts import MAX_AGE_S, Prompts
from extproc.fleet.residency import Residency
from extproc.fleet.serverflags import PoolSettings
from extproc.tenancy import NO_CLAIM, Share, SlotUses
from extproc.types import (
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
MAX_PAGES = 64
"""Reports of 3 s at the fastest pace."""
MIN_LIFE_S = 10.0
"""A process that restarts sooner than this is neither waited for nor tried."""
MAX_FAILURES = 64
"""Failures of an endpoint that count as requests there."""


class InFlight(Struct, frozen=True):
    """A pick that has not finished, and the endpoint object that it is counted on."""

    pick: Pick
    started_at_s: float
    tracked: Tracked
    adapter: str | None = None  # that it counts for there, None for a base model
    num_beside: int = 0  # unfinished requests there when it was picked
    trial: int = 0  # of outlier detection: the result of `Outliers.begin`
    place: int | None = None  # of its adapter there, where its first token tells (`cachesize`)
    group: str = ""  # of the endpoint when it was picked
    probe: Probe | None = None  # of the endpoint's costs, where its first token tells (`speeds`)


class Trouble(NamedTuple):
    """The trouble of one endpoint; see `EndpointView`.

    Attributes:
        num_failed: Failures that count as requests there: for a choice, and no request is rejected
            for them.
    """

    num_failed: int = 0
    is_ejected: bool = False
    is_gone: bool = False
    is_suspect: bool = False


NO_TROUBLE = Trouble()


class Tracked:
    """One endpoint's mutable state.

    Attributes:
        address: The endpoint's.
        answers: The last that is known of it is an answer: to a client, or to a call of ours.
        belief: In its load reports.
        others: The requests of other routers here.
        group: Of `PoolSettings.groups`, "" for none; its `traits` are this endpoint's.
        models: That it lists.
        registered: The names of those, and of what it finds by itself, but for those about which it
            is `disbelieved`.
        failures: Its last failures: until when each counts as a request there, as long as it would
            take to serve one, and of which adapter. To fail fast is no room.
        listed_at_s: When its last list was asked for.
        num_picks: Of all routers, that were ever counted here.
        num_sequences: Of our requests that have not ended (`RequestInfo.num_sequences`).
        died_at_s: When its health check said last that its engine has stopped; None for running.
        version: Of its engine, "" where it tells none; None before it was asked.
        slots: The adapters that routers know to run there.
        adapters: The unfinished requests of routers by adapter.
        served_s: When the latest of our picks that it has served was made.
        response_s: Mean time that our picks took that it has served of late; None without one.
        pages: When reports of late showed fewer requests than ours, and how many.
        row: Its place among the pool's endpoints.
        columns: In which it keeps its row true; None where it is stale, or in some trouble.
        expires_s: After that, its row is not true.
        facts: Knowledge of it that no request changes, until `facts_until_s`; None where it is
            no longer true.
        is_known: As a view has it; `trouble` likewise.
    """

    __slots__ = (
        *(
            "adapters",
            "address",
            "answers",
            "belief",
            "columns",
            "cpu_adapters",
            "declared",
            "decoding",
            "died_at_s",
            "disbelieved",
            "endpoint",
            "failures",
            "flights",
            "fullness",
            "gpu_adapters",
            "group",
        ),
        *(
            "is_known",
            "is_unreachable",
            "is_waited_for",
            "kv_cache",
            "listed_at_s",
            "models",
            "num_loads",
            "num_picks",
            "num_sequences",
            "num_silences",
        ),
        *("others", "pages", "prompts", "registered", "report", "reported_at_s", "residency"),
        *("response_s", "restarted_at_s", "returned_at_s", "room", "served_s", "slots"),
        *("traits", "version"),
        *("_stale", "expires_s", "facts", "facts_until_s", "row", "trouble"),
    )

    def __init__(
        self, endpoint: Endpoint, settings: PoolSettings, stale: dict[Tracked, None]
    ) -> None:
        """Track an endpoint that adds itself to `stale` once its row is no longer true."""
        self._stale = stale
        self.columns: Columns | None = None
        self.facts: Facts | None = None
        self.is_known, self.trouble = False, NO_TROUBLE
        self.facts_until_s = inf
        self.row = 0
        self.endpoint, self.address = endpoint, endpoint.address
        self.group = settings.group_of(endpoint)
        self.traits = traits = settings.traits_of(self.group)
        self.answers = False
        self.belief = Belief()
        self.report: LoadReport | None = None
        self.reported_at_s: float | None = None
        self.models: Listing | None = None
        self.registered: frozenset[str] | None = None
        self.declared: Mapping[str, ModelCard] = {}
        self.disbelieved: set[str] = set()
        self.failures: deque[tuple[float, str | None]] = deque()
        self.listed_at_s = -inf
        self.flights: dict[str, InFlight] = {}
        self.adapters: dict[str, int] = {}
        self.slots = SlotUses()
        self.others: ForeignRequests[Tracked] = ForeignRequests()
        self.fullness = Fullness()
        self.room = Room()
        self.gpu_adapters: tuple[str, ...] = ()  # these two as of the last look
        self.cpu_adapters: tuple[str, ...] = ()
        self.num_loads = self.num_picks = self.num_sequences = 0
        self.served_s = -inf
        self.response_s: float | None = None
        self.pages: deque[tuple[float, int]] = deque(maxlen=MAX_PAGES)
        self.prompts = Prompts(traits.costs)
        self.decoding = Decoding()
        self.kv_cache = KvCache(endpoint.address)
        self.is_unreachable = False
        self.died_at_s: float | None = None
        self.version: str | None = None
        self.is_waited_for = True
        self.num_silences = 0
        self.restarted_at_s = self.returned_at_s = -inf
        self.residency = Residency(max_loras=traits.max_loras, max_cpu_loras=traits.max_cpu_loras)
        self.expires_s = 0.0

    def touch(self) -> None:
        """Take the row for untrue in what changes with requests."""
        self.columns = None
        self._stale[self] = None

    def settle(self) -> None:
        """Write into the row what requests have changed."""
        columns, row, others = self.columns, self.row, self.others
        if columns is None:
            self._stale[self] = None
            return
        num_pending = self.num_sequences + others.num_told
        if self.is_known and others.num_foreign:
            num_pending += others.num_steady
        columns.num_pending[row], columns.done_s[row] = num_pending, self.prompts.done_s
        columns.has_room[row] = self._has_room()
        columns.outdated.add(row)

    def load(self) -> Load:
        """Return what a view has of its load, in that order."""
        others, is_known, trouble = self.others, self.is_known, self.trouble
        num_there = self._num_there()
        num_foreign = others.num_foreign - others.num_steady if is_known else 0
        return (
            num_there - num_foreign + trouble.num_failed,
            self.num_sequences,
            others.num_told,
            trouble.num_failed + (others.num_unseen if is_known else 0),
            num_foreign,
            self.prompts.done_s,
            trouble.is_ejected,
            trouble.is_gone,
            trouble.is_suspect,
            self.fullness.is_full(num_there),
            self._has_room(),
            self.response_s,
        )

    def _num_there(self) -> int:
        """Return the sequences there, as far as is known."""
        others = self.others
        num_foreign = others.num_foreign if self.is_known else 0
        return self.num_sequences + others.num_told + num_foreign

    def _has_room(self) -> bool:
        most, num_taken = self.places()
        return num_taken < most

    def places(self) -> tuple[float, int]:
        """Return for how many sequences it has room, and how many are there: see `Room`."""
        return self.room.places(
            self._num_there(), self.traits.max_in_flight, is_known=self.is_known
        )

    def renew(self) -> None:
        """Take all of the row for untrue."""
        self.facts = None
        self.touch()

    def describe(self, endpoint: Endpoint, settings: PoolSettings) -> None:
        """Apply what discovery and the configuration say of it; other traits hold from now on.

        The size of its cache is the configured one again: what was learned, its group has learned.
        """
        self.endpoint = endpoint
        self.renew()
        group = settings.group_of(endpoint)
        traits = settings.traits_of(group)
        if (group, traits) != (self.group, self.traits):
            self.group, self.traits, self.prompts.costs = group, traits, traits.costs
            sizes = {"max_loras": traits.max_loras, "max_cpu_loras": traits.max_cpu_loras}
            self.residency.configure(**sizes)
            self._register()

    def set_costs(self, costs: Costs) -> None:
        """Replace the costs that were configured or learned before."""
        if costs != self.prompts.costs:
            self.prompts.costs = costs
            self.renew()

    def answered(
        self, outliers: Outliers, asked_at_s: float, *, now: float, restarted: bool = False
    ) -> None:
        """Record that it answered a call of ours."""
        address = self.endpoint.address
        outliers.record_answer(address, asked_at_s=asked_at_s)
        self.fullness.answered(asked_at_s=asked_at_s)
        if restarted or self.is_unreachable:
            if now - self.returned_at_s >= MIN_LIFE_S:
                outliers.record_restart(address, now=now)
            self.returned_at_s = now
        self.is_unreachable, self.answers = False, True
        self.renew()

    def set_models(self, models: Listing | None) -> None:
        """Replace the models registered there; None for unknown."""
        self.models = models
        self.renew()
        self._register()
        for flight in self.others.flights.values():
            if flight.adapter is None:
                flight.adapter = self.listed_adapter(flight.name)
                self._count(flight.adapter)

    def set_declared(self, declared: Mapping[str, ModelCard]) -> None:
        """Replace the adapters that it can find by itself, if it does so."""
        if self.declared is not declared:
            self.declared = declared
            self.renew()
            self._register()

    def _register(self) -> None:
        """Find the names that it takes requests for."""
        models = self.models
        names = None if models is None else models.names
        if models is not None and names is not None and self.traits.resolver:
            found = (c for c in self.declared.values() if not c.parent or c.parent in models)
            names = names.union(card.id for card in found)
        if names is not None and self.disbelieved:
            names -= self.disbelieved
        self.registered = names

    def disbelieve(self, model: str) -> None:
        """Take it for one that does not list a model."""
        self.disbelieved.add(model)
        self._register()
        self.renew()

    def believe(self, model: str) -> None:
        """Believe its list about a model again."""
        if model in self.disbelieved:
            self.disbelieved.remove(model)
            self._register()
            self.renew()

    def failed(self, adapter: str | None, until_s: float) -> None:
        """Count a failure as a request there, for the choice, until some time."""
        if len(self.failures) < MAX_FAILURES:
            self.failures.append((until_s, adapter))
            self.touch()

    def count_failures(self, pending: dict[str, int], now: float) -> int:
        """Return how many of its failures count as requests there; add those of adapters to what is
        `pending`."""
        failures = self.failures
        while failures and failures[0][0] < now:
            failures.popleft()
        for _, adapter in failures:
            if adapter is not None:
                pending[adapter] = pending.get(adapter, 0) + 1
        return len(failures)

    def card_of(self, name: str | None) -> ModelCard | None:
        """Return the model that it has under a name, or finds by itself; None for neither."""
        if self.registered is None or name is None or name not in self.registered:
            return None
        return (self.models or NOTHING).get(name) or self.declared.get(name)

    def believed(self, report: LoadReport, *, now: float) -> LoadReport:
        """Return what is believed of a report that has just been taken."""
        num_known = self.num_sequences + self.others.num_told
        return self.belief.of(report, num_known, self.adapters, now=now)

    def is_fresh(self, now: float, settings: PoolSettings) -> bool:
        """Return whether it has a load report that has not expired."""
        at_s = self.reported_at_s
        return at_s is not None and now <= at_s + settings.report_expiry_s

    def says_start(self, now: float, settings: PoolSettings) -> bool:
        """Return whether its reports show a restart: they come, and say when it started."""
        report = self.report
        has_start = report is not None and report.process_start_wall_s is not None
        return has_start and self.is_fresh(now, settings)

    def set_report(self, report: LoadReport, *, asked_at_s: float, taken_at_s: float) -> None:
        """Replace the load report, true at some moment between the two times."""
        self.room.reported(
            report,
            self._num_since,
            num_requests=len(self.flights) + len(self.others.flights),
            asked_at_s=asked_at_s,
            taken_at_s=taken_at_s,
        )
        self.report, self.reported_at_s = report, taken_at_s
        self.renew()
        self.fullness.reported(report.num_running + report.num_waiting, now=taken_at_s)
        self.decoding.record(report, taken_at_s=taken_at_s)
        decode = self.decoding.learned
        if decode is not self.prompts.costs._decode:
            self.prompts.costs = replace(self.prompts.costs, _decode=decode)
        self.prompts.reported(report, asked_at_s=asked_at_s, now=taken_at_s)
        if report.kv_cache_tokens is not None:
            self.kv_cache.resize(report.kv_cache_tokens)

    def forget_memory(self) -> None:
        """Forget what the process had in its memory: it is gone."""
        self.version = None
        self.residency.forget()
        self.kv_cache.lose()
        self.kv_cache = KvCache(self.endpoint.address)

    def restart(self, now: float) -> None:
        """Forget the state of the process before the restart."""
        self.is_waited_for = now - self.restarted_at_s >= MIN_LIFE_S
        self.num_silences, self.restarted_at_s, self.died_at_s = 0, now, None
        self.set_models(None)
        self.forget_memory()
        self.prompts.forget()
        self.others.restart()
        self.fullness, self.room = Fullness(), Room()

    def is_owing(self, is_known: bool) -> bool:
        """Return whether its models are still to be listed: new or restarted, not just silent."""
        if self.models is not None or not self.is_waited_for:
            return False
        return self.num_silences < (MAX_SILENCES if is_known else 1)

    def adapter_of(self, request: RequestInfo) -> str | None:
        """Return the adapter that a request is for here, by the endpoint's list if it has the
        name."""
        card = self.card_of(request.model)
        if card is None:
            return request.adapter
        return None if card.parent is None else card.id

    @property
    def active_adapters(self) -> Mapping[str, int]:
        """The adapters that have requests here, of routers and by the last report."""
        own, others = self.adapters, self.others.adapters
        return others | own if others else own

    @property
    def num_unfinished(self) -> int:
        """Sequences here that have not ended: those that are known, or as many as the last report
        has."""
        known = self.num_sequences + self.others.num_told + self.others.num_foreign
        report = self.report
        return known if report is None else max(known, report.num_running + report.num_waiting)

    def refused(self, flight: InFlight, *, now: float) -> None:
        """Record that it refused one of our picks, as it is full."""
        self.fullness.refused(flight.pick.id, flight.num_beside, now=now)
        self.touch()

    def begin(self, flight: InFlight) -> None:
        """Count a pick here."""
        pick, adapter, at_s = flight.pick, flight.adapter, flight.started_at_s
        num = pick.request.num_sequences
        self.flights[pick.id] = flight
        self.num_sequences += num
        self.room.begin(at_s, num)
        self._count(adapter)
        claim = pick.request.claim
        self.use(adapter, claim.priority, claim._flow, now=at_s)
        self.settle()

    def end(self, flight: InFlight, *, now: float, has_run: bool) -> None:
        """Stop counting a pick; `has_run` is False if the engine cannot have worked on it. `settle`
        or `bound` is to follow.
        """
        num = flight.pick.request.num_sequences
        del self.flights[flight.pick.id]
        self.num_sequences -= num
        self.prompts.end(flight.pick.id, has_run=has_run)
        self.room.end(flight.started_at_s, num)
        if has_run:
            self.room.took(now - flight.started_at_s)
        self._discount(flight.adapter, now=now, has_run=has_run)

    def had_first_token(self, flight: InFlight, at_s: float) -> None:
        """Record when one of our picks had its first token: what was sent before it is computed."""
        done_s = self.prompts.done_s
        self.prompts.computed(flight.started_at_s, now=at_s)
        if self.prompts.done_s != done_s:
            self.settle()

    def note(self, adapter: str | None, *, now: float, has_run: bool) -> None:
        """Note a pick of another endpoint, which refused it: the engine here has worked on it."""
        self._count(adapter)
        self._discount(adapter, now=now, has_run=has_run)
        self.settle()

    def bound(self, now: float) -> None:
        """Take all prompts but those that are known to be ahead for computed by now."""
        self.prompts.bound(now)
        self.settle()

    def leave_to_reports(self, flights: Sequence[PeerFlight[Tracked]]) -> None:
        """Count picks of another router whose ends nobody will report as foreign requests."""
        self.others.leave_to_reports(flights)
        self.touch()

    def begin_told(self, flight: PeerFlight[Tracked], share: Share | None = None) -> None:
        """Count another router's pick here; its share says whose turn it was."""
        flight.adapter = self.listed_adapter(flight.name)
        picked_at_s, now = flight.picked_at_s, flight.told_at_s
        self.queue(flight.id, flight.adapter, flight.body_bytes, at_s=picked_at_s, now=now)
        self.others.begin(flight)
        self.room.begin(picked_at_s, flight.num_sequences)
        self._count(flight.adapter)
        priority, flow = (0, NO_CLAIM._flow) if share is None else (share.priority, share.flow)
        self.use(flight.adapter, priority, flow, now=now)
        self.settle()

    def end_told(self, flight: PeerFlight[Tracked], *, now: float, has_run: bool) -> None:
        """Stop counting another router's pick; see `end`."""
        self.others.end(flight)
        self.prompts.end(flight.id, has_run=has_run)
        self.room.end(flight.picked_at_s, flight.num_sequences)
        if has_run:
            self.room.took(now - flight.picked_at_s)
        self._discount(flight.adapter, now=now, has_run=has_run)

    def queue(
        self,
        pick_id: str,
        adapter: str | None,
        num_bytes: int,
        *,
        num: int = 1,
        at_s: float,
        now: float,
    ) -> None:
        """Add `num` prompts and an adapter's load, sent at `at_s`, to what is to be computed here.

        Residency is as of the last look: to know it as of now would sort all adapters for each pick
        of another router.
        """
        costs = self.prompts.costs
        if now - at_s <= MAX_AGE_S:  # an older one has been sent before, over another link
            self.kv_cache.computed_bytes += num * num_bytes
        load_s = 0.0
        if adapter is not None and adapter not in self.adapters:
            load_s = costs.load_s(adapter, self.gpu_adapters, self.cpu_adapters)
        self.prompts.add(pick_id, num_bytes, load_s, num=num, at_s=at_s, now=now)

    def listed_adapter(self, name: str | None) -> str | None:
        """Return `name` if it is an adapter by the endpoint's own list."""
        card = self.card_of(name)
        return None if card is None or card.parent is None else card.id

    def _num_since(self, at_s: float) -> int:
        """Return the sequences of picks that have not ended and were made after `at_s`."""
        num = 0
        for ours in reversed(self.flights.values()):
            if ours.started_at_s <= at_s:
                break
            num += ours.pick.request.num_sequences
        for told in reversed(self.others.flights.values()):
            if told.picked_at_s <= at_s:
                break
            num += told.num_sequences
        return num

    def use(self, adapter: str | None, priority: int, flow: str, *, now: float) -> None:
        """Note a pick, and whose request an adapter's slot is used for."""
        self.num_picks += 1
        if adapter is not None:
            self.slots.sent(adapter, priority, flow, now=now)

    def _count(self, adapter: str | None) -> None:
        if adapter is not None:
            num = self.adapters[adapter] = self.adapters.get(adapter, 0) + 1
            is_first = self.residency.start(adapter)
            if self.columns is not None:
                self.columns.count(self.row, adapter, num)
                if is_first:
                    self.columns.moved.add(self.row)

    def _discount(self, adapter: str | None, *, now: float, has_run: bool) -> None:
        if adapter is not None:
            left = self.adapters[adapter] - 1
            if left:
                self.adapters[adapter] = left
            else:
                del self.adapters[adapter]
                self.slots.pop(adapter, None)
            is_latest = self.residency.finish(adapter, now=now, has_run=has_run)
            columns = self.columns
            if columns is not None:
                if not left and self.is_known:
                    left = self.others.adapters.get(adapter, 0)
                columns.count(self.row, adapter, left)
                columns.moved.add(self.row)
                if not is_latest:
                    columns.look(self.row)

    def newest_s(self, until_s: float) -> float:
        """Return when the newest of our picks here that was made by then was made; -inf without
        one."""
        for flight in reversed(self.flights.values()):
            if flight.started_at_s <= until_s:
                return flight.started_at_s
        return -inf

    def oldest_s(self, now: float) -> float:
        """Return the age of our oldest pick here, 0 without any."""
        return now - min((each.started_at_s for each in self.flights.values()), default=now)

    def arrange(self) -> Resident:
        """Return where its adapters are now, and how many have come into a GPU slot."""
        gpu_adapters, self.cpu_adapters = self.residency.arranged
        if gpu_adapters is not self.gpu_adapters:
            self.num_loads += len(set(gpu_adapters).difference(self.gpu_adapters))
            self.gpu_adapters = gpu_adapters
        return gpu_adapters, self.cpu_adapters, self.num_loads

    def pod_state(self, view: EndpointView) -> PodState:
        """Return it as those see it who load adapters, given its view now."""
        report, traits = self.report, self.traits
        return PodState(
            view.address,
            is_up=view.is_ready and not (view._is_silent or view._is_lost),
            models=self.models,
            listed_at_s=self.listed_at_s,
            max_loras=view.max_loras,
            max_cpu_loras=traits.max_cpu_loras or view.max_loras,
            max_rank=traits.max_lora_rank,
            num_pending=view.num_pending + view._num_foreign,
            pending_by_adapter=view.pending_by_adapter,
            process=report.process_start_wall_s if report and view.is_known else None,
            is_resolver=traits.resolver is True,
            pools=self.endpoint.pools,
            unsafe_version=view._engine_version if view._mixes_weights else "",
        )


def is_restart(before: LoadReport | None, after: LoadReport) -> bool:
    """Return whether the process restarted between two reports."""
    if before is None or before.process_start_wall_s is None or after.process_start_wall_s is None:
        return False
    return abs(after.process_start_wall_s - before.process_start_wall_s) > RESTART_TOLERANCE_S
