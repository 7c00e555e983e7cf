"""Which endpoints are the homes of which adapters: rendezvous hashing with bounded loads.

The adapters with the most work choose first, each along its own order. An endpoint takes homes

1. as many as it has GPU slots, and where all have more homes than slots a quarter more than its
   part of them;
2. with as much work as it carries, or a quarter more than its part of all work if that is more;
3. and never more than its host memory has places.

Where the first two leave no endpoint for an adapter, the third alone counts. First each adapter
gets one home, then the rest: what is popular takes no room from what else would have none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import ceil, inf
from operator import attrgetter

from msgspec import Struct

from extproc.adapters.placement.levels import NAMES_A_PASS, Levels, level_of, rate_of
from extproc.adapters.placement.orders import DEPTH, Orders

CARRIED = 0.5
"""Work of one adapter that a replica carries, in seconds per second. Well below 1: an endpoint has
other adapters, and work comes in bursts."""
SLACK = 0.25
"""How far an endpoint may be above its part, as a part of that."""


class Capacity(Struct, frozen=True):
    """The capacity of one endpoint.

    Attributes:
        max_loras: Adapters in its GPU slots; None for unknown, which bounds nothing.
        max_cpu_loras: Adapters in its host memory, those in slots included; None likewise.
    """

    address: str
    max_loras: int | None = None
    max_cpu_loras: int | None = None


def place(
    levels: Mapping[str, int],
    capacities: Sequence[Capacity],
    order: Callable[[str], Iterable[str]],
) -> Iterator[dict[str, tuple[str, ...]]]:
    """Yield the homes of each adapter so far, none for those that find no room.

    Args:
        levels: Of each adapter's work; see `levels`.
        capacities: Of the endpoints.
        order: Returns all endpoints in an adapter's order.
    """
    if not capacities:
        yield dict.fromkeys(levels, ())
        return
    homes: dict[str, tuple[str, ...]] = {}
    rooms = _Rooms(capacities, levels.values())
    # An adapter whose order is not known yet takes a draw of every endpoint.
    num_a_pass = max(1, NAMES_A_PASS * DEPTH // max(DEPTH, 4 * len(capacities)))
    most_work_first = sorted(sorted(levels), key=levels.__getitem__, reverse=True)
    for number, adapter in enumerate(most_work_first, start=1):
        homes[adapter] = rooms.first(order(adapter), levels[adapter])
        if number % num_a_pass == 0:
            yield homes
    for number, adapter in enumerate(most_work_first, start=1):
        own = homes[adapter]
        if own and _is_short(own, levels[adapter]):
            homes[adapter] = rooms.more(own, order(adapter), levels[adapter])
        if number % num_a_pass == 0:
            yield homes
    yield homes


class _Room(Struct):
    """The room on an endpoint.

    Attributes:
        num_places: Homes, in its host memory.
        num_homes: Homes within its part of all.
        work: Within its part of all work, in seconds per second.
    """

    num_places: float
    num_homes: float
    work: float


class _Rooms:
    """The room on all endpoints. With thousands of adapters all that depends on a level alone is
    computed once."""

    def __init__(self, capacities: Sequence[Capacity], levels: Iterable[int]) -> None:
        num_of_level = Counter(levels)
        slots = sum([each.max_loras or 0 for each in capacities])
        num_homes = {
            level: min(len(capacities), ceil(rate_of(level) / CARRIED)) or 1
            for level in num_of_level
        }
        self._work = {level: rate_of(level) / num for level, num in num_homes.items()}
        all_homes = sum([num * num_homes[level] for level, num in num_of_level.items()])
        all_work = sum([num * rate_of(level) for level, num in num_of_level.items()])
        # In steps, so that routers whose sums differ a little have the same bounds.
        parts = (1 + SLACK) * _stepped(all_homes) / (slots or 1)
        homes_a_slot = parts if all_homes > slots else 1
        work = max(CARRIED, (1 + SLACK) * _stepped(all_work) / len(capacities))
        self._rooms = {
            each.address: _Room(
                inf if each.max_cpu_loras is None else each.max_cpu_loras,
                inf if each.max_loras is None else ceil(each.max_loras * homes_a_slot),
                work,
            )
            for each in capacities
        }
        self._num_with_places = sum([room.num_places >= 1 for room in self._rooms.values()])

    def first(self, order: Iterable[str], level: int) -> tuple[str, ...]:
        """Return an adapter's first home, if any endpoint has room."""
        if not self._num_with_places:
            return ()
        found = None
        for place, address in enumerate(order):
            if self._is_open(address, level):
                found = address
                break
            if found is None and self._rooms[address].num_places >= 1:
                found = address
            if found is not None and place >= DEPTH - 1:
                break
        return () if found is None else self._taken(found, level)

    def more(self, homes: tuple[str, ...], order: Iterable[str], level: int) -> tuple[str, ...]:
        """Return an adapter's homes and as many more as it needs, where there is room."""
        for address in order:
            if address not in homes and self._is_open(address, level):
                homes += self._taken(address, level)
                if not _is_short(homes, level):
                    break
        return homes

    def _is_open(self, address: str, level: int) -> bool:
        room = self._rooms[address]
        return room.num_places >= 1 and room.num_homes >= 1 and room.work >= self._work[level]

    def _taken(self, address: str, level: int) -> tuple[str, ...]:
        """Return the endpoint, with as much less room."""
        room = self._rooms[address]
        room.num_places -= 1
        room.num_homes -= 1
        room.work -= self._work[level]
        self._num_with_places -= room.num_places < 1
        return (address,)


