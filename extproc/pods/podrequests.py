"""The requests at one endpoint that have not ended: our own, each by itself, and those of other
routers, as these tell of them by sums."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any

from msgspec import Struct

from extproc.pods.listedmodels import ListedModels
from extproc.pods.podload import PodLoad
from extproc.types import Pick

NEAR_S = 0.005
"""Of the times at which a router tells that a request began and, later, when that was."""


class Flight(Struct, frozen=True):
    """A pick that has not finished.

    Attributes:
        adapter: That it counts for at its endpoint; None for a base model.
        num_beside: Unfinished requests there when it was picked.
    """

    pick: Pick
    started_at_s: float
    adapter: str | None = None
    num_beside: int = 0


class OwnRequests:
    """Our requests there.

    Attributes:
        flights: By the pick's id, from the oldest on.
        served_s: When the latest of them that the endpoint has served was made.
    """

    def __init__(self, load: PodLoad) -> None:
        self._load = load
        self.flights: dict[str, Flight] = {}
        self.served_s = -inf

    def ended(self, flight: Flight, has_run: bool, ended_s: float, now: float) -> None:
        """Stop counting a pick; `has_run` is False if the engine cannot have worked on it.
        `PodLoad.settle` is to follow.
        """
        pick, load, at_s, adapter = flight.pick, self._load, flight.started_at_s, flight.adapter
        num = pick.request.num_sequences
        del self.flights[pick.id]
        load.num_sequences -= num
        load.prompts.ended(pick.id, has_run, now)
        load.room.ended(num, 1, ended_s - at_s if has_run else None, at_s)
        if adapter is not None:
            load.leave(adapter, 1, has_run, ended_s)

    def had_first_token(self, flight: Flight, at_s: float) -> None:
        """Record when a pick had its first token: what was sent before it is computed."""
        load, done_s = self._load, self._load.prompts.done_s
        load.prompts.had_first_token(flight.started_at_s, now=at_s)
        if load.prompts.done_s != done_s:
            load.settle()

    def served(self, started_at_s: float) -> None:
        """Record that the endpoint has served a pick that was made then."""
        if started_at_s > self.served_s:
            self.served_s = started_at_s

    def num_since(self, at_s: float) -> int:
        """Return the sequences of picks, of all routers, that have not ended and were made after
        `at_s`."""
        foreign = self._load.foreign
        num = foreign.num_since(at_s) if foreign.num_from_peers else 0
        for flight in reversed(self.flights.values()):
            if flight.started_at_s <= at_s:
                break
            num += flight.pick.request.num_sequences
        return num

    def newest_s(self, until_s: float) -> float:
        """Return when the newest pick that was made by then was made; -inf without one."""
        times_s = (flight.started_at_s for flight in reversed(self.flights.values()))
        return next((at_s for at_s in times_s if at_s <= until_s), -inf)


@dataclass(slots=True, eq=False)
class PeerPlace:
    """Counts that another router has told of a place, and where they are counted.

    Attributes:
        router: Whose it is.
        name: Of an adapter; "" for none.
        flow: Whose turns its requests count for (`Claim.flow`); "" for nobody's.
        there: None while the endpoint is not in the pool.
        adapter: That requests count for there; None until the endpoint lists the one of that name.
        registered: The names that it listed when that was looked for.
        num: The requests that have not ended.
    """

    router: Any
    address: str
    name: str
    flow: str
    priority: int
    there: PeerRequests | None = None
    adapter: str | None = None
    registered: frozenset[str] | None = None
    num: int = 0
    num_sequences: int = 0


class PeerRequests:
    """The requests that are told of. `PodLoad.settle` is to follow all that changes them.

    Attributes:
        load: The endpoint's, which counts them.
        places: The places that routers have told of.
    """

    def __init__(self, load: PodLoad, listed: ListedModels) -> None:
        self.load, self._listed = load, listed
        self.places: dict[PeerPlace, None] = {}

    def picked(
        self, place: PeerPlace, num: int, num_sequences: int, num_bytes: int, now: float
    ) -> None:
        """Count requests that have just been sent, with so many bytes of prompts."""
        if not place.num and place.registered is not self._listed.registered:
            self._name(place)
        load = self.load
        place.num += num
        place.num_sequences += num_sequences
        load.foreign.picked(num, num_sequences, now)
        load.picked(
            load.num_picks,
            place.adapter,
            num_bytes // num,
            place.priority,
            place.flow,
            num,
            num_sequences,
            num,
            now,
            now,
        )

    def ended(
        self,
        place: PeerPlace,
        num: int,
        num_sequences: int,
        took_s: float,
        has_run: bool,
        now: float,
    ) -> str | None:
        """Stop counting requests, which took so long in the mean; see `OwnRequests.ended`. Return
        their adapter if no router has any left for it here."""
        began_s, load, adapter = now - took_s, self.load, place.adapter
        place.num -= num
        place.num_sequences -= num_sequences
        load.foreign.ended(num, num_sequences, began_s, now)
        from_s = began_s - NEAR_S if num == 1 else -inf  # of several the mean is known
        load.prompts.ended_between(num, has_run, from_s, began_s + NEAR_S, now)
        load.room.ended(num_sequences, num, took_s if has_run else None, began_s)
        if adapter is None or not load.leave(adapter, num, has_run, now):
            return None
        return adapter

    def recount(self, place: PeerPlace, num: int, num_sequences: int, *, now: float) -> None:
        """Count so many requests more, or less: what was told of them was lost."""
        if not place.num:
            self._name(place)
        load, adapter = self.load, place.adapter
        place.num += num
        place.num_sequences += num_sequences
        load.foreign.recount(num, num_sequences)
        if num > 0:
            load.num_picks += num
            if adapter is not None:
                load.use(adapter, place.priority, place.flow, num, now)
        elif num < 0:
            load.prompts.ended_between(-num, True, -inf, inf, now)
            if adapter is not None:
                load.leave(adapter, -num, True, now)

    def listed(self, *, now: float) -> None:
        """Count the requests whose adapter the endpoint has not listed before, if it does now."""
        for place in self.places:
            if place.num and place.adapter is None:
                adapter = self._name(place)
                if adapter is not None:
                    self.load.use(adapter, place.priority, place.flow, place.num, now)

    def _name(self, place: PeerPlace) -> str | None:
        """Find the adapter of a place for which no requests are counted, and return it."""
        place.registered, card = self._listed.registered, self._listed.card_of(place.name)
        place.adapter = None if card is None or card.parent is None else card.id
        return place.adapter
