"""Rules that know nothing about adapters: what every other rule is measured against."""

from __future__ import annotations

import random

from extproc.core.policies.ranking import least
from extproc.core.types import Choice, RequestInfo, Snapshot


class RandomChoice:
    """Any endpoint, uniformly."""

    def choose(self, snapshot: Snapshot, request: RequestInfo, *, rng: random.Random) -> Choice:
        """Choose uniformly."""
        return Choice((rng.choice(snapshot.endpoints),), "random")


class RoundRobin:
    """One endpoint after the other, by address."""

    def __init__(self) -> None:
        self._last = ""

    def choose(self, snapshot: Snapshot, request: RequestInfo, *, rng: random.Random) -> Choice:
        """Choose the first endpoint behind the last one in address order, so that endpoints may
        come and go without upsetting the turn."""
        endpoints = snapshot.endpoints
        after = (view for view in endpoints if view.address > self._last)
        chosen = next(after, endpoints[0])
        self._last = chosen.address
        return Choice((chosen,), "turn")


class LeastPending:
    """The endpoint with the fewest unfinished requests."""

    def choose(self, snapshot: Snapshot, request: RequestInfo, *, rng: random.Random) -> Choice:
        """Choose by the total of unfinished requests."""
        return Choice((least(snapshot.endpoints, lambda v: v.num_pending, rng),), "least-pending")
