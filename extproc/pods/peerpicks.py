"""The picks of other routers, as sums that those tell: counted beside our own.

Updates of another router may be late, lost, or false. That costs accuracy and no more, until its
next whole update. Our own picks are never touched, and everything kept here is bounded. No request
is rejected for requests that the next report does not show (`EndpointView.num_unseen`).

1. A router counts from its first whole update to `forget`. Then its requests in flight count as
   foreign ones until load reports show less.
2. A whole update replaces all that its router has told: places that it does not name have nothing.
3. Requests for an endpoint that is not in the pool are ignored until a whole update finds it there.
   The name of an adapter is ignored until the endpoint lists it: the requests count without it.
4. Requests on an endpoint that restarts run on until its router tells of the end, as with ours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count

from msgspec import Struct

from extproc.bounds import MAX_SEQUENCES
from extproc.learned.prompts import MAX_QUEUE_S
from extproc.pods.endpointstate import EndpointState
from extproc.pods.listeners import NOBODY, Slot, WaitingLine, WorkObserver
from extproc.pods.picksums import BEGAN, ENDED, LEFT, NUM_OF_CHANGE, Place, PlaceSum, Sums
from extproc.pods.podrequests import PeerPlace, PeerRequests

FULL = "full"
UNKNOWN_POD = "unknown_pod"
_NOWHERE = PeerPlace(None, "", "", "", 0)  # for numbers without a place: nothing is counted there


class PeerPickBounds(Struct, frozen=True):
    """Bounds of other routers' updates; a place takes some 300 bytes and its names."""

    max_per_router: int = 16_384
    max_picks: int = 65_536
    max_routers: int = 256
    max_places: int = 65_536  # of all routers


