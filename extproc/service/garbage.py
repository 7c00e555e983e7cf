"""The garbage collector, kept off long-lived objects: no request should wait for a full pass.

1. Objects that exist after the start, and after each change of the models, are left out of the
   passes that follow. With a hundred pods and a thousand adapters a full pass takes 60 ms, without
   their lists a few.
2. A pass over everything is made at rest, when no request has come since the last look. Where there
   is no rest, it is made after `MAX_AGE_S`, or `MAX_CHANGES` of the models. Cycles that were left
   out are never freed otherwise. Hostile connections leave 3 MB of them in a minute.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Final

GC_THRESHOLDS: Final = 1_000, 5, 40
"""Python's defaults are 700, 10, 10. The younger generations, of 1,000 and 5,000 objects, take 1
and 5 ms at most; requests leave no cycles behind."""
MIN_AGE_S: Final = 60.0
"""From one pass over everything to the next at rest, at least."""
MAX_AGE_S: Final = 3600.0
"""The same, at most: what became garbage in the meantime was not looked at."""
MAX_CHANGES: Final = 100
"""Likewise, of the models: a fleet whose lists change with every look spends a thousandth of its
time on these passes."""


class Garbage:
    """Has the collector's passes short; `tick` about once a second.

    Args:
        num_requests: Returns how many requests have been decided; it stands still at rest.
        models: Returns what pods list; another object after each change.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        *,
        num_requests: Callable[[], int],
        models: Callable[[], object],
        clock: Callable[[], float],
    ) -> None:
        self._num_requests, self._models, self._clock = num_requests, models, clock
        self._seen: tuple[int, object] | None = None
        self._collected: tuple[int, object] | None = None
        self._collected_s, self._num_changes = clock(), 0

    def tick(self) -> None:
        """Leave out what is new, or collect everything if it is time."""
        seen, before = (self._num_requests(), self._models()), self._seen
        self._seen = seen
        age_s, is_at_rest = self._clock() - self._collected_s, before == seen
        is_due = age_s >= (MIN_AGE_S if is_at_rest else MAX_AGE_S)
        is_due = is_due or self._num_changes >= MAX_CHANGES
        if is_due and seen != self._collected:
            gc.unfreeze()
            gc.collect()
            gc.freeze()
            self._collected, self._collected_s, self._num_changes = seen, self._clock(), 0
        elif before is None or before[1] is not seen[1]:
            self._num_changes += 1
            gc.collect(1)
            gc.freeze()

    def end(self) -> None:
        """Have the collector look at everything again."""
        gc.unfreeze()
