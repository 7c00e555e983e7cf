"""Pool, picker and queue together: the whole decision for one request, now or later."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf

from msgspec.structs import replace

from extproc.address import is_in_subset
from extproc.learned.concurrency import MANY
from extproc.learned.prefixes import renamed
from extproc.phrases import FOR_POD, FOR_ROOM, FOR_TURN
from extproc.pods.columns import Columns
from extproc.pods.pool import Pool
from extproc.pods.tenants import left
from extproc.queue import Destinations, HoldQueue, Ticket, Waiting
from extproc.rejections import NOT_RENAMED, asleep, no_endpoints
from extproc.routing.catalog import Catalog
from extproc.routing.modelroutes import ModelRoutes
from extproc.routing.models import Models
from extproc.routing.picker import FULL_WAIT_S, Picker, give_up_s
from extproc.types import (
    ModelCard,
    Pick,
    Reason,
    Rejection,
    RequestInfo,
    Snapshot,
    Wait,
)

OBJECTIVE_RATIO = 0.8
"""Part of an objective within which a held request counts as in time. The estimate of its remaining
time leaves out the step that runs already, and the sharing of the engine.
"""

_FOR_WANT_OF_ROOM = Reason.SATURATED, Reason.LATE
_FOR_WANT_OF_PODS = Reason.NO_ENDPOINTS, Reason.ADAPTER_UNAVAILABLE


@dataclass(slots=True)
class Router:
    """Routes requests and lists models, from a pool, a picker and a queue.

    Attributes:
        queue: The one to which the pool reports room.
        catalog: The one to which the pool reports other routers' work.
        max_hold_s: Longest that a request may wait for an endpoint, from its headers on.
    """

    pool: Pool
    picker: Picker
    queue: HoldQueue
    catalog: Catalog
    max_hold_s: float = 60.0
    routes: ModelRoutes = field(default_factory=ModelRoutes)
    models: Models = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.models = Models(self.pool, self.catalog, self.routes)

    @property
    def uses_cached_bytes(self) -> bool:
        """Whether the policy in force weighs what is cached of a prompt."""
        return self.picker.uses_cached_bytes

    def card(self, name: str) -> ModelCard | None:
        """Return what is declared, or what pods list, under a name; which base model it is of, pods
        say where nobody else does.
        """
        declared = self.catalog.card(name)
        listed = None if declared is not None and declared.parent else self.pool.model(name)
        return listed or declared

    def route(
        self,
        request: RequestInfo,
        *,
        now: float,
        wake: Callable[[], None] = lambda: None,
        num_bytes: int = 0,
    ) -> Pick | Rejection | Ticket:
        """Choose an endpoint and count the request there, or say why not, or hold it.

        Held requests come first, where there may be room for them.

        Args:
            wake: Called once, if the request is held, when `resume` has its result; not from within
                this call.
            num_bytes: Of its body, that are kept as long as it is held.
        """
        known, result = self.choose(request, now=now, is_new=True)
        if isinstance(result, Pick):
            self._start(result, known, now)
            self.queue.charge(known)
            return result
        if isinstance(result, Wait):
            return self.hold(known, result, now=now, wake=wake, num_bytes=num_bytes)
        return self._truly(result, known, now)

    def _truly(self, result: Rejection, request: RequestInfo, now: float) -> Rejection:
        """Return a rejection for want of room or time; where nobody is there, that says so."""
        self.picker.unserved(request, result)
        if result.reason not in _FOR_WANT_OF_ROOM or self._is_anybody(request, now):
            return result
        return no_endpoints(request.client_model, result.why)

    def _is_anybody(self, request: RequestInfo, now: float) -> bool:
        """Return whether an endpoint could take a request, if it had room."""
        catalog, subset = self.catalog, request.subset
        is_declared = catalog.card(request.model) is not None  # other endpoints may load it
        model = "" if is_declared else request.model
        return any(
            (view.is_ready or view.is_last_resort)
            and not view.is_gone
            and (not model or view.has_registered(model))
            and (subset is None or is_in_subset(view.address, subset))
            for view in self.pool.snapshot(now=now).endpoints
        )

    def hold(
        self,
        request: RequestInfo,
        wait: Wait,
        *,
        now: float,
        wake: Callable[[], None],
        num_bytes: int = 0,
    ) -> Ticket | Rejection:
        """Hold a request that the policy wants to wait, or say why not.

        Args:
            request: As `choose` knows it.
        """
        claim, arrived_s = request.claim, request.arrived_at_s
        ttft_s = claim.ttft_s
        if ttft_s is None and claim.priority >= 0:
            ttft_s = getattr(self.picker.policy, "ttft_s", None)
        ticket = Ticket(
            request,
            wake,
            give_up_s(request, self.max_hold_s),
            deadline_s=inf if ttft_s is None else arrived_s + OBJECTIVE_RATIO * ttft_s,
            held_at_s=now,
            rest_s=self._least_ttft_s(request, now),
            num_bytes=num_bytes,
            kind=self.picker.kind_of(request),
            again_s=wait.until_s,
            reason=wait.reason,
        )
        refusal = self.queue.add(ticket, now=now)
        if refusal is not None:
            self.catalog.not_held(request.model, now=now)
            return self._truly(refusal, request, now)
        return ticket

    def resume(self, ticket: Ticket, *, now: float) -> Pick | Rejection | Ticket:
        """Return a held request's result, if there is one; raise what its policy raised."""
        if now >= ticket.give_up_s and ticket.reason == FOR_POD:
            self.queue.ask(ticket, self._choose_held, now=now)  # what is known may be wrong
        elif now >= ticket.give_up_s and self.queue.is_due(now):
            self.offer(now=now)  # one whose adapter has not come may have something else
        self.queue.expire(ticket, now=now)
        if ticket.error is not None:
            raise ticket.error
        if isinstance(ticket.result, Rejection):
            return self._truly(ticket.result, ticket.request, now)
        return ticket.result or ticket

    def leave(self, ticket: Ticket, *, now: float) -> None:
        """Forget a held request, and end its pick if it has one: its client has gone."""
        self.queue.remove(ticket, now=now)
        if isinstance(ticket.result, Pick):
            self.pool.flights.finish(ticket.result.id, now=now, has_run=False)
        elif ticket.result is None:
            self.picker.unserved(ticket.request, None)

    def offer(self, *, now: float) -> None:
        """Offer the room there is to those that are held, if it is time."""
        self.queue.offer(self._choose_held, now=now, destinations=self.destinations(now=now))

    def destinations(self, *, now: float) -> Destinations:
        """Return where requests may go, as things are now."""
        endpoints, catalog = self.pool.snapshot(now=now).endpoints, self.catalog
        return Destinations(endpoints, catalog.holders, catalog.served, self.pool.slots)

    def hear(self, router_id: str, waiting: Waiting, *, now: float) -> None:
        """Have those that wait at another router go first here, too."""
        if not waiting.ahead and not self.queue.has_line():
            return  # as mostly: nobody waits anywhere, and each router says so every second
        self.queue.hear(router_id, waiting, now=now, destinations=self.destinations(now=now))

    def choose(
        self, request: RequestInfo, *, now: float, is_new: bool = False
    ) -> tuple[RequestInfo, Pick | Rejection | Wait]:
        """Choose as `route` does, and count and hold nothing; return the request as it is known.

        Args:
            is_new: Held requests are offered room before it, and it waits for those in line.
        """
        queue, models = self.queue, self.models
        has_line = is_new and queue.has_line()
        if has_line and queue.is_due(now):
            self.offer(now=now)
        known = models.identify(request, self.picker.uses_cached_bytes, now)
        if type(known) is Rejection:
            claimed = models.claimed(request)
            return claimed, self._awaited(claimed, known, now)
        until_s = queue.must_wait_until_s(known, now) if has_line else None
        result: Pick | Rejection | Wait
        if until_s is not None:
            result = Wait(until_s, FOR_TURN)
        elif self.catalog.num_declared:
            result = self._pick_declared(known, now)
        else:
            result = self._pick(known, now)
        if type(result) is Rejection:
            return known, self._awaited(known, result, now)
        return known, result

    def _awaited(self, request: RequestInfo, result: Rejection, now: float) -> Rejection | Wait:
        """Have a request wait that gets no endpoint and may, where one may come."""
        if result.reason not in _FOR_WANT_OF_PODS:
            return result
        until_s = give_up_s(request, self.max_hold_s) if request.claim.waits else -inf
        snapshot = self.pool.snapshot(now=now)
        is_declared = self.catalog.card(request.model) is not None  # other pods may load it
        may_come = _is_empty(snapshot) if is_declared else _may_come(request, snapshot)
        return Wait(until_s, FOR_POD) if may_come and now < until_s else result

    def _pick_declared(self, request: RequestInfo, now: float) -> Pick | Rejection | Wait:
        """Choose where adapters are declared, which are asked for as pods have them."""
        catalog = self.catalog
        if catalog.card(request.model) is None:
            return self._pick(catalog.proven(request), now)
        found = catalog.find(request, self.models.listed, now=now)
        if not isinstance(found, RequestInfo):
            snapshot = self.pool.snapshot(now=now)
            if found is not NOT_RENAMED[request.fixed]:
                found = catalog.serve(request, _last_holders(request, catalog, snapshot)) or found
            if not isinstance(found, RequestInfo) and _is_asleep(snapshot):
                return asleep(request.client_model)
        if isinstance(found, Rejection) and found is not NOT_RENAMED[request.fixed]:
            return replace(found, retry_after_s=self.queue.retry_after_s())
        if not isinstance(found, RequestInfo):
            return found
        if found.model != request.model:
            found = renamed(found, found.model)
            found = replace(found, cached_bytes=self.pool.prefix_index.find(found))
        result = self._pick(found, now)
        is_gone = _are_gone(result, request, self.pool.columns(now=now))
        waiting = catalog.wait(request, now=now) if is_gone else None
        return waiting or result

    def _pick(self, request: RequestInfo, now: float) -> Pick | Rejection | Wait:
        """Choose among the endpoints; those whose slots are kept for other requests are full for
        it.
        """
        if request.num_sequences > 1 and self._overfills(request, now):
            return Wait(now + FULL_WAIT_S, FOR_ROOM)
        columns = self.pool.columns(now=now)
        kept = self.queue.reservations.kept_from(request, columns, now=now)
        num_left = self.pool.flights.tenants.num_left(request.claim, now)
        if num_left and (full := self._left(request, num_left, now)):
            kept = {**kept, **dict.fromkeys(full, now + FULL_WAIT_S)}
        found = self.picker.pick(
            columns,
            request,
            kept,
            now=now,
            num_routers=self.pool.flights.num_routers,
            max_hold_s=self.max_hold_s,
        )
        return _until_free(found, kept) if kept else found

    def _choose_held(self, ticket: Ticket, now: float) -> Pick | Rejection | Wait:
        """Choose for a held request, and count the pick."""
        try:
            known, result = self.choose(ticket.request, now=now)
        except Exception as error:  # the policy's: it ends this request, and no other one
            ticket.fail(error)
            return no_endpoints(ticket.request.client_model)
        if not isinstance(result, Pick):
            return result
        result = replace(result, held_s=now - ticket.held_at_s, held_for=ticket.reason)
        self._start(result, known, now)
        return result

    def _start(self, pick: Pick, request: RequestInfo, now: float) -> None:
        """Count a pick, and whose it is."""
        self.pool.flights.start(pick, now=now)
        if self.catalog.num_declared:
            columns = self.pool.columns(now=now)
            s_per_byte = columns.s_per_byte[columns.rows[pick.address]]
            self.catalog.picked(pick, request.model, s_per_byte)

    def _left(self, request: RequestInfo, num_left: int, now: float) -> list[str]:
        """Return the endpoints where a request would take one of so many places that are left to
        other tenants."""
        places = {each: self.pool.running_places(each) for each in self._takers(request, now)}
        # Where fewer run, each place is too much to lose.
        is_many = sum(each.num_there for each in places.values()) >= MANY
        return left(places, num_left) if is_many else []

    def _takers(self, request: RequestInfo, now: float) -> Iterator[str]:
        """Yield the endpoints that can take a request and refuse none, with room or without."""
        columns, subset = self.pool.columns(now=now), request.subset
        for row in columns.open_rows(request.model):
            address = columns.addresses[row]
            if subset is None or is_in_subset(address, subset):
                yield address

    def _overfills(self, request: RequestInfo, now: float) -> bool:
        """Return whether a request of more sequences than any pod has room for has to wait, as half
        of the pods have more than they have room for, and other tenants have had requests lately.

        The engine runs such a request's sequences in order of arrival, before all that come later.
        """
        if self.pool.flights.tenants.is_alone(request.claim, now):
            return False
        places = [self.pool.places(each) for each in self._takers(request, now)]
        # One in which nobody has waited yet has no more room than others.
        known = max([most for most, _ in places if most < inf], default=inf)
        free = [min(most, known) - num for most, num in places]
        num_over = sum(each < 0 for each in free)
        return num_over > 0 and max(free) < request.num_sequences and 2 * num_over >= len(free) - 1

    def _least_ttft_s(self, request: RequestInfo, now: float) -> float:
        """Return the time to its first token that a request needs at least, by estimate.

        Endpoints where it has nothing are not looked at one by one: some may have thousands.
        """
        adapter = "" if request.adapter is None else self.catalog.served(request.adapter)
        columns = self.pool.columns(now=now)
        s_per_byte, load_s = columns.least()
        cached = {columns.rows[each] for each in request.cached_bytes if each in columns.rows}
        least_s = [
            request.rest_bytes(columns.addresses[row]) * columns.s_per_byte[row]
            + (columns.load_s(row, adapter) if adapter else 0.0)
            for row in cached | columns.holders(adapter)
        ]
        return min([request.rest_bytes("") * s_per_byte + (load_s if adapter else 0.0), *least_s])


