"""Policies that tests load by `module:attribute`."""

from __future__ import annotations

import random

from extproc import Choice, RequestInfo, Snapshot, Wait


class Hold:
    """Hold every request for a while, then take the first endpoint."""

    def __init__(self, hold_s: float) -> None:
        self._hold_s = hold_s

    def choose(
        self, snapshot: Snapshot, request: RequestInfo, *, rng: random.Random
    ) -> Choice | Wait:
        release_s = request.arrived_at_s + self._hold_s
        if snapshot.now < release_s:
            return Wait(release_s, "hold")
        return Choice(snapshot.endpoints[:1], "released")
