"""The one way rules break ties: uniformly, with the rng they were given; and how that is said."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from extproc.core.types import EndpointView
from extproc.core.words import pending


def least(
    endpoints: Sequence[EndpointView], key: Callable[[EndpointView], Any], rng: random.Random
) -> EndpointView:
    """The endpoint with the least key; one of them, uniformly, if several have it.

    Raises:
        ValueError: `endpoints` is empty.
    """
    return one_of(lowest(endpoints, [key(view) for view in endpoints]), rng)


def lowest(endpoints: Sequence[EndpointView], keys: list[Any]) -> Sequence[EndpointView]:
    """The endpoints whose key, at the same place in `keys`, is the lowest.

    Raises:
        ValueError: `endpoints` is empty.
    """
    best = min(keys)
    if keys.count(best) == len(keys):  # an idle fleet: all are equal, and counting them is quick
        return endpoints
    return [view for view, own in zip(endpoints, keys, strict=True) if own == best]


def one_of(ties: Sequence[EndpointView], rng: random.Random) -> EndpointView:
    """One of `ties`, uniformly; a single one takes nothing from `rng`."""
    return ties[0] if len(ties) == 1 else rng.choice(ties)


def by_lot(equals: Sequence[EndpointView]) -> str:
    """How one was chosen that has `equals` beside it."""
    return f"drawn by lot from {1 + len(equals)} equals"


def fewest_pending(chosen: EndpointView, others: Sequence[EndpointView]) -> str:
    """Why `chosen` was, as the one with the least pending."""
    fewest = f"it has the fewest requests pending ({pending(chosen, others)})"
    equals = [view for view in others if view.num_pending == chosen.num_pending]
    return f"{fewest}, {by_lot(equals)}" if equals else fewest
