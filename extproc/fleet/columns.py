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

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from math import inf
from types import MappingProxyType
from typing import Any, Protocol, overload

from extproc.costs import DEFAULT, Costs
from extproc.types import EndpointView

Facts = tuple[Any, ...]
"""The first attributes of a view, in their order, up to the next ones."""
Resident = tuple[tuple[str, ...], tuple[str, ...], int]
"""The next ones: adapters in GPU slots and in the CPU cache; how many have come into a slot."""
Load = tuple[Any, ...]
"""Those after the adapters' pending requests."""
_State = tuple[Resident, Mapping[str, int]]
_FIELDS = EndpointView.__struct_fields__
NUM_FACTS = _FIELDS.index("gpu_adapters")
_make: Callable[..., EndpointView] = EndpointView
_read_only = MappingProxyType
_REGISTERED, _MAX_LORAS, _COSTS = map(_FIELDS.index, ("registered", "max_loras", "costs"))

MAX_MODELS = 16_384
"""Models whose endpoints are remembered, until an endpoint's list changes."""
_NO_ROWS: Mapping[int, int] = {}
_NONE: Set[int] = frozenset()
_FEW = 8
"""Rows that are looked at to know whether an adapter is resident at no more than half as many."""


class Source(Protocol):
    """An endpoint, which keeps its row true."""

    def arrange(self) -> Resident:
        """Return what is resident there."""

    def load(self) -> Load:
        """Return what a view has of its load."""


