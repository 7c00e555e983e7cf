"""Choices over columns (`fleet.columns`): what the usual request costs, whatever the pool's size.

A policy whose `choose` visits all endpoints may have a `choose_row` beside it, which gives the same
answer, with the same draws, or None to be asked by views: for a request or a state that is rare.
The picker asks it only where the class that defines `choose` defines it too.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence, Set

from msgspec import Struct

from extproc.fleet.columns import Columns
from extproc.types import RequestInfo, Terms


class RowChoice(Struct, frozen=True, gc=False):
    """A row, and why; see `types.Choice`.

    Attributes:
        price: The terms of its price; None of a policy that has none.
    """

    row: int
    reason: str
    terms: Terms | None = None
    price: Mapping[str, float] | None = None


_TAKEN = 2**63
"""More requests than any endpoint has."""

RowChooser = Callable[[Columns, Sequence[int], RequestInfo, float, random.Random], RowChoice | None]
"""Chooses among some rows, at least one, in their order, at a time."""


def row_chooser(policy: object) -> RowChooser | None:
    """Return a policy's `choose_row`, if it stands beside the `choose` in force."""
    for kind in type(policy).__mro__:
        if "choose" in vars(kind):
            found: RowChooser | None = getattr(policy, "choose_row", None)
            return found if "choose_row" in vars(kind) else None
    return None


def lowest_rows(rows: Sequence[int], column: Sequence[int]) -> Sequence[int]:
    """Return the rows, at least one, where the column has the lowest value of all of `rows`."""
    if len(rows) == len(column):
        best = min(column)
        if column.count(best) == len(column):
            return rows
    else:
        best = min([column[row] for row in rows])
    return [row for row in rows if column[row] == best]


def next_rows(
    columns: Columns, rows: Sequence[int], chosen: int, adapter: str | None, num: int
) -> list[int]:
    """Return up to `num` rows besides the chosen one: where the adapter is loaded, then least
    pending."""
    pending = columns.num_pending
    holders: Set[int] = frozenset() if adapter is None else columns.holders(adapter)
    first: list[int] = []
    if holders:
        among = rows if len(rows) == len(pending) else set(rows)
        first = sorted([row for row in holders if row in among and row != chosen])
        first.sort(key=pending.__getitem__)
    if len(first) >= num:
        return first[:num]
    return first + _least_pending(pending, rows, {chosen, *holders}, num - len(first))


def affinity_of(columns: Columns, rows: Sequence[int], chosen: int, adapter: str | None) -> str:
    """Return `hit` if an adapter is loaded at the chosen row, `spill` if it is at another of the
    rows, `cold` if at none; "" without an adapter."""
    if adapter is None:
        return ""
    holders = columns.holders(adapter)
    if chosen in holders:
        return "hit"
    return "cold" if holders.isdisjoint(rows) else "spill"


def _least_pending(
    pending: list[int], rows: Sequence[int], taken: Collection[int], num: int
) -> list[int]:
    if len(rows) < len(pending):
        return sorted([row for row in rows if row not in taken], key=pending.__getitem__)[:num]
    # In a large pool a sort takes longer than the whole choice.
    left, found = pending.copy(), list[int]()
    for row in taken:
        left[row] = _TAKEN
    for _ in range(min(num, len(rows) - len(taken))):
        row = left.index(min(left))
        left[row] = _TAKEN
        found.append(row)
    return found
