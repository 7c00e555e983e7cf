"""A policy that holds every request for a while: `policy: {name: "bench.holdpolicy:Hold"}`."""

from __future__ import annotations

import random

from extproc.routing.policies import LeastPending
from extproc.types import Choice, RequestInfo, Snapshot, Wait


class Hold:
    """Wait `hold_s` seconds from a request's arrival on, then go where the least is pending."""

    def __init__(self, hold_s: float) -> None:
        self.hold_s = hold_s
        self._then = LeastPending()

    def choose(
        self, snapshot: Snapshot, request: RequestInfo, *, rng: random.Random
    ) -> Choice | Wait:
        """Wait, or choose."""
        if snapshot.now - request.arrived_at_s < self.hold_s:
            return Wait(until_s=request.arrived_at_s + self.hold_s, reason="hold")
        return self._then.choose(snapshot, request, rng=rng)
