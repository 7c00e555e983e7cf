"""What the parts of `app` are handed of the world; only `app.app` has it from the system."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class World:
    """Clocks and randomness.

    Attributes:
        clock: Monotonic seconds, of the finest kind there is.
        wall_clock: Wall seconds.
        rng: Seeded anew in every process.
    """

    clock: Callable[[], float]
    wall_clock: Callable[[], float]
    rng: random.Random
