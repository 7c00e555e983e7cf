"""Policies that ignore adapters: the baselines of every other policy."""

from __future__ import annotations

import random
from collections.abc import Sequence
from operator import attrgetter

from extproc.phrases import pending
from extproc.routing.policies.ranking import fewest_pending, least
from extproc.types import Choice, EndpointView, RequestInfo, Snapshot


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
