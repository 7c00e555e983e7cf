"""Sums by place: all that a router tells the others of its picks, never a pick by itself.

A *place* is an endpoint, an adapter, and whose turn a request there is. An update has how many
requests began and ended at each place since the last one. About once a second an update is whole:
it has how many there are, so that whatever was lost is made good.

Nothing that is counted of other routers needs single picks:

1. The requests that run where, to choose and to admit by: the counts. The report of an endpoint
   has counted what began before it. Of what ended since, it has counted what began before, by its
   mean age.
2. Prompts that are to be computed: the bytes of what began, together. One that has ended was
   computed before all that came later, so the oldest of its age or older are done.
3. A pick that moves, as the data plane fell back: it leaves one place and begins at another. So
   does one that another endpoint served.
4. Turns of tenants: tokens, by place. Only what begins is charged, so a whole update charges
   nothing, and what was lost stays uncharged.
5. The slots that adapters use, and for whom: the latest that began of a place.
6. A router that is gone: its counts are taken back, and are foreign requests until reports show
   less. An end that was lost, a pick of an endpoint that was not known yet: the next whole update.
7. How long requests have their place: the mean age of those that ended.
8. An entry of the access log finds its router by the pick's id, and that router tells of the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct

from extproc.bounds import MAX_TOKENS, plain, whole
from extproc.pods.endpointstate import InFlight

BEGAN, ENDED, LEFT = range(3)
"""What happened to requests. LEFT: they have ended there, or are elsewhere, and the engine cannot
have worked on them."""
NUM_OF_CHANGE = 5
"""Integers of a change: place and kind (`4 * number + kind`), requests, sequences; of those that
began the bytes of their prompts, of others their ages when this was sent, in milliseconds; of those
that began what they count for, in thousandths of a token."""
MAX_NAME_BYTES = 256 * 1024
"""Of names in one update. Places beyond that are not told."""
NUM_KEPT = 256
"""Places that keep their numbers while nothing is there, and as many more as there are others."""
MAX_PLACES, MAX_CHANGES = 16_384, 4_096
"""Of one update; a receiver reads no more: some 30 ms."""
MAX_ADAPTER_CHARS = 256
"""Longest name told; a request for a longer one counts without it."""
MAX_FLOW_CHARS = 512
"""Longest name of a flow; requests of a longer one charge nobody."""
MAX_PRIORITY = 2**31 - 1
_MAX_CHANGE = 2**63

Place = tuple[str, str, str, int]
"""The address of an endpoint, an adapter ("" for a base model), a flow ("" for none: `Claim.flow`)
and its priority."""


_NOTHING = 0, 0


class PlaceSum(Struct, frozen=True, gc=False):
    """The unfinished requests of a place, and their sequences; as heard, any numbers."""

    place: Place
    num: int = 0
    num_sequences: int = 0


class Sums(Struct, frozen=True):
    """One update.

    Attributes:
        is_whole: All earlier updates are void, and what is not in `places` is nowhere.
        first: The number of the first of `places`; the others follow.
        places: With what is there before `changes`; nothing unless `is_whole`.
        changes: `NUM_OF_CHANGE` integers each, those that began first.
    """

    is_whole: bool = False
    first: int = 0
    places: Sequence[PlaceSum] = ()
    changes: Sequence[int] = ()

    @property
    def num_begun(self) -> int:
        """The requests that have begun."""
        starts = range(0, len(self.changes), NUM_OF_CHANGE)
        return sum(self.changes[at + 1] for at in starts if self.changes[at] & 3 == BEGAN)


class PickSums:
    """Sums up the picks of this router.

    Attributes:
        num_left_out: Requests that are in no update: too many places.
    """

    def __init__(self) -> None:
        self.num_left_out = 0
        self._numbers: dict[Place, int] = {}
        self._sent_places: list[Place] = []  # the same places, as they are sent
        self._new = 0  # number of the first that is in no update yet
        self._num_name_bytes, self._is_full = 0, False
        self._changes: tuple[dict[int, list[float]], ...] = ({}, {}, {})

    def began(self, flight: InFlight, tokens: float) -> None:
        """Count a pick where it is; it counts for so many tokens, 0 if it did before."""
        request = flight.pick.request
        num_bytes = request.rest_bytes(flight.pod.address)
        self._count(BEGAN, flight, num_bytes, tokens)

    def ended(self, flight: InFlight, *, has_run: bool) -> None:
        """Count the end of a pick, or that it is elsewhere."""
        self._count(ENDED if has_run else LEFT, flight, flight.started_at_s, 0.0)

    def take(self, *, now: float) -> Sums | None:
        """Return what has happened since the last update; None for nothing."""
        flat: list[int] = []
        for kind, changes in enumerate(self._changes):
            for number, (num, num_sequences, amount, tokens) in changes.items():
                if kind != BEGAN:
                    amount = (num * now - amount) * 1e3
                numbers = 4 * number + kind, int(num), int(num_sequences)
                flat += (
                    *numbers,
                    whole(amount, _MAX_CHANGE),
                    whole(tokens * 1e3, 1_000 * MAX_TOKENS),
                )
            changes.clear()
        if not flat:
            return None
        first, self._new = self._new, len(self._sent_places)
        return Sums(False, first, [PlaceSum(each) for each in self._sent_places[first:]], flat)

    def whole(self, flights: Iterable[InFlight]) -> Sums:
        """Return all that is in flight; changes that were not taken are in it."""
        counts: dict[Place, list[int]] = {}
        for flight in flights:
            place, num = _place_of(flight), flight.pick.request.num_sequences
            if (count := counts.get(place)) is None:
                counts[place] = [1, num]
            else:
                count[0] += 1
                count[1] += num
        if self._is_full or len(self._numbers) > 2 * len(counts) + NUM_KEPT:
            self._numbers.clear()
            self._sent_places.clear()
            self._num_name_bytes, self._is_full = 0, False
        for place, (num, _) in counts.items():
            if place not in self._numbers and not self._add(place):
                self.num_left_out += num
        self._new = len(self._sent_places)
        for changes in self._changes:
            changes.clear()
        numbered = zip(self._numbers, self._sent_places, strict=True)
        return Sums(
            True, 0, [PlaceSum(sent, *counts.get(each, _NOTHING)) for each, sent in numbered]
        )

    def _count(self, kind: int, flight: InFlight, amount: float, tokens: float) -> None:
        place = _place_of(flight)
        if (number := self._numbers.get(place)) is None:
            if not self._add(place):
                self.num_left_out += 1
                return
            number = self._numbers[place]
        changes, num = self._changes[kind], flight.pick.request.num_sequences
        if (change := changes.get(number)) is None:
            changes[number] = [1, num, amount, tokens]
        else:
            change[0] += 1
            change[1] += num
            change[2] += amount
            change[3] += tokens

    def _add(self, place: Place) -> bool:
        """Number a place; return False where there is no room."""
        address, adapter, flow, priority = place
        if plain(adapter, MAX_ADAPTER_CHARS) != adapter:
            adapter = ""
        if abs(priority) > MAX_PRIORITY or plain(flow, MAX_FLOW_CHARS) != flow:
            flow, priority = "", 0
        num_bytes = len(address) + len(adapter.encode()) + len(flow.encode())
        has_many = len(self._numbers) >= MAX_PLACES
        if has_many or self._num_name_bytes + num_bytes > MAX_NAME_BYTES:
            self._is_full = True
            return False
        self._num_name_bytes += num_bytes
        self._numbers[place] = len(self._numbers)
        self._sent_places.append((address, adapter, flow, priority))
        return True


def _place_of(flight: InFlight) -> Place:
    request = flight.pick.request
    claim = request.claim
    return flight.pod.address, request.adapter or "", claim.flow, claim.priority
