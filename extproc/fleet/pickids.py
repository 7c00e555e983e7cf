"""The ids of picks: unique over routers and restarts, and each names its router."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count


def pick_ids(router_id: str) -> Callable[[], str]:
    """Return a function that returns a new id of this router's picks at each call."""
    numbers = count()
    return lambda: f"{router_id}-{next(numbers)}"


def router_of(pick_id: str) -> str:
    """Return the router that made the pick; "" for an id that names none."""
    return pick_id.rpartition("-")[0]


def number_of(pick_id: str) -> int:
    """Return the number of a pick of ours among those of its router."""
    return int(pick_id.rpartition("-")[2])


def pick_id_of(router_id: str, number: int) -> str:
    """Return the id of a router's pick."""
    return f"{router_id}-{number}"