def _last_holders(request: RequestInfo, catalog: Catalog, snapshot: Snapshot) -> frozenset[str]:
    """Return the endpoints that still serve a declared adapter, and get it where no other can."""
    resorts = [view.address for view in snapshot.endpoints if view.is_last_resort]
    return catalog.planner.last_holders(request.model, resorts) if resorts else frozenset()


def _are_gone(result: Pick | Rejection | Wait, request: RequestInfo, columns: Columns) -> bool:
    """Return whether the pods that have a request's adapter are gone, and other pods may load
    it.
    """
    if isinstance(result, Pick):
        is_open = columns.is_open[columns.rows[result.address]]
        return not is_open and result.candidates[0].is_lost  # as all of them are, then
    if isinstance(result, Wait):
        return result.reason == FOR_POD
    is_none = result.reason is Reason.NO_ENDPOINTS
    return is_none and request.subset is None  # a gateway's own subset stays what it is


def _until_free(
    result: Pick | Rejection | Wait, kept: Mapping[str, float]
) -> Pick | Rejection | Wait:
    """Have a request wait for its turn that gets none of the endpoints that are not kept from
    it."""
    if not isinstance(result, Wait) or result.reason == FOR_POD:
        return result
    return Wait(min(*kept.values(), result.until_s), FOR_TURN)


def _is_empty(snapshot: Snapshot) -> bool:
    """Return whether nobody is there at all."""
    return all(
        view.is_gone or not (view.is_ready or view.is_last_resort) for view in snapshot.endpoints
    )


def _may_come(request: RequestInfo, snapshot: Snapshot) -> bool:
    """Return whether there may soon be an endpoint that can take a request, where there is none.

    A gateway's own subset stays what it is: one of it that restarts may have to list its models.
    """
    subset = request.subset
    return subset is None or any(
        view.is_ready and view.registered is None and is_in_subset(view.address, subset)
        for view in snapshot.endpoints
    )


def _is_asleep(snapshot: Snapshot) -> bool:
    """Return whether nobody is awake who could load an adapter."""
    views = snapshot.endpoints
    return any(view.is_asleep for view in views) and not any(view.is_ready for view in views)
