"""The metrics page of an engine in virtual time. It changes at the end of each step only."""

from __future__ import annotations

from msgspec.structs import replace

from extproc.lab.engine.records import EngineReport, EngineRequest, EngineStats

NEVER_S = float("-inf")
"""Before the first page."""

_NO_STATS = EngineStats()


class Activity:
    """The last two states of a page, each without its log."""

    def __init__(self) -> None:
        self._num_first_tokens = 0
        self._num_active: dict[str, int] = {}
        # Adapters that are no longer active, by the time when they last were; oldest first.
        self._ended: dict[str, float] = {}
        self._page = self._previous = EngineReport(NEVER_S)

    def add(self, request: EngineRequest) -> None:
        """Record that `request` has its first token: its adapter is active."""
        self._num_first_tokens += 1
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
        if adapter in self._page.active_adapters:
            self._ended.pop(adapter, None)
            self._ended[adapter] = self._page.shown_s

    def show(self, stats: EngineStats, num_generated: int, *, at_s: float) -> None:
        """Record the end of a step at `at_s`, and how many tokens were generated up to then."""
        self._previous = self._page
        active = self._page.active_adapters
        if active != self._num_active.keys():
            active = frozenset(self._num_active)
        self._page = EngineReport(at_s, stats, num_generated, self._num_first_tokens, active)

    def show_idle(self, *, now: float) -> None:
        """Record an idle engine: vLLM takes an empty step after its last request was aborted."""
        if self._page.stats != _NO_STATS:
            page = self._page
            self.show(_NO_STATS, page.num_generated_tokens, at_s=max(now, page.shown_s))

    def report(self, *, now: float, since_s: float) -> EngineReport:
        """Return the page at `now`; its log begins after `since_s`."""
        page = self._page if self._page.shown_s <= now else self._previous
        return self._with_log(page, since_s)

    def report_of(
        self, shown_s: float, stats: EngineStats, num_generated: int, *, since_s: float
    ) -> EngineReport:
        """Return a later page, with the active adapters of the last."""
        page = replace(self._page, shown_s=shown_s, stats=stats, num_generated_tokens=num_generated)
        return self._with_log(page, since_s)

    def _with_log(self, page: EngineReport, since_s: float) -> EngineReport:
        shown_s, active = page.shown_s, page.active_adapters
        log = [(adapter, shown_s) for adapter in sorted(active)] if shown_s > since_s else []
        for adapter in reversed(self._ended):
            ended_s = self._ended[adapter]
            if ended_s <= since_s:
                break
            if adapter not in active and ended_s <= shown_s:
                log.append((adapter, ended_s))
        return replace(page, adapter_log=tuple(log))
