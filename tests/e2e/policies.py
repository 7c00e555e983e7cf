"""Policies that tests load by `module:attribute`."""

from __future__ import annotations

import random
from math import inf

from extproc import Choice, RequestInfo, Snapshot, Wait


class Gate:
    """Hold every request as long as one for `adapter` runs, then take the first endpoint."""

    def __init__(self, adapter: str) -> None:
        self._adapter = adapter

    def choose(
        self, snapshot: Snapshot, request: RequestInfo, *, rng: random.Random
    ) -> Choice | Wait:
        if any(self._adapter in view.pending_by_adapter for view in snapshot.endpoints):
            return Wait(inf, "gate")
        return Choice(snapshot.endpoints[:1], "released")
