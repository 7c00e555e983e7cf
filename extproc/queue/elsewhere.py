"""Requests that wait at other routers, as reported by those: they go first here, too.

Each router has a queue of its own for the same endpoints. A request that waits at one router could
be overtaken by a later one of another router, which sees the room first that its own requests free.
So each router reports the requests that hold up other requests at it, and the slots that it keeps
(`Waiting`). Both count here as if those requests waited here. A report is void at the time that it
names, within the times that this router would allow itself, or with the next report.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nlargest
from operator import attrgetter
from typing import NamedTuple

from msgspec.structs import replace

from extproc.queue.precedence import HOLD_UP_S, First, Flow
from extproc.queue.reservations import Reservation
from extproc.queue.tickets import QueueSettings

MAX_FIRSTS, MAX_KEPT = 64, 256
"""Of all other routers together, by priority: each newcomer is compared with all of them."""
ALL = -1
"""The reach of a request for which no endpoint is known to have what it wants."""


class Waiting(NamedTuple):
    """The requests that wait at a router, as far as other routers have to know.

    Attributes:
        addresses: Of the endpoints, of which a reach has a bit for each, the first the lowest.
        urgent: The reach of those of priority 0 and above, before which none below 0 goes.
        firsts: Flows that hold up other requests.
        kept: The slots that are kept.
    """

    addresses: tuple[str, ...] = ()
    urgent: int = 0
    firsts: tuple[tuple[Flow, First], ...] = ()
    kept: tuple[Reservation, ...] = ()

    def lasting(self, now: float) -> Waiting:
        """Return the part of it that still holds up other requests."""
        firsts = tuple(each for each in self.firsts if each[1].lasts(now))
        kept = tuple(each for each in self.kept if now < each.until_s)
        return Waiting(self.addresses if firsts or self.urgent else (), self.urgent, firsts, kept)

    def shifted(self, by_s: float) -> Waiting:
        """Return the same with all times later by so much: to another clock."""
        firsts = tuple((flow, first.shifted(by_s)) for flow, first in self.firsts)
        kept = tuple(each._replace(until_s=each.until_s + by_s) for each in self.kept)
        return self._replace(firsts=firsts, kept=kept)


NOBODY = Waiting()


class Elsewhere:
    """The waiting requests that all other routers report, in terms of our own endpoints.

    Attributes:
        urgent: As `Waiting` has it, of all of them.
        firsts: Likewise.
        kept: Likewise.
    """

    def __init__(self) -> None:
        self._told: dict[str, Waiting] = {}
        self._addresses: tuple[str, ...] = ()
        self.urgent = 0
        self.firsts: list[tuple[Flow, First]] = []
        self.kept: list[Reservation] = []

    def __bool__(self) -> bool:
        return bool(self._told)

    def hear(
        self, router_id: str, waiting: Waiting, settings: QueueSettings, *, now: float
    ) -> bool:
        """Replace a router's last report; return whether less of it holds up other requests."""
        before = self._told.pop(router_id, NOBODY)
        if waiting != NOBODY:
            self._told[router_id] = _within(waiting, settings, now)
        self._arrange()
        return bool(_holding_up(before) - _holding_up(waiting))

    def flows(self) -> list[tuple[int, str]]:
        """Return the priorities and names of those that hold up other requests."""
        return [(priority, flow) for (_, priority, flow), _ in self.firsts]

    def know(self, addresses: Sequence[str]) -> None:
        """Have reaches in terms of these endpoints from now on."""
        if self._told and self._addresses != addresses:
            self._addresses = tuple(addresses)
            self._arrange()

    def _arrange(self) -> None:
        places = {address: 1 << place for place, address in enumerate(self._addresses)}
        self.urgent, self.firsts, self.kept = 0, [], []
        for waiting in self._told.values():
            bits = [places.get(address, 0) for address in waiting.addresses]
            self.urgent |= _translated(waiting.urgent, bits)
            for flow, first in waiting.firsts:
                reach = _translated(first.reach, bits)
                self.firsts.append((flow, replace(first, reach=reach)))
            self.kept += waiting.kept
        self.firsts = nlargest(MAX_FIRSTS, self.firsts, key=lambda each: each[0][0])
        self.kept = nlargest(MAX_KEPT, self.kept, key=attrgetter("priority"))


def _translated(reach: int, bits: Sequence[int]) -> int:
    return reach if reach in (0, ALL) else sum(b for i, b in enumerate(bits) if reach >> i & 1)


def _holding_up(waiting: Waiting) -> set[object]:
    """Return the room that other requests do not get because of those that wait."""
    slots = {(each.address, each.leaving) for each in waiting.kept}
    return {flow for flow, _ in waiting.firsts} | slots | ({"urgent"} if waiting.urgent else set())


def _within(waiting: Waiting, settings: QueueSettings, now: float) -> Waiting:
    """Return a report, for no longer than this router would have other requests wait itself."""
    slot_s, next_s = now + settings.slot_hold_s, now + HOLD_UP_S
    firsts = tuple(
        (
            flow,
            replace(
                first,
                later_until_s=min(first.later_until_s, slot_s),
                next_until_s=min(first.next_until_s, next_s),
            ),
        )
        for flow, first in waiting.firsts
    )
    kept = tuple(each._replace(until_s=min(each.until_s, slot_s)) for each in waiting.kept)
    return waiting._replace(firsts=firsts, kept=kept)
