"""Another router as far as a pool hears of it: it picks, and tells that in sums."""

from __future__ import annotations

from typing import Any

from extproc.pods.endpointstate import EndpointState
from extproc.pods.picksums import PickSums, Sums
from extproc.pods.pool import InFlight, Pool
from extproc.types import Endpoint
from tests.builders import address, pick, request


class OtherRouter:
    """Tells a pool of each event at once, unless the message `is_lost`."""

    def __init__(self, pool: Pool, id: str = "x", *, now: float = 0.0) -> None:
        self._pool, self.id = pool, id
        self._sums = PickSums()
        self._at: dict[str, EndpointState] = {}
        self.flights: dict[str, InFlight] = {}
        self.is_lost = False
        self.tell_whole(now=now)

    def start(
        self,
        id: str = "1",
        number: int = 1,
        adapter: str | None = "a",
        *,
        now: float = 0.0,
        tokens: float = 0.0,
        **info: Any,
    ) -> None:
        """Send a request to an endpoint."""
        made = pick(f"{self.id}-{id}", number, info=request(adapter, **info))
        flight = self.flights[id] = InFlight(made, now, pod=self._pod(address(number)))
        self._sums.began(flight, tokens)
        self._tell(now)

    def end(self, id: str = "1", *, now: float = 0.0, has_run: bool = True) -> None:
        """Have a request end."""
        self._sums.ended(self.flights.pop(id), has_run=has_run)
        self._tell(now)

    def move(self, id: str, number: int, *, now: float = 0.0) -> None:
        """Have a request be at another endpoint."""
        before = self.flights[id]
        moved = InFlight(before.pick, before.started_at_s, pod=self._pod(address(number)))
        self.flights[id] = moved
        self._sums.ended(before, has_run=False)
        self._sums.began(moved, 0.0)
        self._tell(now)

    def tell_whole(self, *, now: float = 0.0) -> None:
        """Tell all that is in flight."""
        self.say(self._sums.whole(self.flights.values()), now=now)

    def say(self, sums: Sums, *, now: float = 0.0) -> None:
        """Tell what may be false."""
        if not self.is_lost:
            self._pool.peer_picks.hear(self.id, sums, now=now)

    def leave(self, *, now: float = 0.0) -> None:
        """Be gone."""
        self._pool.peer_picks.forget(self.id, now=now)

    def _tell(self, now: float) -> None:
        sums = self._sums.take(now=now)
        assert sums is not None
        self.say(sums, now=now)

    def _pod(self, where: str) -> EndpointState:
        if where not in self._at:
            self._at[where] = EndpointState(Endpoint(where), {})
        return self._at[where]