def _is_short(homes: Sequence[str], level: int) -> bool:
    """Return whether an adapter has more work than so many endpoints carry."""
    return rate_of(level) > CARRIED * len(homes)


def _stepped(value: float) -> float:
    return rate_of(level_of(value))


MAX_DRAWS = 50_000
"""In one update, for the heads of the orders of adapters that are new: some 30 ms in its passes.
One that finds no room in its head takes a draw of every endpoint besides, once."""


class Placement:
    """Where each adapter should be: the homes of all of them, kept up.

    Once it is settled, its answer depends on the levels and the endpoints alone, not on how they
    came about.

    Attributes:
        is_settled: All adapters are placed. Many that are new at once take several updates.
        homes: Of each adapter, the one to fill first first; empty where no endpoint has room. A new
            mapping after each change, never mutated.
    """

    def __init__(self) -> None:
        self._levels = Levels()
        self._orders = Orders()
        self._capacities: tuple[Capacity, ...] = ()
        self.is_settled = True
        self.homes: Mapping[str, Sequence[str]] = {}

    def update(
        self, rates: Mapping[str, float], capacities: Iterable[Capacity], *, now: float
    ) -> Iterator[None]:
        """Place anew, if a level or an endpoint has changed, in passes. To be called every second
        or so. One that is left before its end is made up for by the next one.

        Args:
            rates: Offered work in seconds per second, of all adapters that there are: one without
                work has a home too, one that is not among them has none.
            capacities: Of the endpoints that may be homes.
            now: Monotonic seconds.
        """
        before, capacities = (
            self._levels.by_adapter,
            tuple(sorted(capacities, key=attrgetter("address"))),
        )
        yield from self._levels.update(rates, now=now)
        levels = self._levels.by_adapter
        if levels is before and capacities == self._capacities and self.is_settled:
            return
        self._capacities, self.is_settled = capacities, False
        yield from self._orders.set_endpoints([each.address for each in capacities])
        most_work_first = sorted(sorted(levels), key=levels.__getitem__, reverse=True)
        yield
        known = self._orders.learn(most_work_first, max_draws=MAX_DRAWS)
        placed = {adapter: levels[adapter] for adapter in known}
        homes = place(placed, capacities, self._orders.walk)
        found = next(homes)
        for found in homes:  # noqa: B007 - the last one counts
            yield
        self.homes, self.is_settled = found, len(known) == len(levels)

    def walk(self, adapter: str) -> Iterator[str]:
        """Yield all endpoints, those to try first first: its homes, then the rest of its order.

        One by one: the first few cost little among however many endpoints.
        """
        homes = self.homes.get(adapter, ())
        # Of an iterator: CPython's compiler fails at a sequence (docs/performance.md).
        yield from iter(homes)
        for address in self._orders.walk(adapter):
            if address not in homes:
                yield address
