"""The messages of a router of a fleet to the other routers: never at once, as in production."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Protocol

from extproc.lab.fleet.agenda import Agenda
from extproc.pods.picksums import PickSums, Sums
from extproc.pods.pool import InFlight, Pool
from extproc.queue import Waiting
from extproc.queue.plan import tokens_of
from extproc.queue.waiting import NOBODY
from extproc.routing.router import Router

WHOLE_S = 1.0
"""From one whole update to the next, as in production."""


class Listener(Protocol):
    """A router that gets messages."""

    id: str
    pool: Pool
    router: Router


class FleetTelling:
    """The picks and waiting requests of one router, told to the other routers: the observer of its
    pool.

    Args:
        router_id: Of the one.
        routers: All of them, once they are made.
        delay_s: Age of a message when it arrives.
        loss: Part of the messages that are lost, 0 to 1.
    """

    def __init__(
        self,
        router_id: str,
        routers: Iterable[Listener],
        *,
        agenda: Agenda,
        delay_s: float,
        loss: float,
        rng: random.Random,
    ) -> None:
        self._id, self._routers, self._agenda = router_id, routers, agenda
        self._delay_s, self._loss, self._rng = delay_s, loss, rng
        self._sums = PickSums()
        self._waiting = self._said = NOBODY
        self._is_due = False

    def begin(self) -> None:
        """Tell what is in flight, now and once a second: at first nothing, to those that listen."""
        [own] = (each for each in self._routers if each.id == self._id)
        self._tell(self._sums.whole(own.pool.flights))
        self._agenda.after(WHOLE_S, self.begin)

    def started(self, flight: InFlight, *, is_new: bool) -> None:
        """Tell of a pick, or that it has moved."""
        self._sums.began(flight, tokens_of(flight.pick.request) if is_new else 0.0)
        self._schedule()

    def ended(self, flight: InFlight, *, has_run: bool) -> None:
        """Tell of a pick's end, or that it is elsewhere."""
        self._sums.ended(flight, has_run=has_run)
        self._schedule()

    def waits(self, waiting: Waiting) -> None:
        """Tell who waits."""
        self._waiting = waiting
        self._schedule()

    def _schedule(self) -> None:
        """Tell all that happens in this moment, once it has happened."""
        if not self._is_due:
            self._is_due = True
            self._agenda.after(0.0, self._flush)

    def _flush(self) -> None:
        self._is_due = False
        sums = self._sums.take(now=self._agenda.now)
        if sums is not None:
            self._tell(sums)
        waiting = self._waiting
        if waiting != self._said:
            self._said = waiting
            for each in self._others():
                self._later(partial(each.router.hear, self._id, waiting))

    def _others(self) -> Iterator[Listener]:
        return (each for each in self._routers if each.id != self._id)

    def _tell(self, sums: Sums) -> None:
        for each in self._others():
            if not self._loss or self._rng.random() >= self._loss:
                self._later(partial(each.pool.peer_picks.hear, self._id, sums))

    def _later(self, message: Callable[..., None]) -> None:
        agenda = self._agenda
        agenda.after(self._delay_s, lambda: message(now=agenda.now))
