"""Strict priorities among held requests, with ageing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from math import inf

from extproc.queue.tickets import Ticket


def level(ticket: Ticket, now: float, ageing_s: float = inf) -> int:
    """Return its priority, one higher for each `ageing_s` (above 0) that it has waited.

    One that is wanted by some time does not age: it has its order by that. One of a priority below
    0 stays below 0, as it goes first when others would fail.

    Without ageing (inf) the lowest may wait for ever. With priorities from p (0 or more) to q, a
    ticket is at q or above after (q - p) * ageing_s, and whoever arrives (q - p + 1) * ageing_s or
    more after it is at a lower level for as long as both are held. So, whatever the order within a
    level, it waits for no more requests than those held when it arrived and those that arrive
    within that time after it.
    """
    if ticket.deadline_s < inf:
        return ticket.request.claim.priority
    waited_s = max(0.0, now - ticket.request.arrived_at_s)
    priority = ticket.request.claim.priority
    aged = priority + int(waited_s // ageing_s)
    return aged if priority >= 0 else min(aged, -1)


def by_level(tickets: Iterable[Ticket], now: float, ageing_s: float = inf) -> list[list[Ticket]]:
    """Return the tickets of each level, the highest first, in the order given."""
    levels: defaultdict[int, list[Ticket]] = defaultdict(list)
    for ticket in tickets:
        levels[level(ticket, now, ageing_s)].append(ticket)
    return [levels[each] for each in sorted(levels, reverse=True)]
