"""Policies that tests load by `module:attribute`."""

from __future__ import annotations

import random
import time
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


class Faulty:
    """Raise an error for one adapter, and take 20 ms over all others."""

    def __init__(self, adapter: str) -> None:
        self._adapter = adapter

    def choose(
        self, snapshot: Snapshot, request: RequestInfo, *, rng: random.Random
    ) -> Choice | Wait:
        if request.adapter == self._adapter:
            raise RuntimeError("a bug in this policy")
        time.sleep(0.02)
        return Choice(snapshot.endpoints[:1], "slow")


class Place:
    """Take the pod with a name."""

    def __init__(self, pod: str) -> None:
        self._pod = pod

    def choose(self, snapshot: Snapshot, request: RequestInfo, *, rng: random.Random) -> Choice:
        named = [view for view in snapshot.endpoints if view.name == self._pod]
        return Choice(named or snapshot.endpoints[:1], "place")
