"""The baseline policies ignore adapters, and are fair."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from extproc.routing.policies import BUILT_IN, LeastPending, Policy, RandomChoice, RoundRobin
from extproc.types import Choice, EndpointView, RequestInfo, Snapshot, Wait
from tests.builders import address, endpoint_view, request, snapshot
from tests.strategies import requests, snapshots


def chosen_of(policy: Policy, found: Snapshot, rng: random.Random) -> EndpointView:
    """The one that a policy chooses, which has no request wait."""
    choice = policy.choose(found, request(), rng=rng)
    assert isinstance(choice, Choice)
    return choice.endpoints[0]


def turns(policy: RoundRobin, *endpoints: Snapshot) -> list[str]:
    """Addresses chosen from one snapshot after the other."""
    rng = random.Random(0)
    return [chosen_of(policy, each, rng).address for each in endpoints]


def numbered(*numbers: int) -> Snapshot:
    return snapshot(*(endpoint_view(number) for number in numbers))


def test_random_is_uniform_whatever_the_load() -> None:
    """4 endpoints, 4,000 draws: each within 1,000 ± 120, four standard deviations."""
    views = snapshot(*(endpoint_view(number, num_pending=number) for number in range(1, 5)))
    policy, rng = RandomChoice(), random.Random(5)
    counts = Counter(chosen_of(policy, views, rng).address for _ in range(4000))

    epsilon = 120
    assert len(counts) == 4
    assert all(abs(count - 1000) < epsilon for count in counts.values())


def test_round_robin_goes_by_address_and_begins_again() -> None:
    chosen = turns(RoundRobin(), *[numbered(1, 2, 3)] * 5)

    assert chosen == [address(number) for number in (1, 2, 3, 1, 2)]


def test_round_robin_keeps_its_turn_when_endpoints_come_and_go() -> None:
    chosen = turns(RoundRobin(), numbered(1, 2, 3), numbered(2, 3), numbered(1, 2, 3))

    assert chosen == [address(number) for number in (1, 2, 3)]


@given(st.lists(st.sampled_from([(1, 2), (3, 4), (1, 2, 3, 4)]), max_size=60))
def test_round_robin_is_fair_within_every_set_of_candidates(sets: list[tuple[int, ...]]) -> None:
    """Models on different endpoints take turns with each other; none of them skews the others'."""
    policy = RoundRobin()
    turns(policy, *(numbered(*numbers) for numbers in sets))
    alternating = turns(policy, *[numbered(1, 2), numbered(3, 4)] * 10)
    counts = Counter(alternating)

    assert max(counts.values()) - min(counts.values()) <= 2
    assert len(counts) == 4


@given(snapshots().filter(lambda s: s.endpoints), st.integers(0, 99))
def test_least_pending_goes_by_the_total(snapshot: Snapshot, seed: int) -> None:
    chosen = chosen_of(LeastPending(), snapshot, random.Random(seed))

    assert chosen.num_pending == min(v.num_pending for v in snapshot.endpoints)


@given(snapshots().filter(lambda s: s.endpoints), requests(), st.integers(0, 99))
def test_every_built_in_policy_answers_an_endpoint_of_the_snapshot_with_a_reason(
    snapshot: Snapshot, request: RequestInfo, seed: int
) -> None:
    for policy in BUILT_IN.values():
        choice = policy().choose(snapshot, request, rng=random.Random(seed))
        if isinstance(choice, Wait):
            assert choice.until_s >= snapshot.now
            continue
        chosen: list[EndpointView] = list(choice.endpoints)

        assert chosen
        assert all(view in snapshot.endpoints for view in chosen)
        assert choice.reason
