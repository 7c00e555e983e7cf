"""Requests sent since each endpoint's last report, which no scrape can show yet."""

from __future__ import annotations

from collections import defaultdict, deque

from extproc.types import EndpointView


class SinceReport:
    """Amounts sent per endpoint since its last report."""

    def __init__(self) -> None:
        self._sent: defaultdict[str, deque[tuple[float, float]]] = defaultdict(deque)
        self._totals: defaultdict[str, float] = defaultdict(float)

    def record(self, address: str, amount: float, *, now: float) -> None:
        """Record that `amount` is sent to `address` now."""
        self._sent[address].append((now, amount))
        self._totals[address] += amount

    def amount(self, view: EndpointView) -> float:
        """Return the amount sent to this endpoint since its last report was taken."""
        sent, reported_at_s = self._sent[view.address], view.reported_at_s
        if reported_at_s is not None:
            while sent and sent[0][0] <= reported_at_s:
                self._totals[view.address] -= sent.popleft()[1]
        if not sent:
            self._totals[view.address] = 0.0  # forget rounding errors
        return self._totals[view.address]
