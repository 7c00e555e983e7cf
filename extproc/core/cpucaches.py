"""The CPU caches of a pool's endpoints: the size that they are taken to have."""

from __future__ import annotations

from collections.abc import Iterable

from extproc.core.cachesize import CacheSize
from extproc.core.tracked import Tracked
from extproc.core.types import LoadReport


class CpuCaches:
    """One size for the caches of all endpoints, as configured and as learned.

    Attributes:
        learned: The size that first tokens show, which all endpoints' residency goes by; None while
            they show nothing.
    """

    def __init__(self, configured: int | None) -> None:
        self.learned: int | None = None
        self._configured = configured
        self._size = CacheSize()
        self._endpoints: list[Tracked] = []

    def configure(self, configured: int | None) -> None:
        """Apply another configured size to what has been learned."""
        self._configured = configured
        self._apply()

    def set_endpoints(self, endpoints: Iterable[Tracked]) -> None:
        """Replace the endpoints; new ones get the learned size."""
        before, self._endpoints = set(map(id, self._endpoints)), list(endpoints)
        for tracked in self._endpoints:
            if self.learned is not None and id(tracked) not in before:
                tracked.residency.resize(self.learned)

    def record_first_token(self, place: int, ttft_s: float) -> None:
        """Record how long the engine took for the first token of a flight that has a place."""
        if self._size.record_first_token(place, ttft_s):
            self._apply()

    def record_reports(self, before: LoadReport | None, after: LoadReport) -> None:
        """Record two consecutive reports of one process; None before the first."""
        if after.cpu_adapters is not None:
            self._size.record_statement(_cached(before), _cached(after))

    @property
    def presumed(self) -> int:
        """Adapters in a cache by configuration: at least as many as slots, as in vLLM."""
        slots = [tracked.residency.num_slots or 1 for tracked in self._endpoints]
        return max(self._configured or 1, *slots, 1)

    @property
    def has_slots(self) -> bool:
        """Whether the GPU slots of any endpoint are known."""
        return any(tracked.residency.num_slots for tracked in self._endpoints)

    @property
    def stated(self) -> int | None:
        """The size by the engines' own statements; None without any."""
        return self._size.stated(self.presumed)

    def _apply(self) -> None:
        self.learned = self._size.learned(self.presumed)
        if self.learned is not None:
            for tracked in self._endpoints:
                tracked.residency.resize(self.learned)
                tracked.view = None


def _cached(report: LoadReport | None) -> frozenset[str]:
    """Return what an engine states that its cache holds; nothing if it states nothing."""
    if report is None or report.cpu_adapters is None:
        return frozenset()
    return report.cpu_adapters | (report.gpu_adapters or frozenset())
