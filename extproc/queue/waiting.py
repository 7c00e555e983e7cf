"""The requests that wait, here and at other routers, as far as others have to let them go first.

A request lets those of a higher priority go first that wait for room where it may go, and came
before it. They may wait for what never comes, so this ends after `slot_hold_s`. A request below 0
lets all of 0 and above go first, for as long as any of them waits.

Each router has a queue of its own for the same endpoints. So each tells the others who waits at it,
and which slots it keeps (`Waiting`). Both count there as here, for no longer than the settings
there allow, until its next report.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import nlargest
from itertools import chain
from math import inf
from operator import attrgetter
from typing import NamedTuple

from extproc.queue.reach import ALL, Reach
from extproc.queue.reservations import Reservation
from extproc.queue.tickets import QueueSettings
from extproc.types import RequestInfo

MAX_AHEAD, MAX_KEPT = 16, 256
"""Of one router, and of all others together: each newcomer is compared with all of them."""


class Ahead(NamedTuple):
    """The requests of one priority that wait.

    Attributes:
        since_s: When the first of them came.
        until_s: For so long requests of a lower priority that came later let them go first.
        reach: The endpoints that they may go to, as `Reach` has it.
    """

    priority: int
    since_s: float = inf
    until_s: float = -inf
    reach: int = 0


class Waiting(NamedTuple):
    """The requests that wait at a router, as far as other routers have to know.

    Attributes:
        addresses: Of the endpoints, of which a reach has a bit for each, the first the lowest.
        ahead: Requests that go first.
        kept: The slots that are kept.
    """

    addresses: tuple[str, ...] = ()
    ahead: tuple[Ahead, ...] = ()
    kept: tuple[Reservation, ...] = ()

    def shifted(self, by_s: float) -> Waiting:
        """Return the same with all times later by so much: to another clock."""
        ahead = (
            each._replace(since_s=each.since_s + by_s, until_s=each.until_s + by_s)
            for each in self.ahead
        )
        kept = (each._replace(until_s=each.until_s + by_s) for each in self.kept)
        return Waiting(self.addresses, tuple(ahead), tuple(kept))


NOBODY = Waiting()


class Line:
    """The requests that go before others, here and at other routers.

    Attributes:
        kept: The slots that other routers keep.
    """

    def __init__(self) -> None:
        self._own: dict[int, Ahead] = {}
        self._told: dict[str, Waiting] = {}
        self._addresses: tuple[str, ...] = ()
        self._others: list[Ahead] = []
        self.kept: list[Reservation] = []

    def begin(self) -> None:
        """Forget who waits here."""
        self._own.clear()

    def __bool__(self) -> bool:
        return bool(self._own or self._others)

    def add(self, priority: int, reach: int, since_s: float = inf, until_s: float = -inf) -> None:
        """Have one more request that waits here go first: of each priority the first counts."""
        own = self._own
        if priority not in own and len(own) >= MAX_AHEAD:
            priority = min(own)
        known = own.get(priority, Ahead(priority))
        if since_s < known.since_s:
            own[priority] = Ahead(priority, since_s, until_s, known.reach | reach)
        elif reach | known.reach != known.reach:
            own[priority] = known._replace(reach=known.reach | reach)

    def until_s(self, request: RequestInfo, reach: int, now: float) -> float:
        """Return until when a request has to let others go first; `now` if it has not."""
        priority, until_s = request.claim.priority, now
        for each in chain(self._own.values(), self._others):
            if each.priority > priority and each.reach & reach:
                if priority < 0 <= each.priority:
                    return inf
                if request.arrived_at_s > each.since_s:
                    until_s = max(until_s, each.until_s)
        return until_s

    # --- other routers -----------------------------------------------------------------------

    def told(self, addresses: Sequence[str], kept: Iterable[Reservation]) -> Waiting:
        """Return who waits here, for other routers."""
        ahead = tuple(self._own.values())
        return Waiting(tuple(addresses) if ahead else (), ahead, tuple(kept))

    def hear(self, router_id: str, waiting: Waiting, settings: QueueSettings, now: float) -> bool:
        """Replace a router's last report; return whether less of it holds up other requests."""
        before = self._told.pop(router_id, NOBODY)
        if waiting != NOBODY:
            last_s = now + settings.slot_hold_s
            ahead = [each._replace(until_s=min(each.until_s, last_s)) for each in waiting.ahead]
            kept = [each._replace(until_s=min(each.until_s, last_s)) for each in waiting.kept]
            self._told[router_id] = Waiting(waiting.addresses, tuple(ahead), tuple(kept))
        self._arrange()
        return bool(_held_up(before) - _held_up(waiting))

    def know(self, reach: Reach) -> None:
        """Have reaches in terms of these endpoints from now on."""
        if self._told and self._addresses != reach.addresses:
            self._addresses = reach.addresses
            self._arrange()

    def _arrange(self) -> None:
        places = {address: 1 << place for place, address in enumerate(self._addresses)}
        others, kept = list[Ahead](), list[Reservation]()
        for waiting in self._told.values():
            bits = [places.get(address, 0) for address in waiting.addresses]
            others += [each._replace(reach=_translated(each.reach, bits)) for each in waiting.ahead]
            kept += waiting.kept
        self._others = nlargest(MAX_AHEAD, others)
        self.kept = nlargest(MAX_KEPT, kept, key=attrgetter("priority"))


def _translated(reach: int, bits: Sequence[int]) -> int:
    return reach if reach in (0, ALL) else sum(b for i, b in enumerate(bits) if reach >> i & 1)


def _held_up(waiting: Waiting) -> set[object]:
    """Return what other requests do not get because of those that wait."""
    slots = {(each.address, each.leaving) for each in waiting.kept}
    return {each.priority for each in waiting.ahead} | slots
