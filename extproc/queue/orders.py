"""Orders of the tickets of one tenant: who is asked about first when there is room.

- `first_come`: by arrival.
- `last_come`: the reverse, for comparison; it cannot be configured.
- `deadline`: the earliest deadline first, those without one last.
- `newest`: S-LoRA's early abort. As many as can still have their first token in time go first.
- `clusters`: S-LoRA's clusters of adapters. Requests for adapters that run anyway go first.

Source of the last two: S-LoRA (Sheng et al., MLSys 2024), sections 5.2 and Appendix B. Each order
takes O(n log n), and less for tickets that are nearly in order already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from operator import attrgetter

from msgspec import Struct

from extproc.phrases import FOR_SLOT
from extproc.queue.tickets import Ticket
from extproc.types import EndpointView


class Scene(Struct, frozen=True):
    """The facts for an order beside the tickets.

    Attributes:
        service_s: Mean time from one dispatch out of this queue to the next; 0 for unknown.
        running: Adapters whose requests `clusters` prefers: `running_in_clusters`.
        served: Returns the name that endpoints know an adapter by.
    """

    now: float
    service_s: float = 0.0
    running: frozenset[str] = frozenset()
    served: Callable[[str], str] = str


Order = Callable[[Sequence[Ticket], Scene], list[Ticket]]
"""Returns all of the tickets, the first to be dispatched first."""

_by_arrival = attrgetter("arrived_at_s")
_by_deadline = attrgetter("deadline_s")
_late_s = attrgetter("late_s")


def first_come(tickets: Sequence[Ticket], scene: Scene) -> list[Ticket]:
    """Return the tickets in order of arrival."""
    return sorted(tickets, key=_by_arrival)


def last_come(tickets: Sequence[Ticket], scene: Scene) -> list[Ticket]:
    """Return the tickets with the last to arrive first: what early abort is compared with."""
    return first_come(tickets, scene)[::-1]


def deadline(tickets: Sequence[Ticket], scene: Scene) -> list[Ticket]:
    """Return the tickets with the earliest deadline first, of equal ones the earliest to arrive."""
    return sorted(first_come(tickets, scene), key=_by_deadline)


def newest(tickets: Sequence[Ticket], scene: Scene) -> list[Ticket]:
    """Return first those that `newest_in_time` keeps, then those that it gives up."""
    kept, given_up = newest_in_time(tickets, scene)
    return kept + given_up


def clusters(tickets: Sequence[Ticket], scene: Scene) -> list[Ticket]:
    """Return requests for `scene.running` first, each part in order of arrival.

    Requests for a base model load no adapter and go with the first. While preferred ones keep
    coming, the rest wait: ageing and the limits of waiting bound that, this order does not.
    """
    if not scene.running:
        return first_come(tickets, scene)
    first: list[Ticket] = []
    others: list[Ticket] = []
    for ticket in first_come(tickets, scene):
        adapter = ticket.request.adapter
        is_first = adapter is None or scene.served(adapter) in scene.running
        (first if is_first else others).append(ticket)
    return first + others


ORDERS: Mapping[str, Order] = {
    "first_come": first_come,
    "last_come": last_come,
    "deadline": deadline,
    "newest": newest,
    "clusters": clusters,
}
"""By their names in the configuration."""


def longest_without_slot(tickets: Sequence[Ticket], now: float, turn_s: float) -> list[Ticket]:
    """Return all requests for adapters of which one has waited for a slot for `turn_s`, 0 for none.

    The adapter that has waited longest is first, with all of its requests: they share its slot.
    Requests that are refused once they are late are left to their order.
    """
    if not turn_s:
        return []
    waiting = [
        ticket
        for ticket in tickets
        if ticket.reason == FOR_SLOT
        and now - ticket.arrived_at_s >= turn_s
        and not ticket.is_refusable
    ]
    if not waiting:
        return []
    have_waited = set(waiting)
    groups: dict[str | None, list[Ticket]] = {}
    for ticket in first_come(tickets, Scene(now)):
        adapter = ticket.request.adapter
        if adapter in groups or ticket in have_waited:
            groups.setdefault(adapter, []).append(ticket)
    return [ticket for group in groups.values() for ticket in group]


def running_in_clusters(endpoints: Iterable[EndpointView], cluster_size: int) -> frozenset[str]:
    """Return the adapters that run where at least `cluster_size` adapters do.

    The size is a preference, no cap: where fewer run, a further one costs nobody its slot. 0 is
    for no clusters.
    """
    return frozenset(
        adapter
        for view in endpoints
        if 0 < cluster_size <= view.num_active_adapters
        for adapter in view.pending_by_adapter
    )


def newest_in_time(tickets: Sequence[Ticket], scene: Scene) -> tuple[list[Ticket], list[Ticket]]:
    """Return the tickets to serve, in order, and those to give up, the newest first.

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
    requests are not. The count is greatest here all the same. Sets that can be in time are a
    matroid (of unit jobs with deadlines; Lawler, 1976). So taking each that still fits, the newest
    first, ends with as many as any set has.
    """
    service_s, most = scene.service_s, len(tickets)
    least_s = min(map(_late_s, tickets), default=inf) - scene.now
    if least_s >= 0 and (not service_s or least_s / service_s + 1 >= most):  # there is no hurry
        return sorted(first_come(tickets, scene), key=_by_deadline), []
    below = list(range(most + 1))  # a taken place refers to one before it; 0 is none
    kept, given_up = [], []
    for ticket in reversed(first_come(tickets, scene)):
        slack_s = ticket.late_s - scene.now
        last = min(slack_s / service_s + 1, most) if service_s else most
        place = _free(below, int(last)) if slack_s >= 0 else 0
        if place:
            below[place] = place - 1
            kept.append(ticket)
        else:
            given_up.append(ticket)
    kept.reverse()
    kept.sort(key=_by_deadline)  # of equal ones the earliest to arrive is first
    return kept, given_up


def _free(below: list[int], place: int) -> int:
    """Return the last place up to this one that is not taken; 0 for none. Shortens the way."""
    while below[place] != place:
        below[place] = below[below[place]]
        place = below[place]
    return place
