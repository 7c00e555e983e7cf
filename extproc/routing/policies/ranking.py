"""How policies break ties: uniformly, with the rng that they are given; and how they say so."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

from extproc.phrases import pending
from extproc.types import EndpointView

_T = TypeVar("_T")


def lowest(rows: Sequence[int], column: Sequence[int]) -> Sequence[int]:
    """Return the rows, at least one, where the column has the lowest value of all of `rows`."""
    if len(rows) == len(column):
        best = min(column)
        if column.count(best) == len(column):  # an idle fleet: all are equal
            return rows
    else:
        best = min([column[row] for row in rows])
    return [row for row in rows if column[row] == best]


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
