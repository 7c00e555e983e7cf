"""The work that is offered for each adapter: a rate that forgets."""

from __future__ import annotations

from collections.abc import Mapping
from math import exp

DECAY_S = 5.0
"""Work of this age counts a third. Short, so that an adapter that becomes popular is seen within
seconds; that popularity passes later is for `levels`."""
MIN_RATE = 1e-4
"""In seconds of work per second: a rate below this counts as none."""
FORGOTTEN_RATE = 1e-12
"""Far below: what is forgotten is never missed, so it does not matter when rates are read."""
MAX_EXPONENT = 50.0
"""Of the weights: they grow with time, and are scaled down before they are too large for a float.
"""


class Demand:
    """Seconds of work per second, by adapter.

    Work is weighted by exp(time / `decay_s`) and the sums are divided by the weight of the present
    (forward decay: Cormode et al., ICDE 2009). So a rate is a sum, which does not depend on the
    order in which work is told, and routers that hear of the same have the same.
    """

    def __init__(self, decay_s: float = DECAY_S) -> None:
        self._decay_s = decay_s
        self._epoch_s = 0.0
        self._sums: dict[str, float] = {}

    def add(self, adapter: str, work_s: float, *, at_s: float) -> None:
        """Count a request of so many seconds' work that was sent at `at_s`."""
        if at_s - self._epoch_s > MAX_EXPONENT * self._decay_s:
            self._move_epoch(at_s)
        weight = exp((at_s - self._epoch_s) / self._decay_s)
        self._sums[adapter] = self._sums.get(adapter, 0.0) + work_s * weight

    def rates(self, now: float) -> Mapping[str, float]:
        """Return the rate of each adapter that has one, as of `now`."""
        self._move_epoch(now)
        rates = {adapter: each / self._decay_s for adapter, each in self._sums.items()}
        return {adapter: rate for adapter, rate in rates.items() if rate >= MIN_RATE}

    def _move_epoch(self, at_s: float) -> None:
        """Weigh by the distance from another time, and forget what is next to nothing then."""
        factor = exp(min((self._epoch_s - at_s) / self._decay_s, MAX_EXPONENT))
        least = FORGOTTEN_RATE * self._decay_s
        scaled = {adapter: each * factor for adapter, each in self._sums.items()}
        self._sums = {adapter: each for adapter, each in scaled.items() if each >= least}
        self._epoch_s = at_s
