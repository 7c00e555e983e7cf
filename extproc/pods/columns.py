"""The facts that decisions read of a pool's endpoints, as parallel sequences: row i is that of
`addresses[i]`.

A decision that visits endpoint after endpoint costs a microsecond for each of them. Most decisions
look for facts that change seldom (which endpoints may get requests at all) or for one adapter. So
both are kept as indexes. All are changed in place, where a fact arrives.

Where an adapter is resident follows from all that was sent there, and takes longer to find than the
rest. A row where that may have changed is *moved*, and looked at when somebody asks.

A view of an endpoint (`EndpointView`) is made for those who ask for one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from math import inf
from types import MappingProxyType
from typing import Any, Protocol, overload

from msgspec import Struct
from msgspec.structs import replace

from extproc.address import is_in_subset
from extproc.costs import DEFAULT, Costs
from extproc.types import EndpointView

Resident = tuple[tuple[str, ...], tuple[str, ...], int]
"""Adapters in GPU slots and in the CPU cache; how many have come into a slot."""
_State = tuple[Resident, dict[str, int]]
_Views = tuple[EndpointView, ...]
_Taken = tuple[EndpointView, _State, int, float, bool]
"""A row at one moment: its facts, what is resident and active there, and its load as columns have
it."""
_read_only = MappingProxyType

MAX_MODELS = 16_384
"""Models whose endpoints are remembered, until an endpoint's list changes."""
_NO_ROWS: Mapping[int, int] = {}
_NO_FIELDS: Mapping[str, Any] = {}
_NONE: Set[int] = frozenset()
FEW = 4
"""Rows that a decision looks at because an adapter is loaded there."""


class ColumnSource(Protocol):
    """The load of an endpoint, which keeps its row true."""

    def arrange(self) -> Resident:
        """Return which adapters are resident."""

    def fields(self) -> Mapping[str, Any]:
        """Return what a view has of the load beside what columns have."""


