"""The adapters of one endpoint: which are resident, and which have requests there."""

from __future__ import annotations

from collections.abc import Mapping

from extproc.pods.columns import Resident
from extproc.pods.foreign import ForeignRequests
from extproc.pods.podrow import PodRow
from extproc.pods.residency import OTHERS, SAME, Residency
from extproc.pods.serverflags import ServerFlags
from extproc.tenancy import SlotUses


class PodAdapters:
    """An endpoint's adapters; a change of theirs is in their columns at once.

    Attributes:
        residency: It counts the unfinished requests of routers by adapter.
        seen: The resident ones as of the last look.
        slots: The adapters that routers know to run there.
    """

    def __init__(self, traits: ServerFlags, row: PodRow, foreign: ForeignRequests) -> None:
        self._row, self._foreign = row, foreign
        self.residency = Residency(max_loras=traits.max_loras, max_cpu_loras=traits.max_cpu_loras)
        self.seen: Resident = ((), (), 0)
        self.slots = SlotUses()

    def begin(self, adapter: str, priority: int, flow: str, num: int, *, now: float) -> None:
        """Count requests for an adapter, and whose they are."""
        self.slots.sent(adapter, priority, flow, now=now)
        residency, row = self.residency, self._row
        change, columns = residency.start(adapter, num), row.columns
        if columns is not None:
            columns.count(row.number, adapter, residency.in_flight[adapter])
            if change is not SAME:
                columns.moved.add(row.number)

    def end(self, adapter: str, num: int, *, now: float, has_run: bool) -> None:
        """Stop counting requests for an adapter."""
        residency, row = self.residency, self._row
        change, columns = residency.finish(adapter, now=now, has_run=has_run, num=num), row.columns
        left = residency.in_flight.get(adapter, 0)
        if not left:
            self.slots.pop(adapter, None)
        if columns is not None:
            if not left and row.is_known:
                left = self._foreign.adapters.get(adapter, 0)
            columns.count(row.number, adapter, left)
            if change is not SAME:
                columns.moved.add(row.number)
            if change is OTHERS:
                columns.look(row.number)

    def arrange(self) -> Resident:
        """Return which are resident now, and how many have come into a GPU slot."""
        gpu_adapters, cpu_adapters = self.residency.arranged
        gpu_before, cpu_before, num_loads = self.seen
        if gpu_adapters is not gpu_before or cpu_adapters is not cpu_before:
            num_loads += len(set(gpu_adapters).difference(gpu_before))
            self.seen = gpu_adapters, cpu_adapters, num_loads
        return self.seen

    @property
    def active(self) -> Mapping[str, int]:
        """The adapters that have requests, of routers and by the last report."""
        ours, foreign = self.residency.in_flight, self._foreign.adapters
        return foreign | ours if foreign else ours
