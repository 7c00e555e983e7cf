"""Choices over columns (`fleet.columns`), at the same cost for the usual request in a pool of any
size.

A policy whose `choose` visits all endpoints may have a `_choose_row` beside it. That gives the same
answer with the same draws, or None to be asked by views, for a rare request or state. The picker
asks it only where the class that defines `choose` defines it too.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

from extproc.fleet.columns import Columns
from extproc.types import RequestInfo, Terms, Wait


class RowChoice(Struct, frozen=True, gc=False):
    """A row, and why; see `types.Choice`.

    Attributes:
        price: The terms of its price; None of a policy that has none.
    """

    row: int
    reason: str
    terms: Terms | None = None
    price: Mapping[str, float] | None = None


_MANY = 2**29
"""More requests than any endpoint has, in an int that Python compares fast."""

RowChooser = Callable[
    [Columns, Sequence[int], RequestInfo, float, random.Random], RowChoice | Wait | None
]
"""Chooses among some rows, at least one, in their order, at a time."""


def row_chooser(policy: object) -> RowChooser | None:
    """Return a policy's `_choose_row`, if it stands beside the `choose` in force."""
    for kind in type(policy).__mro__:
        if "choose" in vars(kind):
            found: RowChooser | None = getattr(policy, "_choose_row", None)
            return found if "_choose_row" in vars(kind) else None
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
    pending, holders = columns.num_pending, columns.holders(adapter or "")
    is_all, found = len(rows) == len(pending), list[int]()
    if is_all and len(holders) <= num:  # the usual: no loop over all of them
        among, counts = rows, pending.copy()
        for row in holders:
            counts[row] -= _MANY
        counts[chosen] = _MANY
    else:
        among = sorted(holders) if is_all else rows
        counts = [pending[row] - _MANY if row in holders else pending[row] for row in among]
        if chosen in among:
            counts[among.index(chosen)] = _MANY
    for _ in range(num):
        index = counts.index(min(counts))
        if counts[index] == _MANY:
            break
        counts[index] = _MANY
        found.append(among[index])
    return found


def affinity_of(columns: Columns, rows: Sequence[int], chosen: int, adapter: str | None) -> str:
    """Return `hit` if an adapter is loaded at the chosen row, `spill` if it is at another of the
    rows, `cold` if at none; "" without an adapter."""
    if adapter is None:
        return ""
    if columns.is_holder(chosen, adapter):
        return "hit"
    return "spill" if columns.is_held(adapter, rows) else "cold"
