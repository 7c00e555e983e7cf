"""The picks of other routers, as reported by those: counted beside our own.

Messages of another router may be late, lost, repeated, in any order, or false. That costs accuracy
and no more. Our own picks are never touched, and everything kept here is bounded. No request is
rejected for picks that the next report does not show (`EndpointView._num_unseen`).

1. A router is listened to from `begin` to `forget`. `begin` again voids its earlier messages. Its
   requests in flight at `forget`, and at `begin` by the last report, still count as foreign
   requests until they are reported again or load reports show less.
2. A pick counts once and ends once. If it is reported again for another endpoint, it has moved
   there. An end may come before its start: the ids of ended picks are remembered for a while, and a
   start of one of them is ignored.
3. A pick for an endpoint that is not in the pool is ignored. The name of an adapter is ignored
   until the endpoint lists it: the request counts without it.
4. A pick whose end is never reported ends with its endpoint, with a report that leaves no room for
   it, or with its age. While an access log reports ends, a report counts once the endpoint has
   served one of our own picks that came well after. An endpoint ends when it leaves or restarts, or
   when it lists names no more and does not say when it started.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import count, takewhile
from typing import NamedTuple

from msgspec import Struct

from extproc.bounds import between
from extproc.fleet.foreign import PeerFlight
from extproc.fleet.listeners import NOBODY, WaitingLine, WorkObserver
from extproc.fleet.prompts import MAX_AGE_S, MAX_QUEUE_S
from extproc.fleet.tracked import Tracked
from extproc.tenancy import Share

FULL = "full"
UNKNOWN_POD = "unknown_pod"


class PeerPick(NamedTuple):
    """A pick that a router reports.

    Attributes:
        body_bytes: Without the prefix that the endpoint is believed to have in its KV cache.
        age_s: Of the pick when it was sent.
        share: The turns that it counts for; None for none, or where it may have been sent before.
        num_sequences: As `RequestInfo.num_sequences`.
    """

    id: str
    address: str
    adapter: str | None
    body_bytes: int
    age_s: float
    share: Share | None = None
    num_sequences: int = 1


class PeerPickEnd(NamedTuple):
    """The end of a pick; `has_run` is False if the engine cannot have worked on it."""

    id: str
    has_run: bool = True


class PeerPickBounds(Struct, frozen=True):
    """Bounds of other routers' messages; a pick takes some 300 bytes and its name, a remembered id
    100.

    Attributes:
        max_age_s: Age from which a pick without an end is given up.
        max_ended: Ids of ended picks that are remembered for each router.
    """

    max_per_router: int = 16_384
    max_picks: int = 65_536
    max_routers: int = 256
    max_age_s: float = 600.0
    max_ended: int = 1_024
    max_id_chars: int = 128


class PeerPicks:
    """The picks in flight of all other routers.

    Args:
        find: Returns the endpoint with an address, if it is in the pool.
        queue: Told of room, and of each pick that is counted, once.
        catalog: Gets the models that new picks ask for.

    Attributes:
        num_in_flight: Picks that have not ended.
        num_received: Received picks, ignored ones included.
        num_ignored: Picks that were not counted, by reason.
    """

    def __init__(
        self,
        find: Callable[[str], Tracked | None],
        bounds: PeerPickBounds | None = None,
        *,
        queue: WaitingLine = NOBODY,
        catalog: WorkObserver = NOBODY,
    ) -> None:
        self._find = find
        self._bounds = bounds or PeerPickBounds()
        self._routers: dict[str, _Teller] = {}
        self.num_in_flight = 0
        self.num_received = 0
        self.num_ignored: Counter[str] = Counter({FULL: 0, UNKNOWN_POD: 0})
        self._queue, self._catalog = queue, catalog

    @property
    def num_routers(self) -> int:
        """Routers that tell us their picks."""
        return len(self._routers)

    def hears(self, router_id: str) -> bool:
        """Return whether it listens to a router."""
        return router_id in self._routers

    def begin(self, router_id: str, *, now: float) -> None:
        """Listen to a router from now on; its earlier messages are void."""
        for tracked, void in self._end_all(self._flights_of(router_id), now=now).items():
            # Picks that it sends again are taken from foreign requests (`Tracked.begin_told`).
            tracked.leave_to_reports([e for e in void if tracked.others.is_reported(e)])
        self._routers.pop(router_id, None)
        if len(self._routers) < self._bounds.max_routers:
            self._routers[router_id] = _Teller()

    def forget(self, router_id: str, *, now: float) -> None:
        """End all picks of a router that is gone, and listen to it no longer."""
        flights = self._flights_of(router_id)
        for tracked, gone in self._end_all(flights, now=now).items():
            tracked.leave_to_reports(gone)
        self._routers.pop(router_id, None)

    def start(self, pick: PeerPick, *, now: float) -> None:
        """Count a pick, or move it to the endpoint that it is now reported for."""
        router = self._routers.get(router_of(pick.id))
        if router is None or pick.id in router.ended:
            return
        flight = router.flights.get(pick.id)
        if flight is not None:
            if flight.tracked.endpoint.address == pick.address:
                return
            self._uncount(flight, now=now, has_run=False)
            flight.tracked.bound(now)
        self.num_received += 1
        tracked = self._find(pick.address)
        if tracked is None:
            self.num_ignored[UNKNOWN_POD] += 1
        elif self._is_full(router) or self._is_long(pick.id):
            self.num_ignored[FULL] += 1
        else:
            self._count(router, pick, tracked, now)
            if flight is None:
                self._count_once(pick, tracked, now)

    def finish(
        self,
        pick_id: str,
        *,
        now: float,
        reported_at_s: float | None = None,
        has_run: bool = True,
        address: str = "",
    ) -> None:
        """End a pick that ended at `now`, by a report of `reported_at_s` (None for `now`).

        `address` is of the endpoint that served it, "" for the pick's own; `has_run` is False if
        the engine there cannot have worked on it.
        """
        router = self._routers.get(router_of(pick_id))
        if router is None or self._is_long(pick_id):
            return
        flight = router.flights.get(pick_id)
        if flight is None:
            router.remember(pick_id, self._bounds.max_ended)
        else:
            is_served_here = address in ("", flight.tracked.endpoint.address)
            self._end(flight, now=now, has_run=has_run and is_served_here)
            reported_at_s = now if reported_at_s is None else reported_at_s
            flight.tracked.bound(reported_at_s)
            counted_at = flight.tracked.endpoint.address
            self._queue.freed_elsewhere(counted_at, flight.adapter, now=reported_at_s)
            served = None if is_served_here else self._find(address)
            if served is not None:
                served.note(served.listed_adapter(flight.name), now=now, has_run=has_run)

    def drop(self, tracked: Tracked) -> list[PeerFlight[Tracked]]:
        """End all picks of an endpoint that left or restarted, and return them."""
        flights = list(tracked.others.flights.values())
        for flight in flights:
            self._end(flight, has_run=False)
        return flights

    def reconcile(self, tracked: Tracked, num_others: int, *, told_by_s: float, now: float) -> None:
        """End the endpoint's oldest picks received by `told_by_s` that are more than
        `num_others`.
        """
        flights = tracked.others.flights.values()
        old = list(takewhile(lambda each: each.told_at_s <= told_by_s, flights))
        if len(old) > num_others:
            self._end_all(old[: len(old) - max(0, num_others)], now=now)

    def expire(self, *, now: float) -> None:
        """End the picks received more than `max_age_s` ago."""
        before_s = now - self._bounds.max_age_s
        for router in self._routers.values():
            flights = takewhile(lambda each: each.told_at_s < before_s, router.flights.values())
            self._end_all(flights, now=now, has_run=False)

    # --- inside -----------------------------------------------------------------------------

    def _flights_of(self, router_id: str) -> Iterable[PeerFlight[Tracked]]:
        router = self._routers.get(router_id)
        return () if router is None else router.flights.values()

    def _is_full(self, router: _Teller) -> bool:
        bounds = self._bounds
        is_full = len(router.flights) >= bounds.max_per_router
        return is_full or self.num_in_flight >= bounds.max_picks

    def _is_long(self, pick_id: str) -> bool:
        return len(pick_id) > self._bounds.max_id_chars

    def _count(self, router: _Teller, pick: PeerPick, tracked: Tracked, now: float) -> None:
        picked_at_s = now - between(pick.age_s, self._bounds.max_age_s)
        work = pick.body_bytes, pick.num_sequences
        flight = PeerFlight(pick.id, tracked, pick.adapter, now, picked_at_s, *work)
        router.flights[pick.id] = flight
        tracked.begin_told(flight, pick.share)
        self.num_in_flight += 1

    def _count_once(self, pick: PeerPick, tracked: Tracked, now: float) -> None:
        """Count what a pick asks for, wherever it moves."""
        if pick.share is not None:
            self._queue.charge_told(pick.share)
        if pick.adapter is not None and pick.age_s <= MAX_AGE_S:
            work_s = pick.body_bytes * tracked.prompts.costs.prompt_s_per_byte
            picked_at_s = now - max(0.0, pick.age_s)
            self._catalog.told(pick.adapter, min(work_s, MAX_QUEUE_S), picked_at_s)

    def _end_all(
        self, flights: Iterable[PeerFlight[Tracked]], *, now: float, has_run: bool = True
    ) -> dict[Tracked, list[PeerFlight[Tracked]]]:
        """End flights; return them by endpoint."""
        ended: dict[Tracked, list[PeerFlight[Tracked]]] = {}
        for flight in list(flights):
            self._end(flight, now=now, has_run=has_run)
            ended.setdefault(flight.tracked, []).append(flight)
        for tracked in ended:
            tracked.bound(now)
        return ended

    def _end(self, flight: PeerFlight[Tracked], *, now: float = 0.0, has_run: bool = True) -> None:
        self._uncount(flight, now=now, has_run=has_run)
        router = self._routers[router_of(flight.id)]
        router.remember(flight.id, self._bounds.max_ended)

    def _uncount(self, flight: PeerFlight[Tracked], *, now: float, has_run: bool) -> None:
        del self._routers[router_of(flight.id)].flights[flight.id]
        self.num_in_flight -= 1
        flight.tracked.end_told(flight, now=now, has_run=has_run)


class _Teller:
    """The picks of one router, in the order of their arrival."""

    __slots__ = ("ended", "flights")

    def __init__(self) -> None:
        self.flights: dict[str, PeerFlight[Tracked]] = {}
        self.ended: dict[str, None] = {}

    def remember(self, pick_id: str, most: int) -> None:
        """Remember that a pick has ended, and forget the oldest one beyond `most`."""
        self.ended[pick_id] = None
        if len(self.ended) > most:
            del self.ended[next(iter(self.ended))]


# The ids of picks: unique over routers and restarts, and each names its router.


def pick_ids(router_id: str) -> Callable[[], str]:
    """Return a function that returns a new id of this router's picks at each call."""
    numbers = count()
    return lambda: f"{router_id}-{next(numbers)}"


def router_of(pick_id: str) -> str:
    """Return the router that made the pick; "" for an id that names none."""
    return pick_id.rpartition("-")[0]


def number_of(pick_id: str) -> int:
    """Return the number of a pick of ours among those of its router."""
    return int(pick_id.rpartition("-")[2])


def pick_id_of(router_id: str, number: int) -> str:
    """Return the id of a router's pick."""
    return f"{router_id}-{number}"
