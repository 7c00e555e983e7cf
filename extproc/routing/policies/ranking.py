"""How policies break ties: uniformly, with the rng that they are given; and how they say so."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from extproc.phrases import pending
from extproc.types import EndpointView

_T = TypeVar("_T")


def least(
    endpoints: Sequence[EndpointView], key: Callable[[EndpointView], Any], rng: random.Random
) -> EndpointView:
    """Return the endpoint with the least key; one of them, uniformly, if several have it."""
    return one_of(lowest(endpoints, [key(view) for view in endpoints]), rng)


def lowest(endpoints: Sequence[EndpointView], keys: list[Any]) -> Sequence[EndpointView]:
    """Return the endpoints, at least one, whose key at the same index in `keys` is the lowest."""
    best = min(keys)
    if keys.count(best) == len(keys):  # an idle fleet: all are equal, and counting them is quick
        return endpoints
    return [view for view, own in zip(endpoints, keys, strict=True) if own == best]


def one_of(ties: Sequence[_T], rng: random.Random) -> _T:
    """Return one of `ties`, uniformly; for a single one `rng` is not used."""
    return ties[0] if len(ties) == 1 else rng.choice(ties)


def at_random(equals: Sequence[EndpointView]) -> str:
    """Say how one was chosen among `equals`."""
    return f"chosen at random among {1 + len(equals)} equals"


def fewest_pending(chosen: EndpointView, others: Sequence[EndpointView]) -> str:
    """Say why `chosen` was: it has the least pending."""
    fewest = f"it has the fewest requests pending ({pending(chosen, others)})"
    equals = [view for view in others if view.num_pending == chosen.num_pending]
    return f"{fewest}, {at_random(equals)}" if equals else fewest
