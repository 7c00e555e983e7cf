"""Tickets, and how to say which they are."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from extproc.queue.tickets import Ticket
from extproc.tenancy import Claim
from extproc.types import RequestInfo


def ticket(
    arrived_at_s: float,
    objective_s: float = inf,
    *,
    adapter: str | None = "a",
    priority: int = 0,
    name: str = "",
) -> Ticket:
    """Return one that is held as long as it takes; `name` is its request's id."""
    request = RequestInfo(
        "m",
        adapter=adapter,
        request_id=name,
        arrived_at_s=arrived_at_s,
        claim=Claim(priority=priority),
    )
    deadline_s = arrived_at_s + objective_s
    return Ticket(request, lambda: None, give_up_s=inf, deadline_s=deadline_s)


def arrivals(tickets: Iterable[Ticket]) -> list[float]:
    return [each.request.arrived_at_s for each in tickets]


def names(tickets: Iterable[Ticket]) -> list[str]:
    return [each.request.request_id for each in tickets]
