"""The metrics page of an engine in virtual time. It changes at the end of each step only."""

from __future__ import annotations

from dataclasses import dataclass, field

from extproc.sim.engine.records import EngineReport, EngineRequest, EngineStats

NEVER_S = float("-inf")
"""Before the first page."""


@dataclass(frozen=True, slots=True)
class _Page:
    shown_s: float = NEVER_S
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
        """Record that `request` has its first token: its adapter is active."""
        if request.adapter is not None:
            self._num_active[request.adapter] = self._num_active.get(request.adapter, 0) + 1

    def remove(self, request: EngineRequest) -> None:
        """Record that `request`, which was added, has ended."""
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
        """Record the end of a step at `at_s`."""
        active = self._page.active
        if active != self._num_active.keys():
            active = frozenset(self._num_active)
        self._previous, self._page = self._page, _Page(at_s, stats, active)

    def show_idle(self, *, now: float) -> None:
        """Record an idle engine: vLLM takes an empty step after its last request was aborted."""
        if self._page.stats != EngineStats():
            self.show(EngineStats(), at_s=max(now, self._page.shown_s))

    def report(self, *, now: float, since_s: float) -> EngineReport:
        """Return the page at `now`; its log begins after `since_s`."""
        page = self._page if self._page.shown_s <= now else self._previous
        shown_s, active = page.shown_s, page.active
        log = [(adapter, shown_s) for adapter in sorted(active)] if shown_s > since_s else []
        for adapter in reversed(self._ended):
            ended_s = self._ended[adapter]
            if ended_s <= since_s:
                break
            if adapter not in active and ended_s <= shown_s:
                log.append((adapter, ended_s))
        return EngineReport(shown_s, page.stats, active, tuple(log))
