"""The homes of all adapters, kept up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter

from extproc.adapters.placement.homes import Capacity, PlacementSettings, place
from extproc.adapters.placement.levels import Levels
from extproc.adapters.placement.orders import Orders

MAX_DRAWS = 50_000
"""In one update, for the heads of the orders of adapters that are new: some 30 ms. One that finds
no room in its head takes a draw of every endpoint besides, once."""


class Placement:
    """Where each adapter should be.

    Once it is settled, its answer depends on the levels and the endpoints alone, not on how they
    came about.

    Attributes:
        is_settled: All adapters are placed. Many that are new at once take several updates.
        homes: Of each adapter, the one to fill first first; empty where no endpoint has room. A new
            mapping after each change, never mutated.
    """

    def __init__(self, settings: PlacementSettings | None = None) -> None:
        self._settings = settings or PlacementSettings()
        self._levels = Levels(self._settings.cool_s)
        self._orders = Orders()
        self._capacities: tuple[Capacity, ...] = ()
        self.is_settled = True
        self.homes: Mapping[str, Sequence[str]] = {}

    def update(
        self, rates: Mapping[str, float], capacities: Iterable[Capacity], *, now: float
    ) -> None:
        """Place anew, if a level or an endpoint has changed. To be called every second or so.

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
        self._levels.update(rates, now=now)
        levels = self._levels.by_adapter
        if levels is before and capacities == self._capacities and self.is_settled:
            return
        self._capacities = capacities
        self._orders.set_endpoints([each.address for each in capacities])
        most_work_first = sorted(sorted(levels), key=levels.__getitem__, reverse=True)
        known = self._orders.learn(most_work_first, max_draws=MAX_DRAWS)
        self.is_settled = len(known) == len(levels)
        placed = {adapter: levels[adapter] for adapter in known}
        self.homes = place(placed, capacities, self._orders.walk, self._settings)

    def order(self, adapter: str) -> list[str]:
        """Return all endpoints, those to try first first: its homes, then the rest of its order."""
        return list(self.walk(adapter))

    def walk(self, adapter: str) -> Iterator[str]:
        """Yield the same one by one: the first few cost little among however many endpoints."""
        homes = self.homes.get(adapter, ())
        yield from homes
        for address in self._orders.walk(adapter):
            if address not in homes:
                yield address
