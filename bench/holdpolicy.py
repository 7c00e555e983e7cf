"""A policy that holds every request for a while: `policy: {name: "bench.holdpolicy:Hold"}`."""

from __future__ import annotations

import random

from extproc.routing.policies import LeastPending
from extproc.types import Choice, RequestInfo, Snapshot, Wait


class Hold:
    """Wait `hold_s` seconds from a request's arrival on, then go where the least is pending.

    With `only_tenants`, requests that name no tenant do not wait.
    """

    def __init__(self, hold_s: float, *, only_tenants: bool = False) -> None:
        self.hold_s, self.only_tenants = hold_s, only_tenants
        self._then = LeastPending()

    def choose(
        self, snapshot: Snapshot, request: RequestInfo, *, rng: random.Random
    ) -> Choice | Wait:
        """Wait, or choose."""
        is_meant = request.claim.tenant or not self.only_tenants
        if is_meant and snapshot.now - request.arrived_at_s < self.hold_s:
            return Wait(until_s=request.arrived_at_s + self.hold_s, reason="hold")
        return self._then.choose(snapshot, request, rng=rng)
