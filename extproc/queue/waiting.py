"""The requests that wait, here and at other routers, as far as others have to let them go first.

A request lets those of a higher priority go first that wait for room where it may go. They may wait
for what never comes, so this ends `slot_hold_s` after the first of them came. A request below 0
lets all of 0 and above go first, for as long as any of them waits.

Each router has a queue of its own for the same endpoints. So each tells the others who waits at it
(`Waiting`). They count there as here, for no longer than the settings there allow, until its next
report.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from math import inf
from typing import NamedTuple

from extproc.queue.destinations import ALL
from extproc.types import RequestInfo

MAX_AHEAD = 16
"""Priorities that are heard of one router: each newcomer is compared with all of them."""


class Ahead(NamedTuple):
    """The requests of one priority that wait.

    Attributes:
        until_s: For so long requests of a lower priority let them go first.
        reach: The endpoints that they may go to, as `Destinations` has it.
    """

    priority: int
    until_s: float = inf
    reach: int = 0


class Waiting(NamedTuple):
    """The requests that wait at a router, as far as other routers have to know.

    Attributes:
        addresses: Of the endpoints, of which a reach has a bit for each, the first the lowest.
        ahead: Requests that go first.
    """

    addresses: tuple[str, ...] = ()
    ahead: tuple[Ahead, ...] = ()

    def shifted(self, by_s: float) -> Waiting:
        """Return the same with all times later by so much: to another clock."""
        ahead = [each._replace(until_s=each.until_s + by_s) for each in self.ahead]
        return Waiting(self.addresses, tuple(ahead))


NOBODY = Waiting()


class TicketLine:
    """The requests that go before others.

    Attributes:
        own: The requests that wait here, by priority.
        from_peers: The requests that wait at other routers, by router.
    """

    def __init__(self) -> None:
        self.own: dict[int, Ahead] = {}
        self.from_peers: dict[str, list[Ahead]] = {}
        self._addresses: tuple[str, ...] = ()

    def begin(self) -> None:
        """Forget who waits here."""
        self.own.clear()

    def know(self, addresses: tuple[str, ...]) -> None:
        """Have reaches in terms of these endpoints; what was told of others is told each second."""
        if addresses != self._addresses:
            self._addresses = addresses
            self.from_peers.clear()

    def add(self, priority: int, reach: int, until_s: float) -> None:
        """Have one more request that waits here go first: of each priority the first counts."""
        known = self.own.get(priority, Ahead(priority))
        self.own[priority] = Ahead(priority, min(known.until_s, until_s), known.reach | reach)

    def until_s(self, request: RequestInfo, reach: int, now: float) -> float:
        """Return until when a request has to let others go first; `now` if it has not."""
        priority, until_s = request.claim.priority, now
        for each in chain(self.own.values(), *self.from_peers.values()):
            if each.priority > priority and each.reach & reach:
                if priority < 0 <= each.priority:
                    return inf
                until_s = max(until_s, each.until_s)
        return until_s

    # --- other routers -----------------------------------------------------------------------

    def for_peers(self) -> Waiting:
        """Return who waits here, for other routers."""
        ahead = tuple(self.own.values())
        return Waiting(self._addresses, ahead) if ahead else NOBODY

    def hear(self, router_id: str, waiting: Waiting, last_s: float) -> bool:
        """Replace a router's last report; return whether less of it holds up other requests.

        Args:
            last_s: Nobody holds up others for longer than until then.
        """
        places = {address: 1 << place for place, address in enumerate(self._addresses)}
        bits = [places.get(address, 0) for address in waiting.addresses]
        before = self.from_peers.pop(router_id, ())
        ahead = [
            Ahead(each.priority, min(each.until_s, last_s), _translated(each.reach, bits))
            for each in waiting.ahead[:MAX_AHEAD]
        ]
        if ahead:
            self.from_peers[router_id] = ahead
        return bool({each.priority for each in before} - {each.priority for each in ahead})


def _translated(reach: int, bits: Sequence[int]) -> int:
    return reach if reach in (0, ALL) else sum(b for i, b in enumerate(bits) if reach >> i & 1)
