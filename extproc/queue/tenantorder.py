"""The order of one tenant's requests, while there are more of them than room.

- `first_come`: by arrival.
- `in_time`: in order of their objectives, which is by arrival where all have the same. If there are
  too many, those that can be in time go first, and every `LATE_EVERY`th place goes to the others.

Both take O(n log n), and less for tickets that are nearly in order already.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from math import inf
from operator import attrgetter

from msgspec import Struct

from extproc.queue.tickets import Ticket

LATE_EVERY = 8
"""Of so many places one is for those that cannot be in time, so that nobody waits for ever. In the
laboratory at 1.5 times a capacity (`overload`, slora-uniform and zipf), with one in 8, 4 and 2 the
part in time is 70, 68 and 62 %, and 90, 89 and 88 %."""
BACKLOG_RATIO = 2
"""With no more requests than leave within so many times an objective nobody steps back: they will
be late by less than that. On two small pods near their capacity that takes the 99th percentile of
the first token from 0.94 to 0.53 s in the laboratory, and in its overload it changes nothing. With
4 a fifth more is late there."""


class OrderFacts(Struct, frozen=True):
    """The facts for an order beside the tickets.

    Attributes:
        service_s: Mean time from one dispatch out of this queue to the next; 0 for unknown.
        is_for_late: The next place is for one that cannot be in time.
    """

    now: float
    service_s: float = 0.0
    is_for_late: bool = False


_by_arrival = attrgetter("arrived_at_s")
_by_deadline = attrgetter("deadline_s")
_late_s = attrgetter("late_s")


def first_come(tickets: Sequence[Ticket]) -> list[Ticket]:
    """Return the tickets in order of arrival."""
    return sorted(tickets, key=_by_arrival)


def in_time(tickets: Sequence[Ticket], facts: OrderFacts) -> tuple[list[Ticket], list[Ticket]]:
    """Return all tickets in order, and those of them that step back, as they cannot be in time.

    Where nobody declares an objective, requests are in order of their own as long as all of them
    can have a place within `BACKLOG_RATIO` times an objective. Late requests that declare one are
    the last.
    """
    kept, given_up = newest_in_time(tickets, facts)
    late = [ticket for ticket in given_up if not ticket.is_refusable]
    if late and _is_soon(tickets, late[0], facts):
        return sorted(first_come(tickets), key=_by_deadline), []
    first = late[: int(facts.is_for_late)]
    back = late[len(first) :] + [ticket for ticket in given_up if ticket.is_refusable]
    return first + kept + back, back


def _is_soon(tickets: Sequence[Ticket], late: Ticket, facts: OrderFacts) -> bool:
    """Return whether all tickets have a place soon, none of which declares an objective."""
    soon_s = BACKLOG_RATIO * (late.deadline_s - late.arrived_at_s)
    is_short = len(tickets) * facts.service_s <= soon_s
    return is_short and not any(ticket.is_refusable for ticket in tickets)


def newest_in_time(
    tickets: Sequence[Ticket], facts: OrderFacts
) -> tuple[list[Ticket], list[Ticket]]:
    """Return the tickets to serve, in order, and those to give up, the oldest first.

    Those to serve are as many as can all have their first token in time, if one is dispatched now
    and one each `service_s` after that. Of several such sets, the newest requests count. They are
    in order of deadline. While all can be in time, nobody is given up.

    With one objective for all this follows Theorem B.1 of S-LoRA: deadlines are then in order of
    arrival, and the set is that of the most recent l. The theorem's conditions are one service time
    and one reward for all. The reward r(t), by the time t from arrival to the first token, is not
    increasing and concave. Then, whatever l is, no l requests in any order earn more than the most
    recent l in order of arrival. It does not say which l. A count of those in time (r is 1, then 0)
    is not concave where it falls, nor is `1 - (t / objective)²` with a floor of 0. For both the
    theorem holds among those in time. The count is greatest with the greatest l, which is taken
    here. Concave rewards may be greater with a smaller l.

    With several objectives the most recent l in order of arrival may be too late where other
    requests are not. The count is greatest here all the same: in order of deadline, whenever one
    more would be late, the oldest so far is given up (Moore and Hodgson's rule, of unit jobs).
    """
    in_order = first_come(tickets)
    last_s = facts.now + facts.service_s * (len(in_order) - 1)
    if last_s <= min(map(_late_s, in_order), default=inf):  # there is no hurry
        return sorted(in_order, key=_by_deadline), []
    kept, given_up = list[tuple[float, int, Ticket]](), list[Ticket]()
    for number, ticket in enumerate(sorted(in_order, key=_late_s)):
        heappush(kept, (ticket.arrived_at_s, number, ticket))
        if facts.now + facts.service_s * (len(kept) - 1) > ticket.late_s:
            given_up.append(heappop(kept)[-1])
    served = [ticket for _, _, ticket in sorted(kept)]
    return sorted(served, key=_by_deadline), first_come(given_up)
