"""One endpoint's state in the pool: its reports, and our requests there."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from math import inf
from typing import Any, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from extproc.costs import Costs, Probe
from extproc.learned.concurrency import Fullness, Room
from extproc.learned.decoding import Decoding
from extproc.learned.expected import Expected, Known
from extproc.learned.outliers import Outliers
from extproc.learned.prefixes import KvCache
from extproc.learned.prompts import MAX_AGE_S, Prompts
from extproc.pods.columns import Columns, Resident
from extproc.pods.foreign import Belief, ForeignRequests, PeerPlace
from extproc.pods.modelindex import NOTHING, Listing
from extproc.pods.podstate import PodState
from extproc.pods.residency import OTHERS, SAME, Residency
from extproc.pods.serverflags import PoolSettings
from extproc.tenancy import SlotUses
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
NEAR_S = 0.005
"""Of the times at which a router tells that a request began and, later, when that was."""
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
        expected: The contents that its next reports should have.
        rest_s: The longest time after the last report until the next is asked for.
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
            "expected",
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
        "rest_s",
        *("response_s", "restarted_at_s", "returned_at_s", "room", "served_s", "slots"),
        *("traits", "version"),
        *("_due", "_stale", "expires_s", "facts", "facts_until_s", "row", "trouble"),
    )

    def __init__(
        self,
        endpoint: Endpoint,
        settings: PoolSettings,
        stale: dict[Tracked, None],
        due: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Track an endpoint that adds itself to `stale` once its row is no longer true, and calls
        `due` with its address once so much was sent there that its next report is due."""
        self._stale, self._due = stale, due
        self.columns: Columns | None = None
        self.facts: EndpointView | None = None
        self.is_known, self.trouble = False, NO_TROUBLE
        self.facts_until_s = inf
        self.row = 0
        self.endpoint, self.address = endpoint, endpoint.address
        self.group = settings.group_of(endpoint)
        self.traits = traits = settings.traits_of(self.group)
        self.answers = False
        self.belief = Belief()
        self.expected = Expected()
        self.rest_s = 0.0
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
        columns, row = self.columns, self.row
        if columns is None:
            self._stale[self] = None
            return
        columns.done_s[row] = self.prompts.done_s
        columns.num_pending[row], columns.has_room[row] = self.burden()
        columns.outdated.add(row)

    def burden(self) -> tuple[int, bool]:
        """Return what a view has as pending requests, and whether one more would run soon."""
        others, is_known, trouble = self.others, self.is_known, self.trouble
        num_there = num_pending = self.num_sequences + others.num_told
        if is_known and others.num_foreign:
            num_there += others.num_foreign
            num_pending += others.num_steady
        has_room = self.room.is_open(num_there, self.traits.max_in_flight, is_known=is_known)
        return num_pending + trouble.num_failed, has_room

    @property
    def is_full(self) -> bool:
        """Whether it refused requests beside as many."""
        return self.fullness.is_full(self._num_there())

    def load(self) -> Mapping[str, Any]:
        """Return what a view has of its load, beside the adapters' pending requests."""
        others, is_known, trouble = self.others, self.is_known, self.trouble
        num_pending, has_room = self.burden()
        return {
            "num_pending": num_pending,
            "num_in_flight": self.num_sequences,
            "_num_told": others.num_told,
            "_num_unseen": trouble.num_failed + (others.num_unseen if is_known else 0),
            "_num_foreign": others.num_foreign - others.num_steady if is_known else 0,
            "prompts_done_s": self.prompts.done_s,
            "is_ejected": trouble.is_ejected,
            "_is_gone": trouble.is_gone,
            "_is_suspect": trouble.is_suspect,
            "is_full": self.is_full,
            "has_room": has_room,
            "_response_s": self.response_s,
        }

    def _num_there(self) -> int:
        """Return the sequences there, as far as is known."""
        others = self.others
        num_foreign = others.num_foreign if self.is_known else 0
        return self.num_sequences + others.num_told + num_foreign

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
            self.group, self.traits = group, traits
            self.prompts.price(traits.costs)
            sizes = {"max_loras": traits.max_loras, "max_cpu_loras": traits.max_cpu_loras}
            self.residency.configure(**sizes)
            self._register()

    def set_costs(self, costs: Costs) -> None:
        """Replace the costs that were configured or learned before."""
        if costs != self.prompts.costs:
            self.prompts.price(costs)
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
        for place in self.others.places:
            if place.num and place.adapter is None:
                self._name(place)
                self._count(place.adapter, place.num)

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
        return self.belief.of(report, self.num_known, self.adapters, now=now)

    def report_expires_s(self, settings: PoolSettings) -> float:
        """Return until when its load report is trusted: longer if none is asked for meanwhile."""
        at_s = self.reported_at_s
        return -inf if at_s is None else at_s + self.rest_s + settings.report_expiry_s

    def missed(self) -> None:
        """Record that a call of ours has failed: its last report is as old as it is."""
        if self.rest_s:
            self.rest_s = 0.0
            self.renew()

    def compare(self, report: LoadReport, *, now: float, is_new: bool) -> None:
        """Compare a report that has just been recorded with what is expected."""
        others, decode = self.others, self.prompts.costs._decode
        known = Known(
            self.num_known,
            self.num_picks,
            self.adapters,
            0.0 if decode is None else decode.token_s,
            others.num_steady > 0 or self.belief.is_old,
            self.belief.stood_s(now),
            self.decoding.unseen_s,
            self.traits.max_in_flight or self.room.limit,
        )
        self.expected.reported(report, known, now=now, is_new=is_new)

    def is_as_expected(self, num_held: int) -> bool:
        """Return whether the last report said what was expected, and nothing is known since for
        which the next is due, where so many requests are held by the router."""
        if self.is_unreachable or self.died_at_s is not None or self.disbelieved:
            return False
        if not self.expected.is_met or any(self.trouble) or not self.fullness.is_idle:
            return False
        return not num_held and self.num_known <= self.expected.most

    def _grew(self, has_many: bool) -> None:
        """Say that the next report is due: more are here than expected, or `has_many` are new."""
        if self.expected.is_due(self.num_known, has_many=has_many):
            self._due(self.address)

    def says_start(self, now: float, settings: PoolSettings) -> bool:
        """Return whether its reports show a restart: they come, and say when it started."""
        report = self.report
        has_start = report is not None and report.process_start_wall_s is not None
        return has_start and now <= self.report_expires_s(settings)

    def set_report(
        self,
        report: LoadReport,
        *,
        asked_at_s: float,
        taken_at_s: float,
        next_s: float,
        rest_s: float = 0.0,
    ) -> None:
        """Replace the load report, true at some moment between the two times; see `record_report`
        of the pool."""
        self.rest_s = rest_s
        self.room.reported(
            report,
            self._num_since,
            num_requests=len(self.flights) + self.others.num_requests,
            asked_at_s=asked_at_s,
            taken_at_s=taken_at_s,
            next_s=next_s,
        )
        before_s = self.reported_at_s
        has_run_through = before_s is not None and self._has_run_since(before_s)
        self.report, self.reported_at_s = report, taken_at_s
        self.fullness.reported(report.num_running + report.num_waiting, now=taken_at_s)
        self.decoding.record(report, taken_at_s=taken_at_s, has_run_through=has_run_through)
        decode = self.decoding.learned
        if decode is not self.prompts.costs._decode:
            self.prompts.price(replace(self.prompts.costs, _decode=decode))
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
    def num_known(self) -> int:
        """Sequences here of requests that routers know of, and that have not ended."""
        return self.num_sequences + self.others.num_told

    @property
    def num_unfinished(self) -> int:
        """Sequences here that have not ended: those that are known, or as many as the last report
        has."""
        known, report = self.num_known + self.others.num_foreign, self.report
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
        has_many = self.room.begin(at_s, num)
        self._count(adapter)
        claim = pick.request.claim
        self.use(adapter, claim.priority, claim._flow, now=at_s)
        self.settle()
        self._grew(has_many)

    def end(self, flight: InFlight, *, now: float, has_run: bool) -> None:
        """Stop counting a pick; `has_run` is False if the engine cannot have worked on it.
        `settle` is to follow.
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

    def leave_to_reports(self, num_sequences: int, adapter: str | None) -> None:
        """Count requests of another router whose ends nobody will tell as foreign ones."""
        self.others.leave_to_reports(num_sequences, adapter)
        self.touch()

    def begin_told(
        self,
        place: PeerPlace[Tracked],
        num: int,
        num_sequences: int,
        num_bytes: int,
        *,
        now: float,
    ) -> None:
        """Count requests that another router has just sent here, with so many bytes of prompts.
        `settle` is to follow, as after `end_told`: once for all that a message tells."""
        if place.registered is not self.registered and not place.num:
            self._name(place)
        adapter = place.adapter
        place.num += num
        place.num_sequences += num_sequences
        self.queue(self.num_picks, adapter, num_bytes // num, num=num, at_s=now, now=now)
        self.others.began(num, num_sequences, now)
        has_many = self.room.begin(now, num_sequences)
        self._count(adapter, num)
        self.use(adapter, place.priority, place.flow, now=now, num=num)
        self._grew(has_many)

    def end_told(
        self,
        place: PeerPlace[Tracked],
        num: int,
        num_sequences: int,
        took_s: float,
        *,
        now: float,
        has_run: bool,
    ) -> None:
        """Stop counting requests of another router, which took so long in the mean; see `end`."""
        began_s = now - took_s
        place.num -= num
        place.num_sequences -= num_sequences
        self.others.ended(num, num_sequences, began_s, now)
        from_s = began_s - NEAR_S if num == 1 else -inf  # of several the mean is known
        self.prompts.ended(num, from_s, began_s + NEAR_S, now=now, has_run=has_run)
        self.room.end(began_s, num_sequences)
        if has_run:
            self.room.took(took_s, num)
        self._discount(place.adapter, now=now, has_run=has_run, num=num)

    def recount_told(
        self, place: PeerPlace[Tracked], num: int, num_sequences: int, *, now: float
    ) -> None:
        """Count so many requests of another router more, or less: what it told of them was lost."""
        if not place.num:
            self._name(place)
        place.num += num
        place.num_sequences += num_sequences
        self.others.recount(num, num_sequences)
        if num > 0:
            self._count(place.adapter, num)
            self.use(place.adapter, place.priority, place.flow, now=now, num=num)
        elif num < 0:
            self.prompts.ended(-num, -inf, inf, now=now, has_run=True)
            self._discount(place.adapter, now=now, has_run=True, num=-num)
        self.settle()

    def _name(self, place: PeerPlace[Tracked]) -> None:
        """Find the adapter of a place that has no requests."""
        place.registered, card = self.registered, self.card_of(place.name)
        place.adapter = None if card is None or card.parent is None else card.id

    def queue(
        self,
        pick_id: str | int,
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
            self.kv_cache.compute(num * num_bytes)
        load_s = 0.0
        if adapter is not None and adapter not in self.adapters:
            load_s = costs.load_s(adapter, self.gpu_adapters, self.cpu_adapters)
        self.prompts.add(pick_id, num_bytes, load_s, num=num, at_s=at_s, now=now)

    def _num_since(self, at_s: float) -> int:
        """Return the sequences of picks that have not ended and were made after `at_s`."""
        flights, num = self.flights, 0
        if flights and next(iter(flights.values())).started_at_s > at_s:
            num = self.num_sequences  # all of them
        else:
            for ours in reversed(flights.values()):
                if ours.started_at_s <= at_s:
                    break
                num += ours.pick.request.num_sequences
        return num + self.others.num_since(at_s)

    def _has_run_since(self, at_s: float) -> bool:
        """Return whether a request that routers know of has run ever since some time."""
        oldest = next(iter(self.flights.values()), None)
        if oldest is not None and oldest.started_at_s <= at_s:
            return True
        return self.others.num_told > self.others.num_since(at_s)

    def use(
        self, adapter: str | None, priority: int, flow: str, *, now: float, num: int = 1
    ) -> None:
        """Note picks, and whose request an adapter's slot is used for."""
        self.num_picks += num
        if adapter is not None:
            self.slots.sent(adapter, priority, flow, now=now)

    def _count(self, adapter: str | None, more: int = 1) -> None:
        if adapter is not None:
            num = self.adapters[adapter] = self.adapters.get(adapter, 0) + more
            change, columns = self.residency.start(adapter, more), self.columns
            if columns is not None:
                columns.count(self.row, adapter, num)
                if change is not SAME:
                    columns.moved.add(self.row)

    def _discount(self, adapter: str | None, *, now: float, has_run: bool, num: int = 1) -> None:
        if adapter is not None:
            left = self.adapters[adapter] - num
            if left:
                self.adapters[adapter] = left
            else:
                del self.adapters[adapter]
                self.slots.pop(adapter, None)
            change = self.residency.finish(adapter, now=now, has_run=has_run, num=num)
            columns = self.columns
            if columns is not None:
                if not left and self.is_known:
                    left = self.others.adapters.get(adapter, 0)
                columns.count(self.row, adapter, left)
                if change is not SAME:
                    columns.moved.add(self.row)
                if change is OTHERS:
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
