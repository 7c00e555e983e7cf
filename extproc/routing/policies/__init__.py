"""Policies: each a small class that chooses an endpoint.

A policy of a user is any object with `choose`. It gets the endpoints that may be chosen (ready,
inside the subset, the model registered), at least one. It must not keep the snapshot.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol

from extproc.phrases import pending
from extproc.pods.columns import Columns
from extproc.routing.policies.founding import Founding
from extproc.routing.policies.least_harm import LeastHarm
from extproc.routing.policies.ranking import fewest_pending, lowest, one_of
from extproc.routing.policies.rows import RowChoice, RowPolicy
from extproc.types import Choice, EndpointView, RequestInfo, Snapshot, Wait

__all__ = [
    "BUILT_IN",
    "Founding",
    "LeastHarm",
    "LeastPending",
    "Policy",
    "PolicyOptions",
    "RandomChoice",
    "RoundRobin",
]


class Policy(Protocol):
    """Any object with `choose`. Its parameters are the keyword arguments of its constructor."""

    def choose(
        self, snapshot: Snapshot, request: RequestInfo, *, rng: random.Random
    ) -> Choice | Wait:
        """Choose among `snapshot.endpoints`; break ties with `rng`. Return `Wait` to be asked again
        later."""
        ...


class PolicyOptions(Protocol):
    """Optional attributes of a policy beside `choose`. A missing attribute has the default here.

    Attributes:
        uses_cached_bytes: Fill in `RequestInfo.cached_bytes`, and leave a session to the policy
            where the prompt's prefix is known.
        waits_alike: Its waits depend on nothing but model, subset, session and claim of a request.
            So of many such held requests it is asked about one.
        ttft_s: Wanted time to the first token of requests without an objective, which orders those
            that are held.
    """

    uses_cached_bytes: bool = False
    waits_alike: bool = False
    ttft_s: float | None = None


class ExplainedPolicy(Policy, Protocol):
    """A policy that can explain its choices to people."""

    @staticmethod
    def _explain(
        reason: str, adapter: str | None, chosen: EndpointView, others: Sequence[EndpointView]
    ) -> str | None:
        """Say why it chose `chosen` over `others` (never empty), given its slug.

        Return None for a slug that is not its own.
        """
        ...


# Policies that ignore adapters: the baselines of every other policy.


class RandomChoice(RowPolicy):
    """Any endpoint, uniformly."""

    def _choose_row(
        self,
        columns: Columns,
        rows: Sequence[int],
        request: RequestInfo,
        now: float,
        rng: random.Random,
    ) -> RowChoice:
        return RowChoice(rng.choice(rows), "random")

    @staticmethod
    def _explain(
        reason: str, adapter: str | None, chosen: EndpointView, others: Sequence[EndpointView]
    ) -> str:
        """Say why."""
        return f"drawn at random among {1 + len(others)} pods ({pending(chosen, others)})"


class RoundRobin(RowPolicy):
    """One endpoint after the other: the one whose last turn is longest ago, at first by address.

    A single position in the order of addresses would not do. Where models are on different
    endpoints, the turns of one model would skip the same endpoint of another again and again.
    """

    def __init__(self) -> None:
        self._last_chosen: dict[str, int] = {}
        self._num_choices = 0

    def _choose_row(
        self,
        columns: Columns,
        rows: Sequence[int],
        request: RequestInfo,
        now: float,
        rng: random.Random,
    ) -> RowChoice:
        last_chosen, addresses = self._last_chosen, columns.addresses
        chosen = min(rows, key=lambda row: last_chosen.get(addresses[row], 0))
        self._num_choices += 1
        last_chosen[addresses[chosen]] = self._num_choices
        return RowChoice(chosen, "turn")

    @staticmethod
    def _explain(
        reason: str, adapter: str | None, chosen: EndpointView, others: Sequence[EndpointView]
    ) -> str:
        """Say why."""
        return f"it was its turn among {1 + len(others)} pods ({pending(chosen, others)})"


class LeastPending(RowPolicy):
    """The endpoint with the fewest unfinished requests."""

    def _choose_row(
        self,
        columns: Columns,
        rows: Sequence[int],
        request: RequestInfo,
        now: float,
        rng: random.Random,
    ) -> RowChoice:
        return RowChoice(one_of(lowest(rows, columns.num_pending), rng), "least-pending")

    @staticmethod
    def _explain(
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
