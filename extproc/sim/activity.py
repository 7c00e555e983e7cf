"""What an engine in virtual time would show on its metrics page, and since when.

A page changes at the end of each step only: between two steps it says what held at the end of the
last one, also while the next one runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice

from extproc.sim.records import EngineReport, EngineRequest, EngineStats

_NEVER_S = float("-inf")


@dataclass(frozen=True, slots=True)
class _Page:
    shown_s: float = _NEVER_S
    stats: EngineStats = field(default_factory=EngineStats)
    active: frozenset[str] = frozenset()


class Activity:
    """The last two states of a page."""

    def __init__(self) -> None:
        self._num_active: dict[str, int] = {}
        # Adapters that are no longer active, by the time when they last were; oldest first.
        self._ended: dict[str, float] = {}
        self._page = self._previous = _Page()

    def add(self, request: EngineRequest) -> None:
        """`request` has its first token: its adapter is active."""
        if request.adapter is not None:
            self._num_active[request.adapter] = self._num_active.get(request.adapter, 0) + 1

    def remove(self, request: EngineRequest) -> None:
        """`request`, which was added, has ended."""
        adapter = request.adapter
        if adapter is None:
            return
        self._num_active[adapter] -= 1
        if self._num_active[adapter]:
            return
        del self._num_active[adapter]
        if adapter in self._page.active:
            self._ended.pop(adapter, None)
            self._ended[adapter] = self._page.shown_s

    def show(self, stats: EngineStats, *, at_s: float) -> None:
        """A step ended at `at_s`."""
        active = self._page.active
        if active != self._num_active.keys():
            active = frozenset(self._num_active)
        self._previous, self._page = self._page, _Page(at_s, stats, active)

    def show_idle(self, *, now: float) -> None:
        """There is nothing to do. vLLM takes an empty step after its last request was aborted."""
        if self._page.stats != EngineStats():
            self.show(EngineStats(), at_s=max(now, self._page.shown_s))

    def report(self, *, now: float, max_adapters: int | None) -> EngineReport:
        """The page at `now`, with at most `max_adapters` in its log."""
        page = self._page if self._page.shown_s <= now else self._previous
        log = [(adapter, page.shown_s) for adapter in sorted(page.active)]
        for adapter in reversed(self._ended):
            ended_s = self._ended[adapter]
            if adapter not in page.active and ended_s <= page.shown_s:
                log.append((adapter, ended_s))
            if max_adapters is not None and len(log) >= max_adapters:
                break
        return EngineReport(page.stats, page.active, tuple(islice(log, max_adapters)))
