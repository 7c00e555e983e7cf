"""The offset between an engine's wall clock and ours, learned from when its log can be from."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf


@dataclass(slots=True)
class ClockOffset:
    """Bounds of our clock minus the engine's wall clock, in seconds."""

    low_s: float = -inf
    high_s: float = inf

    def narrow(self, low_s: float, high_s: float) -> None:
        """Apply new bounds. If they contradict the old ones, one of the clocks was set."""
        low, high = max(low_s, self.low_s), min(high_s, self.high_s)
        if low > high:
            low, high = low_s, max(low_s, high_s)
        self.low_s, self.high_s = low, high

    @property
    def middle_s(self) -> float:
        """The likeliest offset; -inf without a lower bound."""
        return self.low_s if self.low_s == -inf else (self.low_s + self.high_s) / 2
