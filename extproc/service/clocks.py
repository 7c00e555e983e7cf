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
    """

    clock: Callable[[], float]
    wall_clock: Callable[[], float]
    rng: random.Random