class Columns:
    """The columns of some endpoints, sorted by address.

    Args:
        sources: The endpoints.

    Attributes:
        addresses: Of the endpoints; another object if they change. `rows` has the row of each.
        num_pending: As a view has it, like the next two.
        done_s: `prompts_done_s`.
        has_room: `has_room`.
        s_per_byte: The cost of a byte of a prompt.
        num_slots: Adapter slots; 0 where unknown.
        num_used: Distinct adapters with unfinished requests.
        all_slots: The sum of `num_slots`; `all_free` of those that are free.
        moved: Rows where other adapters may be resident than at the last look. None is but those
            that were active there since.
        outdated: Rows of which no view has been made since they have changed.
    """

    __slots__ = (
        *("_costs", "_facts", "_holders", "_is_open", "_least", "_listing"),
        *("_loaded", "_num_open", "_open", "_running", "_sources", "_states", "_views"),
        *("addresses", "all_free", "all_slots", "done_s", "has_room", "moved"),
        *("num_pending", "num_slots", "num_used", "outdated", "rows", "s_per_byte"),
    )

    def __init__(self, addresses: Sequence[str], sources: Sequence[Source]) -> None:
        self.addresses, self._sources = tuple(addresses), sources
        self.rows = {address: row for row, address in enumerate(self.addresses)}
        num = len(self.addresses)
        self._views = [EndpointView(address, is_ready=False) for address in self.addresses]
        self._facts: list[Facts] = [(address,) for address in self.addresses]
        self._states: list[_State] = [(((), (), 0), {})] * num
        self.outdated = set[int]()
        self.moved = set[int]()
        self.num_pending, self.done_s = [0] * num, [-inf] * num
        self.has_room = [True] * num
        self._costs: list[Costs] = [DEFAULT] * num
        self.s_per_byte = [DEFAULT.prompt_s_per_byte] * num
        self.num_slots, self.num_used = [0] * num, [0] * num
        self.all_slots = self.all_free = 0
        self._is_open, self._num_open = [False] * num, 0
        self._loaded = [set[str]() for _ in range(num)]
        self._running: dict[str, dict[int, int]] = {}
        self._holders: dict[str, set[int]] = {}
        self._listing: dict[str, Sequence[int]] = {}
        self._open: dict[str, Sequence[int]] = {}
        self._least: tuple[float, float] | None = None

    # --- facts that arrive -------------------------------------------------------------------

    def set(self, row: int, facts: Facts, pending: Mapping[str, int], *, is_open: bool) -> None:
        """Replace the facts of a row, and the adapters' pending requests. O(adapters there).

        Args:
            is_open: It may get requests, and has no flaw.
        """
        before, self._facts[row] = self._facts[row], facts
        if is_open is not self._is_open[row]:
            self._is_open[row] = is_open
            self._num_open += 1 if is_open else -1
            self._open.clear()
        if before is not facts:
            self._set_facts(row, before, facts)
        were_pending = self._states[row][1]
        if were_pending != pending:
            self.moved.add(row)
            for adapter in were_pending.keys() - pending.keys():
                self.count(row, adapter, 0)
            for adapter, num in pending.items():
                if were_pending.get(adapter) != num:
                    self.count(row, adapter, num)
        self.look(row)

    def put(self, row: int, num_pending: int, done_s: float, *, has_room: bool) -> None:
        """Replace the load of a row. O(1)."""
        self.num_pending[row], self.done_s[row] = num_pending, done_s
        self.has_room[row] = has_room
        self.outdated.add(row)

    def count(self, row: int, adapter: str, num: int) -> None:
        """Replace the number of an adapter's unfinished requests at a row; `put` follows. O(1)."""
        resident, pending = self._states[row]
        pending = {**pending}  # candidates may have the one before
        if num:
            if adapter in pending:
                self._running[adapter][row] = num
            else:
                self._begin(row, adapter, num)
            pending[adapter] = num
        elif adapter in pending:
            self._end(row, adapter)
            del pending[adapter]
        self._states[row] = resident, pending

    def look(self, row: int) -> None:
        """Learn what is resident at a row."""
        resident = self._sources[row].arrange()
        before, pending = self._states[row]
        if resident != before:
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
        rows = self._listing.get(model)
        if rows is None:
            rows = self._find(model)
        if self._num_open == len(self._is_open):
            return rows
        found = self._open.get(model)
        if found is None:
            found = self._open[model] = [row for row in rows if self._is_open[row]]
        return found

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
                self.look(row)
            rows = self._holders.get(adapter, _NONE)
        return rows

    def few_holders(self, adapter: str) -> Set[int] | None:
        """Return the same rows, None where they may be more than a few."""
        return self.holders(adapter) if len(self._holders.get(adapter, _NONE)) <= _FEW else None

    def is_holder(self, row: int, adapter: str) -> bool:
        """Return whether an adapter is resident or active at a row."""
        if row in self.moved:
            self.look(row)
        return adapter in self._loaded[row]

    def is_held(self, adapter: str, rows: Sequence[int]) -> bool:
        """Return whether an adapter is resident or active at any of some rows."""
        found = self._holders.get(adapter, _NONE)
        if len(rows) < len(self.addresses):
            found = found & set(rows)
        return not found <= self.moved or any(self.is_holder(row, adapter) for row in [*found])

    def load_s(self, row: int, adapter: str) -> float:
        """Return how long an adapter's load takes at a row."""
        if row in self.moved:
            self.look(row)
        gpu_adapters, cpu_adapters, _ = self._states[row][0]
        return self._costs[row].load_s(adapter, gpu_adapters, cpu_adapters)

    @property
    def least_s_per_byte(self) -> float:
        """The least that a byte of a prompt costs anywhere."""
        return (self._least or self._find_least())[0]

    @property
    def least_cold_load_s(self) -> float:
        """The least that an adapter's load costs where it is not loaded."""
        return (self._least or self._find_least())[1]

    # --- what others read -------------------------------------------------------------------

    @property
    def views(self) -> Sequence[EndpointView]:
        """The views of all rows. O(1) for each row that has changed since the last time."""
        while self.moved:
            self.look(next(iter(self.moved)))
        for row in self.outdated:
            resident, pending = self._states[row]
            load = self._sources[row].load()
            self._views[row] = _make(*self._facts[row], *resident, _read_only(pending), *load)
        self.outdated.clear()
        return self._views

    def candidates(self, rows: Sequence[int]) -> Candidates:
        """Return some rows as they are now, to be viewed later."""
        return Candidates(
            self._facts.copy(),
            self._states.copy(),
            self.num_pending.copy(),
            self.done_s.copy(),
            self.has_room.copy(),
            rows,
        )

    # --- inside -----------------------------------------------------------------------------

    def _find_least(self) -> tuple[float, float]:
        self._least = min(self.s_per_byte), min([each.cold_load_s for each in self._costs])
        return self._least

    def _find(self, model: str) -> Sequence[int]:
        if len(self._listing) >= MAX_MODELS:
            self._listing.clear()
            self._open.clear()
        facts = self._facts
        lists = [each[_REGISTERED] for each in facts]
        rows = [row for row, names in enumerate(lists) if names and model in names]
        # Thousands of adapters may be everywhere: they share what says so.
        every = range(len(facts))
        found = self._listing[model] = every if len(rows) == len(facts) else rows
        return found

    def _set_facts(self, row: int, before: Facts, facts: Facts) -> None:
        if len(before) < NUM_FACTS or facts[_REGISTERED] is not before[_REGISTERED]:
            self._listing.clear()
            self._open.clear()
        costs: Costs = facts[_COSTS]
        if costs is not self._costs[row]:
            self._costs[row], self.s_per_byte[row] = costs, costs.prompt_s_per_byte
            self._least = None
        num_slots, slots_before = facts[_MAX_LORAS] or 0, self.num_slots[row]
        if num_slots != slots_before:
            used = self.num_used[row]
            self.all_slots += num_slots - slots_before
            self.all_free += max(0, num_slots - used) - max(0, slots_before - used)
            self.num_slots[row] = num_slots

    def _begin(self, row: int, adapter: str, num: int) -> None:
        rows = self._running.get(adapter)
        if rows is None:
            self._running[adapter] = {row: num}
        else:
            rows[row] = num
        used = self.num_used[row]
        if used < self.num_slots[row]:
            self.all_free -= 1
        self.num_used[row] = used + 1
        loaded = self._loaded[row]
        if adapter not in loaded:
            loaded.add(adapter)
            self._holders.setdefault(adapter, set()).add(row)

    def _end(self, row: int, adapter: str) -> None:
        rows = self._running[adapter]
        del rows[row]
        if not rows:
            del self._running[adapter]
        used = self.num_used[row]
        if used <= self.num_slots[row]:
            self.all_free += 1
        self.num_used[row] = used - 1


