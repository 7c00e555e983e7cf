"""Power of two choices on own in-flight requests.

Source: Envoy's LEAST_REQUEST with equal weights and `choice_count: 2` (its default); the policy of
Mitzenmacher, "The power of two choices in randomized load balancing" (IEEE TPDS 2001).
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from extproc.routing.policies.ranking import least
from extproc.types import Choice, RequestInfo, Snapshot


@dataclass(slots=True)
class LeastRequest:
    """The less busy of a few endpoints drawn at random.

    Args:
        choice_count: How many are drawn.
    """

    choice_count: int = 2

    def choose(self, snapshot: Snapshot, request: RequestInfo, *, rng: random.Random) -> Choice:
        """Choose by the requests that this router itself has in flight there."""
        endpoints = snapshot.endpoints
        drawn = rng.sample(endpoints, min(self.choice_count, len(endpoints)))
        return Choice((least(drawn, lambda view: view.num_in_flight, rng),), "p2c")
