"""Rates of work that forget, and rates in steps: up at once, down after a while."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import exp, log

from msgspec import Struct

STEP = 1.25
"""Between two levels. Routers whose rates differ by a few per cent mostly have the same level."""
LEAST = 0.001
"""In seconds of work per second: a rate up to this is level 0."""
MOST = 1e6
"""More than any adapter has; so that no rate is too large to have a level."""
COOL_S = 60.0
"""Longer than the pauses of a popular adapter's requests, so that its homes are not lost in one."""

NAMES_A_PASS = 500
"""Adapters that are looked at in one pass: some 0.2 ms."""

_LOG_STEP = log(STEP)


def level_of(rate: float) -> int:
    """Return the lowest level whose rate is not below `rate`, but for rounding; 0 for NaN."""
    return 1 + int(log(min(rate, MOST) / LEAST) / _LOG_STEP) if rate > LEAST else 0


def rate_of(level: int) -> float:
    """Return the highest rate of a level, in seconds of work per second; 0 for level 0."""
    return LEAST * STEP**level if level else 0.0


class Levels:
    """The level of each adapter: about the highest that it had within `COOL_S`.

    One that has been below the held one for `COOL_S` falls to the highest of the last half of that.

    Attributes:
        by_adapter: A new mapping after each change, never mutated.
    """

    def __init__(self) -> None:
        self._cooling: dict[str, _Cooling] = {}
        self.by_adapter: Mapping[str, int] = {}

    def update(self, rates: Mapping[str, float], *, now: float) -> Iterator[None]:
        """Take the rates at `now`, in seconds of work per second, of all adapters that there are,
        in passes.

        One that is not among them is forgotten.
        """
        held = self.by_adapter
        changed = {}
        for number, (adapter, rate) in enumerate(rates.items(), start=1):
            if number % NAMES_A_PASS == 0:
                yield
            level = self._level(held.get(adapter, -1), adapter, level_of(rate), now)
            if level != held.get(adapter):
                changed[adapter] = level
        gone = held.keys() - rates.keys()
        for adapter in gone:
            self._cooling.pop(adapter, None)
        if changed or gone:
            merged = {**held, **changed}
            self.by_adapter = {adapter: merged[adapter] for adapter in rates}

    def _level(self, before: int, adapter: str, level: int, now: float) -> int:
        """Return the level to hold, given the one held and the present one."""
        if level >= before:
            self._cooling.pop(adapter, None)
            return level
        cooling = self._cooling.setdefault(adapter, _Cooling(now + COOL_S, level))
        is_early = now < cooling.until_s - COOL_S / 2
        cooling.highest = level if is_early else max(cooling.highest, level)
        if now < cooling.until_s:
            return before
        return self._cooling.pop(adapter).highest


class _Cooling(Struct):
    """When an adapter will have been below its level for long, and its highest level of late."""

    until_s: float
    highest: int


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
    """The work that is offered for each adapter, in seconds per second: a rate that forgets.

    Work is weighted by exp(time / `DECAY_S`) and the sums are divided by the weight of the present
    (forward decay: Cormode et al., ICDE 2009). So a rate is a sum, which does not depend on the
    order in which work is reported. Routers with the same reports have the same rates.
    """

    def __init__(self) -> None:
        self._epoch_s = 0.0
        self._sums: dict[str, float] = {}

    def add(self, adapter: str, work_s: float, *, at_s: float) -> None:
        """Count a request of so many seconds' work that was sent at `at_s`."""
        if at_s - self._epoch_s > MAX_EXPONENT * DECAY_S:
            self._move_epoch(at_s)
        weight = exp((at_s - self._epoch_s) / DECAY_S)
        self._sums[adapter] = self._sums.get(adapter, 0.0) + work_s * weight

    def rates(self, now: float) -> Mapping[str, float]:
        """Return the rate of each adapter that has one, as of `now`."""
        self._move_epoch(now)
        rates = {adapter: each / DECAY_S for adapter, each in self._sums.items()}
        return {adapter: rate for adapter, rate in rates.items() if rate >= MIN_RATE}

    def _move_epoch(self, at_s: float) -> None:
        """Weigh by the distance from another time, and forget what is next to nothing then."""
        factor = exp(min((self._epoch_s - at_s) / DECAY_S, MAX_EXPONENT))
        least = FORGOTTEN_RATE * DECAY_S
        scaled = {adapter: each * factor for adapter, each in self._sums.items()}
        self._sums = {adapter: each for adapter, each in scaled.items() if each >= least}
        self._epoch_s = at_s