class Candidates(Sequence[EndpointView]):
    """Endpoints without a flaw, as they were at one moment.

    Views of them are made for those who look. They say what a choice went by: of an endpoint's load
    its pending requests, when its prompts are computed and whether it has room, no more. Resident
    adapters that the choice did not depend on are as of the last look.
    """

    __slots__ = ("_done_s", "_facts", "_has_room", "_num_pending", "_rows", "_states", "_views")

    def __init__(
        self,
        facts: list[Facts],
        states: list[_State],
        num_pending: list[int],
        done_s: list[float],
        has_room: list[bool],
        rows: Sequence[int],
    ) -> None:
        self._facts, self._states, self._rows = facts, states, rows
        self._num_pending, self._done_s, self._has_room = num_pending, done_s, has_room
        self._views: tuple[EndpointView, ...] | None = None

    @property
    def views(self) -> tuple[EndpointView, ...]:
        """The views."""
        if self._views is None:
            self._views = tuple(map(self._view, self._rows))
        return self._views

    def _view(self, row: int) -> EndpointView:
        resident, pending = self._states[row]
        return _make(
            *self._facts[row],
            *resident,
            _read_only(pending),
            self._num_pending[row],
            prompts_done_s=self._done_s[row],
            has_room=self._has_room[row],
        )

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