class Columns:
    """The columns of some endpoints, sorted by address.

    Args:
        sources: The endpoints' loads.

    Attributes:
        addresses: Of the endpoints; another object if they change. `rows` has the row of each.
        num_pending: As a view has it, like the next two.
        done_s: `prompts_done_s`.
        has_room: `has_room`.
        is_open: It may get requests, and has no flaw.
        costs: Of prompts and loads.
        s_per_byte: The cost of a byte of a prompt.
        num_slots: Adapter slots; 0 where unknown.
        num_used: Distinct adapters with unfinished requests.
        all_slots: The sum of `num_slots`; `all_free` of those that are free.
        moved: Rows where other adapters may be resident than at the last look. None is but those
            that were active there since.
        outdated: Rows of which no view has been made since they have changed.
        before: Rows that have changed since `candidates` was called last, as they were then. A
            writer of a row that is not among them calls `keep` first.
    """

    __slots__ = (
        *("_facts", "_holders", "_latest", "_least", "_listing"),
        *("_loaded", "_num_open", "_open", "_running", "_sources", "_states", "_views"),
        "_within",
        *("addresses", "all_free", "all_slots", "before", "costs", "done_s", "has_room", "is_open"),
        *("moved", "num_pending", "num_slots", "num_used", "outdated", "rows", "s_per_byte"),
    )

    def __init__(self, addresses: Sequence[str], sources: Sequence[ColumnSource]) -> None:
        self.addresses, self._sources = tuple(addresses), sources
        self.rows = {address: row for row, address in enumerate(self.addresses)}
        num = len(self.addresses)
        self._views = [EndpointView(address, is_ready=False) for address in self.addresses]
        self._facts = self._views.copy()  # without what requests change
        self._states: list[_State] = [(((), (), 0), {})] * num
        self._latest = _Moment(self)
        self.before = self._latest.before
        self.outdated = set[int]()
        self.moved = set[int]()
        self.num_pending, self.done_s = [0] * num, [-inf] * num
        self.has_room = [True] * num
        self.costs: list[Costs] = [DEFAULT] * num
        self.s_per_byte = [DEFAULT.prompt_s_per_byte] * num
        self.num_slots, self.num_used = [0] * num, [0] * num
        self.all_slots = self.all_free = 0
        self.is_open, self._num_open = [False] * num, 0
        self._loaded = [set[str]() for _ in range(num)]
        self._running: dict[str, dict[int, int]] = {}
        self._holders: dict[str, set[int]] = {}
        self._listing: dict[str, Sequence[int]] = {}
        self._open: dict[str, Sequence[int]] = {}
        self._within: dict[str, tuple[frozenset[str], Sequence[int], Sequence[int]]] = {}
        self._least: tuple[float, float] | None = None

    # --- facts that arrive -------------------------------------------------------------------

    def set(
        self, row: int, facts: EndpointView, pending: Mapping[str, int], *, is_open: bool
    ) -> None:
        """Replace the facts of a row, and the adapters' pending requests. O(adapters there).

        Args:
            is_open: It may get requests, and has no flaw.
        """
        if row not in self.before:
            self.keep(row)
        before, self._facts[row] = self._facts[row], facts
        if is_open is not self.is_open[row]:
            self.is_open[row] = is_open
            self._num_open += 1 if is_open else -1
            self._open.clear()
        if before is not facts:
            self._set_facts(row, before, facts)
        were_pending = self._states[row][1]
        if were_pending != pending:
            self.moved.add(row)
            for adapter in {**were_pending, **pending}:
                if were_pending.get(adapter) != pending.get(adapter):
                    self.count(row, adapter, pending.get(adapter, 0))
        self.refresh(row)

    def count(self, row: int, adapter: str, num: int) -> None:
        """Replace the number of an adapter's unfinished requests at a row, whose load is written
        next. O(1)."""
        if row not in self.before:
            self.keep(row)
        resident, pending = self._states[row]
        if num and adapter in pending:
            pending[adapter] = self._running[adapter][row] = num
        elif num:
            running = self._running.get(adapter)
            if running is None:
                running = self._running[adapter] = {}
            pending[adapter] = running[row] = num
            used = self.num_used[row]
            if used < self.num_slots[row]:
                self.all_free -= 1
            self.num_used[row] = used + 1
            loaded = self._loaded[row]
            if adapter not in loaded:
                loaded.add(adapter)
                self._holders.setdefault(adapter, set()).add(row)
        elif adapter in pending:
            running = self._running[adapter]
            del running[row]
            if not running:
                del self._running[adapter]
            used = self.num_used[row]
            if used <= self.num_slots[row]:
                self.all_free += 1
            self.num_used[row] = used - 1
            del pending[adapter]
            if adapter not in resident[0] and adapter not in resident[1]:
                self.moved.add(row)

    def refresh(self, row: int) -> None:
        """Learn what is resident at a row."""
        resident = self._sources[row].arrange()
        before, pending = self._states[row]
        if resident != before:
            if row not in self.before:
                self.keep(row)
                pending = self._states[row][1]
            self._states[row] = resident, pending
            self.outdated.add(row)
        elif row not in self.moved:
            return
        self.moved.discard(row)
        loaded = {*pending, *resident[0], *resident[1]}
        were_loaded = self._loaded[row]
        if loaded != were_loaded:
            holders = self._holders
            for adapter in were_loaded - loaded:
                rows = holders[adapter]
                rows.discard(row)
                if not rows:
                    del holders[adapter]
            for adapter in loaded - were_loaded:
                holders.setdefault(adapter, set()).add(row)
            self._loaded[row] = loaded

    # --- what decisions read ----------------------------------------------------------------

    def open_rows(self, model: str) -> Sequence[int]:
        """Return the rows, in order, of endpoints without a flaw that list a model and may get
        requests."""
        if (rows := self._listing.get(model)) is None:
            rows = self._find(model)
        if self._num_open == len(self.is_open):
            return rows
        if (found := self._open.get(model)) is None:
            found = self._open[model] = [row for row in rows if self.is_open[row]]
        return found

    def rows_within(self, model: str, subset: frozenset[str]) -> Sequence[int]:
        """Return the same of those in a subset: at once, if it is the object of the last time."""
        rows, addresses = self.open_rows(model), self.addresses
        found = self._within.get(model)
        if found is None or found[0] is not subset or found[1] is not rows:
            within = [row for row in rows if is_in_subset(addresses[row], subset)]
            found = self._within[model] = subset, rows, within
        return found[2]

    def running(self, adapter: str) -> Mapping[int, int]:
        """Return the unfinished requests for an adapter, by the rows where it has some."""
        return self._running.get(adapter, _NO_ROWS)

    def pending(self, row: int) -> Mapping[str, int]:
        """Return the unfinished requests at a row, by those adapters that have some."""
        return self._states[row][1]

    def holders(self, adapter: str) -> Set[int]:
        """Return the rows where an adapter is resident or active."""
        rows = self._holders.get(adapter, _NONE)
        if self.moved:
            for row in self.moved.intersection(rows):
                self.refresh(row)
            rows = self._holders.get(adapter, _NONE)
        return rows

    def few_holders(self, adapter: str) -> Set[int] | None:
        """Return the same rows; None where they may be more than a few, and are not looked at: ten
        that have moved take 20 us, this 2."""
        rows = self._holders.get(adapter, _NONE)
        if len(rows) > FEW:
            return None
        return self.holders(adapter) if self.moved else rows

    def load_s(self, row: int, adapter: str) -> float:
        """Return how long an adapter's load takes at a row."""
        if row in self.moved:
            self.refresh(row)
        gpu_adapters, cpu_adapters, _ = self._states[row][0]
        return self.costs[row].load_s(adapter, gpu_adapters, cpu_adapters)

    def least(self) -> tuple[float, float]:
        """Return the least that a byte of a prompt costs anywhere, and the least that an adapter's
        load costs where it is not loaded; 0 without endpoints."""
        if self._least is None:
            self._least = (
                min(self.s_per_byte, default=0.0),
                min([each.cold_load_s for each in self.costs], default=0.0),
            )
        return self._least

    # --- what others read -------------------------------------------------------------------

    @property
    def views(self) -> Sequence[EndpointView]:
        """The views of all rows. O(1) for each row that has changed since the last time."""
        while self.moved:
            self.refresh(next(iter(self.moved)))
        for row in self.outdated:
            self.refresh(row)  # adapters may be in another order
            self._views[row] = _view(*self.taken(row), self._sources[row].fields())
            self._own(row)
        self.outdated.clear()
        return self._views

    def candidates(self, rows: Sequence[int]) -> Candidates:
        """Return some rows as they are now, to be viewed later. O(1)."""
        moment = self._latest.newer = self._latest = _Moment(self)
        self.before = moment.before
        return Candidates(moment, rows)

    def taken(self, row: int) -> _Taken:
        """Return a row as it is."""
        load = self.num_pending[row], self.done_s[row], self.has_room[row]
        return self._facts[row], self._states[row], *load

    def keep(self, row: int) -> None:
        """Remember a row that is about to change, and count its pending requests on in others."""
        resident, pending = state = self._states[row]
        load = self.num_pending[row], self.done_s[row], self.has_room[row]
        self.before[row] = self._facts[row], state, *load
        self._states[row] = resident, pending.copy()

    # --- inside -----------------------------------------------------------------------------

    def _own(self, row: int) -> None:
        """Leave the row's pending requests to a view of it, and count on in others."""
        resident, pending = self._states[row]
        self._states[row] = resident, pending.copy()

    def _find(self, model: str) -> Sequence[int]:
        if len(self._listing) >= MAX_MODELS:
            self._forget_rows()
        facts = self._facts
        lists = [each.registered for each in facts]
        rows = [row for row, names in enumerate(lists) if names and model in names]
        # Thousands of adapters may be everywhere: they share what says so.
        every = range(len(facts))
        found = self._listing[model] = every if len(rows) == len(facts) else rows
        return found

    def _forget_rows(self) -> None:
        self._listing.clear()
        self._open.clear()
        self._within.clear()

    def _set_facts(self, row: int, before: EndpointView, facts: EndpointView) -> None:
        if facts.registered is not before.registered:
            self._forget_rows()
        costs = facts.costs
        if costs is not self.costs[row]:
            self.costs[row], self.s_per_byte[row] = costs, costs.prompt_s_per_byte
            self._least = None
        num_slots, slots_before = facts.max_loras or 0, self.num_slots[row]
        if num_slots != slots_before:
            used = self.num_used[row]
            self.all_slots += num_slots - slots_before
            self.all_free += max(0, num_slots - used) - max(0, slots_before - used)
            self.num_slots[row] = num_slots


