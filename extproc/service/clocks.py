"""Clocks and randomness for the service; only `service.app` takes them from the system."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Clocks:
    """Clocks and randomness.

    Attributes:
        clock: Monotonic seconds, at the highest resolution.
        wall_clock: Wall seconds.
        rng: Seeded differently in every process.
        cpu_clock: Seconds of CPU that this thread has taken; by default none.
    """

    clock: Callable[[], float]
    wall_clock: Callable[[], float]
    rng: random.Random
    cpu_clock: Callable[[], float] = lambda: 0.0
