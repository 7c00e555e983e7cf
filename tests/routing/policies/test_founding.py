"""The founding policy, against a literal restatement of it."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.routing.policies.founding import DEFAULT_THRESHOLD, Founding
from extproc.types import EndpointView, Snapshot
from tests.builders import BASE, address, endpoint_view, request, snapshot
from tests.strategies import ADAPTERS, snapshots

A = request("a")


def restated(
    endpoints: tuple[EndpointView, ...], adapter: str, threshold: int
) -> tuple[list[EndpointView], str]:
    """The endpoints that the policy leaves to chance for an adapter, and why.

    Loaded is resident or active there; pending is this adapter's unfinished requests there. Among
    those with the adapter loaded and pending below the threshold the one with the MOST pending;
    if there is none, among all. What is equal in that goes by the fewest active adapters, then the
    least total pending; what is equal in all three, by chance.
    """

    def is_loaded(view: EndpointView) -> bool:
        resident = set(view.gpu_adapters) | set(view.cpu_adapters)
        return adapter in resident or view.pending_by_adapter.get(adapter, 0) > 0

    def pending(view: EndpointView) -> int:
        return view.pending_by_adapter.get(adapter, 0)

    preferred = [view for view in endpoints if is_loaded(view) and pending(view) < threshold]
    most = max(map(pending, preferred), default=None)
    equal = [view for view in preferred if pending(view) == most] or list(endpoints)
    fewest = min(len(view.pending_by_adapter) for view in equal)
    equal = [view for view in equal if len(view.pending_by_adapter) == fewest]
    least = min(view.num_pending for view in equal)
    equal = [view for view in equal if view.num_pending == least]
    if preferred:
        return equal, "affinity"
    return equal, "spill" if any(map(is_loaded, endpoints)) else "cold"


@given(
    snapshots().filter(lambda s: s.endpoints),
    st.sampled_from(ADAPTERS),
    st.integers(1, 5),
    st.integers(0, 99),
)
def test_an_adapter_goes_where_the_policy_says(
    snapshot: Snapshot, adapter: str, threshold: int, seed: int
) -> None:
    allowed, reason = restated(snapshot.endpoints, adapter, threshold)

    choice = Founding(threshold).choose(snapshot, request(adapter), rng=random.Random(seed))

    assert len(choice.endpoints) == 1
    assert choice.endpoints[0] in allowed
    assert choice.reason == reason


@given(snapshots().filter(lambda s: s.endpoints), st.integers(0, 99))
def test_the_base_model_goes_where_the_least_is_pending(snapshot: Snapshot, seed: int) -> None:
    choice = Founding().choose(snapshot, request(None), rng=random.Random(seed))

    assert choice.endpoints[0].num_pending == min(v.num_pending for v in snapshot.endpoints)
    assert choice.reason == "base"


def test_the_base_model_never_counts_as_an_adapter() -> None:
    """Ten requests for the base on 1, one for an adapter on 2: 1 has the fewer adapters."""
    busy_with_base = endpoint_view(1, num_pending=10)
    one_adapter = endpoint_view(2, pending_by_adapter={"b": 1})

    choice = Founding().choose(snapshot(busy_with_base, one_adapter), A, rng=random.Random(0))

    assert choice.endpoints[0].address == address(1)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("in a GPU slot", {"gpu_adapters": ("a",)}),
        ("in the CPU cache", {"cpu_adapters": ("a",)}),
        ("active", {"pending_by_adapter": {"a": 1}}),
    ],
)
def test_loaded_is_resident_or_active(name: str, fields: dict[str, object]) -> None:
    loaded, idle = endpoint_view(2, **fields), endpoint_view(1)
    choice = Founding().choose(snapshot(idle, loaded), A, rng=random.Random(0))

    assert choice.endpoints == (loaded,), name
    assert choice.reason == "affinity"


def test_below_the_threshold_it_packs_and_at_the_threshold_it_spills() -> None:
    def chosen(num_pending: int) -> tuple[str, str]:
        busy = endpoint_view(1, pending_by_adapter={"a": num_pending})
        choice = Founding(4).choose(snapshot(busy, endpoint_view(2)), A, rng=random.Random(0))
        return choice.endpoints[0].address, choice.reason

    assert chosen(3) == (address(1), "affinity")
    assert chosen(4) == (address(2), "spill")


@st.composite
def holders(draw: st.DrawFn) -> Snapshot:
    """Endpoints that all hold adapter a, few of its requests, and more or less of others."""
    views = []
    for number in range(1, draw(st.integers(2, 6))):
        counts = {"a": draw(st.integers(0, 1)), "b": draw(st.integers(0, 2))}
        pending = {name: count for name, count in counts.items() if count}
        total = sum(pending.values()) + draw(st.integers(0, 1))
        fields = {"pending_by_adapter": pending, "num_pending": total}
        views.append(endpoint_view(number, gpu_adapters=("a",), **fields))
    return snapshot(*views)


NUM_SEEDS = 64
"""Enough for each of up to five equals to be drawn: what is drawn depends on the seed and on how
many there are, and on nothing else."""


@given(holders())
def test_among_holders_with_as_many_requests_chance_decides_between_complete_equals_alone(
    snapshot: Snapshot,
) -> None:
    choices = [Founding().choose(snapshot, A, rng=random.Random(seed)) for seed in range(NUM_SEEDS)]

    equal, reason = restated(snapshot.endpoints, "a", DEFAULT_THRESHOLD)
    chosen = {choice.endpoints[0].address for choice in choices}
    assert chosen == {view.address for view in equal}
    assert {choice.reason for choice in choices} == {reason} == {"affinity"}


@pytest.mark.parametrize(
    ("name", "busy", "idle"),
    [
        ("200 waiting", {"num_pending": 200, "num_waiting": 200, "kv_usage_ratio": 1.0}, {}),
        ("another adapter", {"pending_by_adapter": {"b": 1}}, {"num_pending": 9}),
        (
            "as many adapters, one request more",
            {"pending_by_adapter": {"b": 2}},
            {"pending_by_adapter": {"c": 1}},
        ),
        (
            "as many of the adapter's",
            {"pending_by_adapter": {"a": 3, "b": 1}},
            {"pending_by_adapter": {"a": 3}},
        ),
    ],
)
def test_of_holders_with_as_many_requests_the_emptier_is_chosen(
    name: str, busy: dict[str, object], idle: dict[str, object]
) -> None:
    holds = {"gpu_adapters": ("a",)}
    views = snapshot(endpoint_view(1, **busy, **holds), endpoint_view(2, **idle, **holds))

    for seed in range(NUM_SEEDS):
        choice = Founding().choose(views, A, rng=random.Random(seed))
        assert choice.endpoints[0].address == address(2), name


def test_one_request_more_of_the_adapter_outweighs_any_other_load() -> None:
    busy = endpoint_view(1, pending_by_adapter={"a": 2, "b": 50, "c": 50})
    idle = endpoint_view(2, pending_by_adapter={"a": 1})

    choice = Founding().choose(snapshot(busy, idle), A, rng=random.Random(0))

    assert choice.endpoints[0].address == address(1)


@pytest.mark.parametrize("fields", [{}, {"gpu_adapters": ("a",)}])
def test_complete_equals_are_drawn_uniformly(fields: dict[str, object]) -> None:
    """4 equals beside a busier one, 4,000 draws: each within 1,000 ± 120, four deviations."""
    views = snapshot(
        *(endpoint_view(number, **fields) for number in range(1, 5)),
        endpoint_view(5, num_pending=1, **fields),
    )
    policy, rng = Founding(), random.Random(7)
    counts = dict.fromkeys((view.address for view in views.endpoints), 0)
    for _ in range(4000):
        counts[policy.choose(views, A, rng=rng).endpoints[0].address] += 1

    epsilon = 120
    assert counts.pop(address(5)) == 0
    assert all(abs(count - 1000) < epsilon for count in counts.values())


@pytest.mark.parametrize("threshold", [0, -1, 2.5, "3", True, None])
def test_what_is_no_threshold_is_refused_with_what_is_allowed(threshold: Any) -> None:
    with pytest.raises(ValueError, match=rf"threshold is {threshold!r}; allowed: 1 or more"):
        Founding(threshold)


def test_the_threshold_has_a_default() -> None:
    assert Founding().threshold == DEFAULT_THRESHOLD
    assert BASE not in ADAPTERS
