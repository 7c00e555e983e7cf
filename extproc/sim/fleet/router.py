"""One router of a fleet: the production parts, and the mail that has not reached it yet."""

from __future__ import annotations

import random
from itertools import count

from extproc.core.admission import AdmissionSettings
from extproc.core.picker import Picker
from extproc.core.policies import Policy
from extproc.core.pool import Pool, PoolSettings
from extproc.core.router import Router
from extproc.workload.flights import Flight


class FleetRouter:
    """A router.

    Args:
        policy: Its rule.
        policy_name: For its picks.
        rng: Its own randomness.
        prefix: Of its picks' ids.
        pool_settings: As in production.
        admission: As in production.
    """

    def __init__(
        self,
        policy: Policy,
        policy_name: str,
        *,
        rng: random.Random,
        prefix: str,
        pool_settings: PoolSettings,
        admission: AdmissionSettings,
    ) -> None:
        numbers = count()
        self.pool = Pool(pool_settings)
        self.policy = policy
        picker = Picker(
            policy,
            policy_name,
            rng=rng,
            next_id=lambda: f"{prefix}{next(numbers)}",
            admission=admission,
        )
        self.router = Router(self.pool, picker)
        self.known: set[str] = set()
        self.seen_s: dict[str, float] = {}  # when the page of each pod that it saw last was made
        self.ended: list[Flight] = []

    def hear_of_ends(self, now: float) -> None:
        """Read the access log: the requests that ended since the last time."""
        ended, self.ended = self.ended, []
        for flight in ended:
            ended_s = now if flight.ended_s is None else flight.ended_s
            self.pool.finish(flight.pick_id, now=ended_s, has_run=flight.has_run)
