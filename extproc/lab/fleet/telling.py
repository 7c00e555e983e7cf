"""The messages of a router of a fleet to the other routers: never at once, as in production."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Protocol

from extproc.fleet.peerpicks import PeerPick, PeerPicks
from extproc.fleet.pool import Pool
from extproc.lab.fleet.agenda import Agenda
from extproc.queue import Waiting
from extproc.queue.plan import share_of
from extproc.queue.waiting import NOBODY
from extproc.routing.router import Router
from extproc.types import Pick


class Listener(Protocol):
    """A router that gets messages."""

    id: str
    pool: Pool
    router: Router


class FleetTelling:
    """The picks and waiting requests of one router, sent to the other routers: the observer of its
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
        self._waiting = self._said = NOBODY
        self._is_due = False

    def begin(self) -> None:
        """Have the other routers listen, before anything is sent."""
        for told in self._told():
            told.begin(self._id, now=0.0)

    def started(self, pick: Pick, address: str, *, at_s: float) -> None:
        """Tell of a pick, or that it has moved."""
        request = pick.request
        rest_bytes, share = request.rest_bytes(address), share_of(request)
        message = PeerPick(pick.id, address, request.adapter, rest_bytes, 0.0, share)
        self._tell([partial(told.start, message) for told in self._told()])

    def ended(self, pick_id: str, *, now: float, has_run: bool) -> None:
        """Tell of a pick's end."""
        self._tell([partial(told.finish, pick_id, has_run=has_run) for told in self._told()])

    def waits(self, waiting: Waiting) -> None:
        """Tell who waits, once all that happens in this moment has happened."""
        self._waiting = waiting
        if not self._is_due:
            self._is_due = True
            self._agenda.after(0.0, self._tell_waiting)

    def _tell_waiting(self) -> None:
        self._is_due = False
        waiting = self._waiting
        if waiting != self._said:
            self._said = waiting
            for each in self._others():
                self._later(partial(each.router.hear, self._id, waiting))

    def _others(self) -> Iterator[Listener]:
        return (each for each in self._routers if each.id != self._id)

    def _told(self) -> Iterator[PeerPicks]:
        return (each.pool.told for each in self._others())

    def _tell(self, messages: Sequence[Callable[..., None]]) -> None:
        for message in messages:
            if not self._loss or self._rng.random() >= self._loss:
                self._later(message)

    def _later(self, message: Callable[..., None]) -> None:
        agenda = self._agenda
        agenda.after(self._delay_s, lambda: message(now=agenda.now))
