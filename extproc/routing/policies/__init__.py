"""Policies: each a small class that chooses an endpoint from an immutable snapshot.

A policy is any object with `choose`. It gets the endpoints that may be chosen (ready, inside the
subset, the model registered), at least one. It must not keep the snapshot.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from operator import attrgetter
from typing import Protocol

from extproc.phrases import pending
from extproc.routing.policies.founding import Founding
from extproc.routing.policies.least_harm import LeastHarm
from extproc.routing.policies.ranking import fewest_pending, least
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


# Policies that ignore adapters: the baselines of every other policy.


class RandomChoice:
    """Any endpoint, uniformly."""

    def choose(self, snapshot: Snapshot, request: RequestInfo, *, rng: random.Random) -> Choice:
        """Choose uniformly."""
        return Choice((rng.choice(snapshot.endpoints),), "random")

    @staticmethod
    def explain(
        reason: str, adapter: str | None, chosen: EndpointView, others: Sequence[EndpointView]
    ) -> str:
        """Say why."""
        return f"drawn at random among {1 + len(others)} pods ({pending(chosen, others)})"


class RoundRobin:
    """One endpoint after the other: the one whose last turn is longest ago, at first by address.

    A single position in the order of addresses would not do: where models are on different
    endpoints, the turns of one model would skip the same endpoint of another again and again.
    """

    def __init__(self) -> None:
        self._turns: dict[str, int] = {}
        self._num_turns = 0

    def choose(self, snapshot: Snapshot, request: RequestInfo, *, rng: random.Random) -> Choice:
        """Choose the endpoint whose last turn is longest ago."""
        chosen = min(snapshot.endpoints, key=lambda view: self._turns.get(view.address, 0))
        self._num_turns += 1
        self._turns[chosen.address] = self._num_turns
        return Choice((chosen,), "turn")

    @staticmethod
    def explain(
        reason: str, adapter: str | None, chosen: EndpointView, others: Sequence[EndpointView]
    ) -> str:
        """Say why."""
        return f"it was its turn among {1 + len(others)} pods ({pending(chosen, others)})"


class LeastPending:
    """The endpoint with the fewest unfinished requests."""

    def choose(self, snapshot: Snapshot, request: RequestInfo, *, rng: random.Random) -> Choice:
        """Choose by the total of unfinished requests."""
        return Choice((least(snapshot.endpoints, attrgetter("num_pending"), rng),), "least-pending")

    @staticmethod
    def explain(
        reason: str, adapter: str | None, chosen: EndpointView, others: Sequence[EndpointView]
    ) -> str:
        """Say why."""
        return fewest_pending(chosen, others)


BUILT_IN: dict[str, type[ExplainedPolicy]] = {
    "founding": Founding,
    "least_harm": LeastHarm,
    "least_pending": LeastPending,
    "random": RandomChoice,
    "round_robin": RoundRobin,
}
