"""The ids of picks: unique over routers and restarts, and each names its router."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count


def pick_ids(router_id: str) -> Callable[[], str]:
    """Make what gives this router's picks their ids, one after the other."""
    numbers = count()
    return lambda: f"{router_id}-{next(numbers)}"


def router_of(pick_id: str) -> str:
    """The router that made the pick; "" for an id that names none."""
    return pick_id.rpartition("-")[0]
