"""Choices over columns (`pods.columns`), at the same cost for the usual request in a pool of any
size.

With 16 pods a whole request takes half the bytecode that it takes by views. The policies of this
package choose by `_choose_row`, and their `choose` is the same over a snapshot (`by_rows`). The
picker asks by rows only where the class that defines `choose` defines both, and a policy of anybody
else's by views.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence, Set

from msgspec import Struct

from extproc.pods.columns import FEW, Columns
from extproc.types import Choice, EndpointView, RequestInfo, Snapshot, Terms, Wait


class Shown(Columns):
    """Columns that say what some views say, sorted by address: for a decision, and no more."""

    __slots__ = ("_shown",)

    def __init__(self, views: Sequence[EndpointView]) -> None:
        self._shown = views
        self.addresses = tuple([view.address for view in views])
        self.rows = {address: row for row, address in enumerate(self.addresses)}
        self.num_pending = [view.num_pending for view in views]
        self.done_s = [view.prompts_done_s for view in views]
        self.has_room = [view.has_room for view in views]
        self.costs = [view.costs for view in views]
        self.s_per_byte = [each.prompt_s_per_byte for each in self.costs]
        self.num_slots = slots = [view.max_loras or 0 for view in views]
        self.num_used = used = [len(view.pending_by_adapter) for view in views]
        self.all_slots = sum(slots)
        self.all_free = sum([max(0, num - n) for num, n in zip(slots, used, strict=True)])
        self._least = None

    def running(self, adapter: str) -> Mapping[int, int]:
        """Return the unfinished requests for an adapter, by the rows where it has some."""
        counts = [view.pending_by_adapter.get(adapter, 0) for view in self._shown]
        return {row: num for row, num in enumerate(counts) if num}

    def holders(self, adapter: str) -> Set[int]:
        """Return the rows where an adapter is resident or active."""
        return {row for row, view in enumerate(self._shown) if view.has_loaded(adapter)}

    def few_holders(self, adapter: str) -> Set[int] | None:
        """Return the same rows; None where they are more than a few."""
        rows = self.holders(adapter)
        return rows if len(rows) <= FEW else None

    def load_s(self, row: int, adapter: str) -> float:
        """Return how long an adapter's load takes at a row."""
        view = self._shown[row]
        return view.costs.load_s(adapter, view.gpu_adapters, view.cpu_adapters)


class RowChoice(Struct, frozen=True, gc=False):
    """A row, and why; see `types.Choice`.

    Attributes:
        price: The terms of its price; None of a policy that has none.
        further_rows: Those to try next, best first, and `views` of all that it chose from: of a
            policy that chooses by views.
    """

    row: int
    reason: str
    terms: Terms | None = None
    price: Struct | None = None
    further_rows: tuple[int, ...] = ()
    views: tuple[EndpointView, ...] = ()

    def of(self, snapshot: Snapshot) -> Choice:
        """Return the same choice among the endpoints whose rows were asked for."""
        return Choice((snapshot.endpoints[self.row],), self.reason, self.terms)


_MANY = 2**29
"""More requests than any endpoint has, in an int that Python compares fast."""


class RowPolicy:
    """A policy that chooses by rows."""

    def choose(
        self, snapshot: Snapshot, request: RequestInfo, *, rng: random.Random
    ) -> Choice | Wait:
        """Choose among the endpoints of a snapshot."""
        found = self._choose_row(*by_rows(snapshot, request, rng))
        return found if isinstance(found, Wait) else found.of(snapshot)

    def _choose_row(
        self,
        columns: Columns,
        rows: Sequence[int],
        request: RequestInfo,
        now: float,
        rng: random.Random,
    ) -> RowChoice | Wait:
        """Choose among some rows, at least one, which are in their order."""
        raise NotImplementedError


RowChooser = Callable[[Columns, Sequence[int], RequestInfo, float, random.Random], RowChoice | Wait]
"""`RowPolicy._choose_row`."""


def by_rows(
    snapshot: Snapshot, request: RequestInfo, rng: random.Random
) -> tuple[Columns, Sequence[int], RequestInfo, float, random.Random]:
    """Return a snapshot as what a policy is asked by rows."""
    return Shown(snapshot.endpoints), range(len(snapshot.endpoints)), request, snapshot.now, rng


def row_chooser(policy: object) -> RowChooser | None:
    """Return a policy's `_choose_row`, if it stands beside the `choose` in force."""
    for kind in type(policy).__mro__:
        if "choose" in vars(kind):
            found: RowChooser | None = getattr(policy, "_choose_row", None)
            return found if "_choose_row" in vars(kind) else None
    return None


def next_rows(
    columns: Columns,
    among: Iterable[Sequence[int]],
    chosen: Sequence[int],
    holders: Set[int],
    num: int,
) -> list[int]:
    """Return up to `num` rows besides the first of the chosen ones.

    The rest of the chosen ones comes first. Others are of `among`, of each part before the next:
    where the adapter is loaded (`holders`), then least pending.
    """
    pending, found, most = columns.num_pending, [*chosen], 1 + num
    for rows in among:
        if len(rows) == len(pending):  # the usual: a loop over the holders alone
            counts, num_left = pending.copy(), len(pending) - len(found)
            for row in holders:
                counts[row] -= _MANY
            for row in found:
                counts[row] = _MANY
        else:
            rows = [row for row in rows if row not in found]
            counts = [pending[row] - _MANY if row in holders else pending[row] for row in rows]
            num_left = len(counts)
        for _ in range(min(most - len(found), num_left)):
            index = counts.index(min(counts))
            counts[index] = _MANY
            found.append(rows[index])
    return found[1:most]


def affinity_of(
    columns: Columns, rows: Sequence[int], chosen: int, adapter: str | None, holders: Set[int]
) -> str:
    """Return `hit` if an adapter is loaded at the chosen row (`holders`), `spill` if it is at
    another of the rows, `cold` if at none; "" without an adapter."""
    if adapter is None:
        return ""
    if chosen in holders:
        return "hit"
    is_all = len(rows) == len(columns.addresses)
    return "spill" if holders and (is_all or not holders.isdisjoint(rows)) else "cold"
