"""Rules that choose an endpoint, each a small class over an immutable snapshot.

A rule is any object with `choose`. It gets the endpoints that may be chosen at all (ready, inside
the subset, the model registered) and never an empty set. It must not keep the snapshot.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol

from extproc.core.policies.controls import LeastPending, RandomChoice, RoundRobin
from extproc.core.policies.founding import Founding
from extproc.core.types import Choice, EndpointView, RequestInfo, Snapshot, Wait

__all__ = ["BUILT_IN", "Founding", "LeastPending", "Policy", "RandomChoice", "RoundRobin"]


class Policy(Protocol):
    """A rule. Its parameters are the keyword arguments of its constructor."""

    def choose(
        self, snapshot: Snapshot, request: RequestInfo, *, rng: random.Random
    ) -> Choice | Wait:
        """Choose among `snapshot.endpoints` (never empty); break ties with `rng`.

        Answer `Wait` to hold the request and be asked again.
        """
        ...


class ExplainedPolicy(Policy, Protocol):
    """A rule that can say why, in words for people."""

    @staticmethod
    def explain(
        reason: str, adapter: str | None, chosen: EndpointView, others: Sequence[EndpointView]
    ) -> str | None:
        """Say why it chose `chosen` over `others` (never empty), given the slug that it answered.

        None for a slug that is not its own.
        """
        ...


BUILT_IN: dict[str, type[ExplainedPolicy]] = {
    "founding": Founding,
    "least_pending": LeastPending,
    "random": RandomChoice,
    "round_robin": RoundRobin,
}