def _view(
    facts: EndpointView,
    state: _State,
    num_pending: int,
    done_s: float,
    has_room: bool,
    fields: Mapping[str, Any] = _NO_FIELDS,
) -> EndpointView:
    (gpu_adapters, cpu_adapters, num_loads), pending = state
    return replace(
        facts,
        gpu_adapters=gpu_adapters,
        cpu_adapters=cpu_adapters,
        num_adapter_loads=num_loads,
        pending_by_adapter=_read_only(pending),
        num_pending=num_pending,
        prompts_done_s=done_s,
        has_room=has_room,
        **fields,
    )


class _Moment(Struct, eq=False):
    """A moment of some columns, by what they have changed from then until the next one.

    Attributes:
        before: Rows that have changed, as they were.
    """

    _columns: Columns
    before: dict[int, _Taken] = {}
    newer: _Moment | None = None

    def row_of(self, address: str) -> int:
        """Return an endpoint's row; -1 if it has none."""
        return self._columns.rows.get(address, -1)

    def taken(self, row: int) -> _Taken:
        """Return a row as it was then."""
        moment: _Moment | None = self
        while moment is not None:
            if row in moment.before:
                return moment.before[row]
            moment = moment.newer
        return self._columns.taken(row)


class Candidates(Sequence[EndpointView]):
    """Endpoints without a flaw, as they were at one moment; nothing once they are forgotten.

    Views of them are made for those who look. They say what a choice went by: of an endpoint's load
    its pending requests, when its prompts are computed and whether it has room, no more. Resident
    adapters that the choice did not depend on are as of the last look.
    """

    __slots__ = ("_moment", "_rows", "_views")

    def __init__(
        self, moment: _Moment | None, rows: Sequence[int], views: _Views | None = None
    ) -> None:
        self._moment, self._rows, self._views = moment, rows, views

    @classmethod
    def of(cls, views: _Views) -> Candidates:
        """Return endpoints of which there are views."""
        return cls(None, range(len(views)), views)

    def forget(self) -> None:
        """Keep nothing: a request may last long, and many have the state of all endpoints."""
        self._moment, self._rows, self._views = None, (), ()

    def find(self, address: str) -> EndpointView | None:
        """Return the view of one of them, without a look at the others; None if it is not among
        them."""
        if self._views is not None:
            return next((view for view in self._views if view.address == address), None)
        row = -1 if self._moment is None else self._moment.row_of(address)
        return self._view(row) if row in self._rows else None

    @property
    def views(self) -> _Views:
        """The views."""
        if self._views is None:
            self._views = tuple(map(self._view, self._rows))
        return self._views

    def _view(self, row: int) -> EndpointView:
        assert self._moment is not None, "without one there are views"
        return _view(*self._moment.taken(row))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self.views == tuple(other)

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> EndpointView: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[EndpointView, ...]: ...

    def __getitem__(self, index: int | slice) -> EndpointView | tuple[EndpointView, ...]:
        if self._views is None and isinstance(index, int):
            return self._view(self._rows[index])
        return self.views[index]

    def __iter__(self) -> Iterator[EndpointView]:
        return iter(self.views)
