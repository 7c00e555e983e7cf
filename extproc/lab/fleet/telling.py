"""What the routers of a fleet tell each other: late, and in part lost."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial

from extproc.fleet.peerpicks import ToldPick
from extproc.lab.fleet.router import FleetRouter
from extproc.queue.elsewhere import NOBODY
from extproc.queue.plan import share_of
from extproc.types import Pick


class FleetTelling:
    """The picks of one router and who waits there, told to the others: the observer of its pool.

    Args:
        router: The one.
        others: The other routers.
        later: Runs something after so many seconds, with the time as `now`.
        delay_s: Age of what is told when it arrives.
        loss: Part of the messages that are lost, 0 to 1.
    """

    def __init__(
        self,
        router: FleetRouter,
        others: Sequence[FleetRouter],
        *,
        later: Callable[[float, Callable[..., None]], None],
        delay_s: float,
        loss: float,
        rng: random.Random,
    ) -> None:
        self._router, self._routers = router, others
        self._others = [each.pool.told for each in others]
        self._later, self._delay_s, self._loss, self._rng = later, delay_s, loss, rng
        self._waiting, self._is_due = NOBODY, False
        router.router.queue.on_change = self._changed
        for told in self._others:
            told.begin(router.id, now=0.0)

    def started(self, pick: Pick, address: str, *, at_s: float) -> None:
        """Tell of a pick, or that it has moved."""
        request = pick.request
        rest_bytes, share = request.rest_bytes(address), share_of(request)
        message = ToldPick(pick.id, address, request.adapter, rest_bytes, 0.0, share)
        self._tell([partial(told.start, message) for told in self._others])

    def ended(self, pick_id: str, *, now: float, has_run: bool) -> None:
        """Tell of a pick's end."""
        self._tell([partial(told.finish, pick_id, has_run=has_run) for told in self._others])

    def _changed(self) -> None:
        """Tell who waits, once all that happens in this moment has happened."""
        if not self._is_due:
            self._is_due = True
            self._later(0.0, self._tell_waiting)

    def _tell_waiting(self, *, now: float) -> None:
        self._is_due = False
        waiting = self._router.router.waiting(now=now)
        if waiting != self._waiting:
            self._waiting, name = waiting, self._router.id
            for each in self._routers:
                self._later(self._delay_s, partial(each.router.hear, name, waiting))

    def _tell(self, messages: Sequence[Callable[..., None]]) -> None:
        for message in messages:
            if not self._loss or self._rng.random() >= self._loss:
                self._later(self._delay_s, message)
