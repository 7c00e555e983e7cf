"""The estimates of `LeastHarm`, for its forms over views and over columns."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import exp, sqrt

from msgspec import Struct

from extproc.adapters.placement import order
from extproc.types import RequestInfo

PROMPT_STALL_RATIO = 0.1
LOAD_STALL_RATIO = 0.05
"""Part of a prompt's and of a load's time that counts as harm to each pending request: it decodes
a step later, but has most of its steps without that."""
LATE_RATIO = 0.8
"""Part of the objective from which an estimated first token counts as late. The estimate leaves out
the step that runs already, and the share of requests that decode.
"""
SHARED_SLOT = 10
"""Requests that an adapter may have in each of its slots before a further one becomes cheaper."""
ROOM_RATIO = 0.5
"""Part of the objective that prompts ahead may take at an endpoint that has room."""
LAST_SLOT_RATIO = 0.2
"""Part of a slot's price that comes on top where it is the endpoint's last free one, half of it
where it is one of two, and so on. In the laboratory 0.2 and 0.5 let routers that do not tell each
other miss a quarter fewer objectives, and 0.2 also those that do."""
MAX_ADAPTERS_WITH_HOMES = 1024
"""Whose homes are remembered; computing them takes about a microsecond for each endpoint."""
NUM_FIRST_HOMES, MAX_ADAPTERS_WITH_FIRST_HOMES = 64, 16_384
"""The same of an adapter's first homes, which most decisions need no more than."""


class Weights(Struct, frozen=True):
    """The parameters of `LeastHarm`, in seconds."""

    ttft_s: float
    late_s: float
    slot_s: float
    full_s: float
    pending_s: float
    home_s: float

    def objective_s(self, request: RequestInfo) -> float:
        """Return the wanted time to the first token: the request's own where it has one."""
        wanted_s = request.claim.ttft_s
        return self.ttft_s if wanted_s is None else wanted_s

    def slot_price_s(
        self, num_slots: int, num_free: int, num_elsewhere: int, num_places: int
    ) -> float:
        """Return the price of a slot for an adapter, where it does not run.

        Args:
            num_slots: Of all endpoints that tell theirs; without any it is 0.
            num_free: Of those.
            num_elsewhere: Requests that the adapter has, at `num_places` endpoints.
        """
        slot_s = self.slot_s * (exp(-num_free / sqrt(num_slots)) if num_slots else 0.0)
        if num_elsewhere:
            slot_s /= max(1.0, (num_elsewhere + 1) / (1 + num_places) / SHARED_SLOT)
        return slot_s


def last_slots(num_free: int) -> float:
    """Return by how much a slot's price is higher for how few are free at an endpoint, as a factor;
    1 where none is, or nobody knows how many there are."""
    return 1 + LAST_SLOT_RATIO / num_free if num_free > 0 else 1.0


@lru_cache(maxsize=MAX_ADAPTERS_WITH_HOMES)
def homes(adapter: str, addresses: tuple[str, ...]) -> tuple[int, ...]:
    """Return each address's place in the adapter's own order, the same in every router."""
    places = {address: place for place, address in enumerate(order(adapter, addresses))}
    return tuple([places[address] for address in addresses])


class FirstHomes:
    """The rows of addresses in adapters' orders, from the first home on."""

    def __init__(self) -> None:
        self._addresses: tuple[str, ...] = ()
        self._rows: dict[str, int] = {}
        self._first: dict[str, dict[int, int]] = {}

    def of(self, adapter: str, addresses: tuple[str, ...]) -> dict[int, int]:
        """Return an adapter's first homes, in order, and the place of each.

        Args:
            addresses: All, sorted; the same object as long as they stay.
        """
        if addresses is not self._addresses or len(self._first) >= MAX_ADAPTERS_WITH_FIRST_HOMES:
            self._addresses, self._first = addresses, {}
            self._rows = {address: row for row, address in enumerate(addresses)}
        first = self._first.get(adapter)
        if first is None:
            homes = self._order(adapter)[:NUM_FIRST_HOMES]
            first = self._first[adapter] = {row: place for place, row in enumerate(homes)}
        return first

    def all(self, adapter: str, addresses: tuple[str, ...]) -> Iterator[int]:
        """Yield the rows of all addresses in an adapter's order."""
        first = self.of(adapter, addresses)
        yield from first
        yield from self._order(adapter)[len(first) :]

    def _order(self, adapter: str) -> list[int]:
        return [self._rows[address] for address in order(adapter, self._addresses)]