class PeerPicks:
    """The picks in flight of all other routers.

    Args:
        find: Returns the endpoint with an address, if it is in the pool.
        queue: Told of room, and of what each request counts for, once.
        catalog: Gets the adapters that requests ask for.

    Attributes:
        num_in_flight: Requests that have not ended.
        num_received: Requests told as they began, ignored ones included.
        num_ignored: Number of those that were not counted, by reason.
    """

    def __init__(
        self,
        find: Callable[[str], EndpointState | None],
        bounds: PeerPickBounds | None = None,
        *,
        queue: WaitingLine = NOBODY,
        catalog: WorkObserver = NOBODY,
    ) -> None:
        self._find = find
        self._bounds = bounds or PeerPickBounds()
        self._routers: dict[str, _Teller] = {}
        self.num_in_flight = self._num_places = 0
        self.num_received = 0
        self.num_ignored: Counter[str] = Counter({FULL: 0, UNKNOWN_POD: 0})
        self._queue, self._catalog = queue, catalog

    @property
    def num_routers(self) -> int:
        """Routers that tell us their picks."""
        return len(self._routers)

    def hears(self, router_id: str) -> bool:
        """Return whether a router has told all that it has in flight."""
        return router_id in self._routers

    def hear(self, router_id: str, sums: Sums, now: float) -> None:
        """Count an update of a router."""
        router = self._routers.get(router_id)
        if sums.is_whole:
            if router is None:
                if len(self._routers) >= self._bounds.max_routers:
                    return
                router = self._routers[router_id] = _Teller()
            self._replace(router, sums.places, now)
        elif router is None:
            return
        elif sums.places:
            places = [self._place(router, each.place) for each in sums.places]
            router.add(sums.first, places, self._bounds.max_places)
        if sums.changes:
            self._change(router, sums.changes, now)

    def forget(self, router_id: str, *, now: float) -> None:
        """Take back the counts of a router that is gone, and listen to it no longer."""
        router = self._routers.pop(router_id, None)
        for place in () if router is None else router.places.values():
            there, num = place.there, place.num_sequences
            if there is not None and num:
                adapter = place.adapter
                self._recount(place, 0, 0, now)
                there.load.foreign.leave_to_reports(num, adapter)
                there.load.row.touch()
            self._release(place)

    def drop(self, gone: PeerRequests) -> None:
        """Forget what is counted at an endpoint that has left."""
        for place in gone.places:
            self._add(place.router, -place.num)
            place.num = place.num_sequences = 0
            place.there = None
        gone.places.clear()

    # --- inside -----------------------------------------------------------------------------

    def _replace(self, router: _Teller, sums: Sequence[PlaceSum], now: float) -> None:
        before = router.places
        router.places = {
            each.place: before.pop(each.place) for each in sums if each.place in before
        }
        for gone in before.values():
            self._recount(gone, 0, 0, now)
            self._release(gone)
        router.numbered = [self._place(router, each.place) for each in sums]
        for place, each in zip(router.numbered, sums, strict=True):
            if place.num != each.num or place.num_sequences != each.num_sequences:
                num = max(0, each.num)
                num_sequences = _sequences(num, each.num_sequences)
                most = place.num + self._room(router)
                if num > most:
                    num = num_sequences = most
                self._recount(place, num, num_sequences, now)

    def _change(self, router: _Teller, changes: Sequence[int], now: float) -> None:
        numbered, num_numbered, each = router.numbered, len(router.numbered), iter(changes)
        room, changed, left = self._room(router), dict[PeerRequests, None](), list[Slot]()
        room_before, has_ended = room, False
        for code, num, num_sequences, amount, tokens in zip(*[each] * NUM_OF_CHANGE, strict=False):
            number, kind = code >> 2, code & 3
            if not num:
                continue
            place = numbered[number] if number < num_numbered else _NOWHERE
            there = place.there
            if kind == BEGAN:
                self.num_received += num
                if there is None or num > room:
                    is_unknown = there is None and place is not _NOWHERE
                    self.num_ignored[UNKNOWN_POD if is_unknown else FULL] += num
                    continue
                room -= num
                if num_sequences != num:
                    num_sequences = _sequences(num, num_sequences)
                there.picked(place, num, num_sequences, amount, now)
                if tokens and place.flow:
                    self._queue.charge_elsewhere(place.flow, place.priority, tokens / 1e3)
                if place.name and self._catalog.num_declared:
                    work_s = min(amount * there.load.prompts.costs.prompt_s_per_byte, MAX_QUEUE_S)
                    self._catalog.asked_elsewhere(place.name, num, work_s, now)
            elif there is not None and place.num and kind <= LEFT:
                if num >= place.num:
                    num, num_sequences = place.num, place.num_sequences
                elif not num <= num_sequences < place.num_sequences:
                    num_sequences = num
                room, has_ended = room + num, True
                took_s = amount / (1e3 * num)
                adapter = there.ended(place, num, num_sequences, took_s, kind == ENDED, now)
                if adapter is not None:
                    left.append((place.address, adapter))
            else:
                continue
            changed[there] = None
        self._add(router, room_before - room)
        for there in changed:
            there.load.settle()
        if has_ended:
            self._queue.freed_elsewhere(left, now)

    def _room(self, router: _Teller) -> int:
        bounds = self._bounds
        return min(bounds.max_per_router - router.num, bounds.max_picks - self.num_in_flight)

    def _place(self, router: _Teller, named: Place) -> PeerPlace:
        """Return a place, which may be new; `_NOWHERE` where there is no room."""
        if (place := router.places.get(named)) is None:
            if self._num_places >= self._bounds.max_places:
                return _NOWHERE
            self._num_places += 1
            place = router.places[named] = PeerPlace(router, *named)
        if place.there is None and (pod := self._find(place.address)) is not None:
            place.there = pod.peers
            pod.peers.places[place] = None
        return place

    def _recount(self, place: PeerPlace, num: int, num_sequences: int, now: float) -> None:
        """Have so many requests at a place."""
        there, more = place.there, num - place.num
        if there is not None and (num, num_sequences) != (place.num, place.num_sequences):
            there.recount(place, more, num_sequences - place.num_sequences, now=now)
            there.load.settle()
            self._add(place.router, more)

    def _add(self, router: _Teller, num: int) -> None:
        router.num += num
        self.num_in_flight += num

    def _release(self, place: PeerPlace) -> None:
        self._num_places -= 1
        if place.there is not None:
            del place.there.places[place]


class _Teller:
    """The places of one router, and by their numbers.

    Attributes:
        num: Its requests in flight.
    """

    __slots__ = ("num", "numbered", "places")

    def __init__(self) -> None:
        self.places: dict[Place, PeerPlace] = {}
        self.numbered: list[PeerPlace] = []
        self.num = 0

    def add(self, first: int, places: Sequence[PeerPlace], most: int) -> None:
        """Add places from a number on; of those in between nothing is known."""
        numbered = self.numbered
        if len(numbered) <= first <= most:
            numbered += [_NOWHERE] * (first - len(numbered))
            numbered += places


def _sequences(num: int, num_sequences: int) -> int:
    """Return the sequences of so many requests, as far as they can be true."""
    return min(max(num, num_sequences), num * MAX_SEQUENCES)


# The ids of picks: unique over routers and restarts, and each names its router.


def pick_ids(router_id: str) -> Callable[[], str]:
    """Return a function that returns a new id of this router's picks at each call."""
    return map(f"{router_id}-{{}}".format, count()).__next__


def router_of(pick_id: str) -> str:
    """Return the router that made the pick; "" for an id that names none."""
    return pick_id.rpartition("-")[0]
