"""A policy whose pods have room for so many requests, none by default: `tests.e2e.room:Room`."""

from __future__ import annotations

import random
from math import inf

from extproc import Choice, RequestInfo, Snapshot, Wait


class Room:
    """Take the pod with the fewest requests, or wait until one has fewer than `num`."""

    def __init__(self, num: int = 0) -> None:
        self._num = num

    def choose(
        self, snapshot: Snapshot, request: RequestInfo, *, rng: random.Random
    ) -> Choice | Wait:
        best = min(snapshot.endpoints, key=lambda view: view.num_pending)
        return Choice((best,), "room") if best.num_pending < self._num else Wait(inf, "room")
