"""What the routers of a fleet tell each other: late, and in part lost."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial

from extproc.core.queue.plan import share_of
from extproc.core.told import ToldPick
from extproc.core.types import Pick
from extproc.sim.fleet.router import FleetRouter


class FleetTelling:
    """The picks of one router, told to the others: the observer of its pool.

    Args:
        others: The other routers.
        later: Runs something after so many seconds, with the time as `now`.
        delay_s: Age of what is told when it arrives.
        loss: Part of the messages that are lost, 0 to 1.
    """

    def __init__(
        self,
        router_id: str,
        others: Sequence[FleetRouter],
        *,
        later: Callable[[float, Callable[..., None]], None],
        delay_s: float,
        loss: float,
        rng: random.Random,
    ) -> None:
        self._others = [router.pool.told for router in others]
        self._later, self._delay_s, self._loss, self._rng = later, delay_s, loss, rng
        for told in self._others:
            told.begin(router_id, now=0.0)

    def started(self, pick: Pick, address: str, *, at_s: float) -> None:
        """Tell of a pick, or that it has moved."""
        request = pick.request
        rest_bytes, share = request.rest_bytes(address), share_of(request)
        message = ToldPick(pick.id, address, request.adapter, rest_bytes, 0.0, share)
        self._tell([partial(told.start, message) for told in self._others])

    def ended(self, pick_id: str, *, now: float, has_run: bool) -> None:
        """Tell of a pick's end."""
        self._tell([partial(told.finish, pick_id, has_run=has_run) for told in self._others])

    def _tell(self, messages: Sequence[Callable[..., None]]) -> None:
        for message in messages:
            if not self._loss or self._rng.random() >= self._loss:
                self._later(self._delay_s, message)
