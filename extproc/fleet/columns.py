"""The values that decisions read of a pool's endpoints, as parallel sequences: row i is that of
`views[i]`.

A decision that visits view after view costs a microsecond for each of them. Most decisions look for
facts that change seldom (which endpoints may get requests at all) or for one adapter. So both are
kept as indexes. They are updated where a view is replaced: at a pick, an end, a report.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from math import inf

from extproc.types import EndpointView

MAX_MODELS = 16_384
"""Models whose endpoints are remembered, until an endpoint's list changes."""
_NO_ROWS: Mapping[int, int] = {}
_NONE: Set[int] = frozenset()


class Columns:
    """The columns of some views, sorted by address.

    Attributes:
        addresses: Of the endpoints; a new object if they change.
        views: The views.
        num_pending: As the view has it, like the next two.
        done_s: `prompts_done_s`.
        has_room: `has_room`.
        s_per_byte: The cost of a byte of a prompt.
        num_slots: Adapter slots; 0 where unknown.
        num_used: Distinct adapters with unfinished requests.
        all_slots: The sum of `num_slots`; `all_free` of those that are free.
    """

    __slots__ = (
        *("_holders", "_is_open", "_least", "_listing", "_loaded", "_num_open"),
        *("_open", "_running", "addresses", "all_free", "all_slots", "done_s", "has_room"),
        *("num_pending", "num_slots", "num_used", "s_per_byte", "views"),
    )

    def __init__(self, views: Sequence[EndpointView]) -> None:
        num = len(views)
        self.addresses = tuple([view.address for view in views])
        self.views = [EndpointView(address, is_ready=False) for address in self.addresses]
        self.num_pending, self.done_s = [0] * num, [-inf] * num
        self.has_room = [True] * num
        self.s_per_byte = [view.costs.prompt_s_per_byte for view in self.views]
        self.num_slots, self.num_used = [0] * num, [0] * num
        self.all_slots = self.all_free = 0
        self._is_open, self._num_open = [False] * num, 0
        self._loaded: list[Set[str]] = [frozenset()] * num
        self._running: dict[str, dict[int, int]] = {}
        self._holders: dict[str, set[int]] = {}
        self._listing: dict[str, Sequence[int]] = {}
        self._open: dict[str, Sequence[int]] = {}
        self._least: tuple[float, float] | None = None
        for row, view in enumerate(views):
            self.set(row, view)

    def set(self, row: int, view: EndpointView) -> None:
        """Replace a view. O(adapters there)."""
        before = self.views[row]
        is_open = view.is_ready and not (view.is_full or view._has_flaw)
        if is_open is not self._is_open[row]:
            self._is_open[row] = is_open
            self._num_open += 1 if is_open else -1
            self._open.clear()
        if view.registered is not before.registered:
            self._listing.clear()
            self._open.clear()
        if view.costs is not before.costs:
            self.s_per_byte[row], self._least = view.costs.prompt_s_per_byte, None
        num_slots = view.max_loras or 0
        if num_slots != self.num_slots[row]:
            self._set_slots(row, num_slots, self.num_used[row])
        self.recount(row, view, view.pending_by_adapter.keys() | before.pending_by_adapter.keys())

    def recount(self, row: int, view: EndpointView, changed: Iterable[str]) -> None:
        """Replace a view that says nothing else than the one before, but for what requests change
        at an endpoint that may get requests and goes on to. O(1), and O(adapters there) where the
        loaded adapters change.

        Args:
            changed: Adapters, those among them of which it has more or fewer pending requests.
        """
        before = self.views[row]
        self.views[row] = view
        self.num_pending[row], self.done_s[row] = view.num_pending, view.prompts_done_s
        self.has_room[row] = view.has_room
        pending, were_pending = view.pending_by_adapter, before.pending_by_adapter
        is_same = True
        for adapter in changed:
            num, num_before = pending.get(adapter), were_pending.get(adapter)
            if num != num_before:
                is_same = is_same and num is not None and num_before is not None
                self._set_running(row, adapter, num)
        resident, cached = view.gpu_adapters, view.cpu_adapters
        if not is_same:
            self._set_slots(row, self.num_slots[row], len(pending))
        elif resident is before.gpu_adapters and cached is before.cpu_adapters:
            return
        loaded = {*pending, *resident, *cached}
        if loaded != self._loaded[row]:
            self._set_loaded(row, loaded)

    def open_rows(self, model: str) -> Sequence[int]:
        """Return the rows, in order, of endpoints without a flaw that list a model and may get
        requests."""
        rows = self._listing.get(model)
        if rows is None:
            rows = self._find(model)
        if self._num_open == len(self.views):
            return rows
        found = self._open.get(model)
        if found is None:
            found = self._open[model] = [row for row in rows if self._is_open[row]]
        return found

    def running(self, adapter: str) -> Mapping[int, int]:
        """Return the unfinished requests for an adapter, by the rows where it has some."""
        return self._running.get(adapter, _NO_ROWS)

    def holders(self, adapter: str) -> Set[int]:
        """Return the rows where an adapter is resident or active."""
        return self._holders.get(adapter, _NONE)

    @property
    def least_s_per_byte(self) -> float:
        """The least that a byte of a prompt costs anywhere."""
        return (self._least or self._find_least())[0]

    @property
    def least_cold_load_s(self) -> float:
        """The least that an adapter's load costs where it is not loaded."""
        return (self._least or self._find_least())[1]

    def _find_least(self) -> tuple[float, float]:
        cold_s = min([view.costs.cold_load_s for view in self.views])
        self._least = min(self.s_per_byte), cold_s
        return self._least

    def _find(self, model: str) -> Sequence[int]:
        if len(self._listing) >= MAX_MODELS:
            self._listing.clear()
            self._open.clear()
        views = self.views
        rows = [row for row, v in enumerate(views) if v.registered and model in v.registered]
        # Thousands of adapters may be everywhere: they share what says so.
        every = range(len(views))
        found = self._listing[model] = every if len(rows) == len(views) else rows
        return found

    def _set_running(self, row: int, adapter: str, num: int | None) -> None:
        if num is not None:
            self._running.setdefault(adapter, {})[row] = num
            return
        rows = self._running[adapter]
        del rows[row]
        if not rows:
            del self._running[adapter]

    def _set_loaded(self, row: int, loaded: Set[str]) -> None:
        holders, before = self._holders, self._loaded[row]
        for adapter in before - loaded:
            rows = holders[adapter]
            rows.discard(row)
            if not rows:
                del holders[adapter]
        for adapter in loaded - before:
            holders.setdefault(adapter, set()).add(row)
        self._loaded[row] = loaded

    def _set_slots(self, row: int, num_slots: int, num_used: int) -> None:
        slots_before, free = self.num_slots[row], num_slots - num_used
        free_before = slots_before - self.num_used[row]
        self.all_free += (free if free > 0 else 0) - (free_before if free_before > 0 else 0)
        self.all_slots += num_slots - slots_before
        self.num_slots[row], self.num_used[row] = num_slots, num_used
