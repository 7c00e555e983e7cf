"""Policies: each a small class that chooses an endpoint from an immutable snapshot.

A policy is any object with `choose`. It gets the endpoints that may be chosen (ready, inside the
subset, the model registered), at least one. It must not keep the snapshot.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol

from extproc.routing.policies.controls import LeastPending, RandomChoice, RoundRobin
from extproc.routing.policies.founding import Founding
from extproc.routing.policies.least_harm import LeastHarm
from extproc.types import Choice, EndpointView, RequestInfo, Snapshot, Wait

__all__ = [
    "BUILT_IN",
    "Founding",
    "LeastHarm",
    "LeastPending",
    "Policy",
    "RandomChoice",
    "RoundRobin",
]


class Policy(Protocol):
    """A policy. Its parameters are the keyword arguments of its constructor."""

    def choose(
        self, snapshot: Snapshot, request: RequestInfo, *, rng: random.Random
    ) -> Choice | Wait:
        """Choose among `snapshot.endpoints` (never empty); break ties with `rng`.

        Return `Wait` to hold the request and be asked again. A policy whose waits depend on nothing
        but model, subset, session and claim of a request says so by an attribute `waits_alike`,
        True: when many are held, it is asked for one of a kind.
        """
        ...


class ExplainedPolicy(Policy, Protocol):
    """A policy that can explain its choices to people."""

    @staticmethod
    def explain(
        reason: str, adapter: str | None, chosen: EndpointView, others: Sequence[EndpointView]
    ) -> str | None:
        """Say why it chose `chosen` over `others` (never empty), given its slug.

        Return None for a slug that is not its own.
        """
        ...


BUILT_IN: dict[str, type[ExplainedPolicy]] = {
    "founding": Founding,
    "least_harm": LeastHarm,
    "least_pending": LeastPending,
    "random": RandomChoice,
    "round_robin": RoundRobin,
}
