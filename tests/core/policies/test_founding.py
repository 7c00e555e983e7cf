"""The founding rule, against a literal restatement of it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.policies.founding import DEFAULT_THRESHOLD, Founding
from extproc.core.types import EndpointView, Snapshot
from tests.builders import BASE, address, endpoint_view, request, snapshot
from tests.strategies import ADAPTERS, snapshots

A = request("a")


def restated(
    endpoints: tuple[EndpointView, ...], adapter: str, threshold: int
) -> tuple[list[EndpointView], str]:
    """The endpoints that the rule allows for an adapter, all ties, and why.

    Loaded is resident or active there; pending is this adapter's unfinished requests there. Among
    those with the adapter loaded and pending below the threshold the one with the MOST pending;
    if there is none, the fewest active adapters, then the least total pending.
    """

    def is_loaded(view: EndpointView) -> bool:
        resident = set(view.gpu_adapters) | set(view.cpu_adapters)
        return adapter in resident or view.pending_by_adapter.get(adapter, 0) > 0

    def pending(view: EndpointView) -> int:
        return view.pending_by_adapter.get(adapter, 0)

    preferred = [view for view in endpoints if is_loaded(view) and pending(view) < threshold]
    if preferred:
        most = max(pending(view) for view in preferred)
        return [view for view in preferred if pending(view) == most], "affinity"
    fewest = min(len(view.pending_by_adapter) for view in endpoints)
    empty = [view for view in endpoints if len(view.pending_by_adapter) == fewest]
    least = min(view.num_pending for view in empty)
    reason = "spill" if any(map(is_loaded, endpoints)) else "cold"
    return [view for view in empty if view.num_pending == least], reason


@given(
    snapshots().filter(lambda s: s.endpoints),
    st.sampled_from(ADAPTERS),
    st.integers(1, 5),
    st.integers(0, 99),
)
def test_an_adapter_goes_where_the_rule_says(
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


def test_ties_are_broken_uniformly() -> None:
    """4 tied endpoints, 4,000 draws: each within 1,000 ± 120, four standard deviations."""
    views = snapshot(*(endpoint_view(number) for number in range(1, 5)))
    rule, rng = Founding(), random.Random(7)
    counts = dict.fromkeys((view.address for view in views.endpoints), 0)
    for _ in range(4000):
        counts[rule.choose(views, A, rng=rng).endpoints[0].address] += 1

    epsilon = 120
    assert all(abs(count - 1000) < epsilon for count in counts.values())


@pytest.mark.parametrize("threshold", [0, -1])
def test_a_threshold_below_one_is_refused_with_what_is_allowed(threshold: int) -> None:
    with pytest.raises(ValueError, match=rf"threshold is {threshold}; allowed: 1 or more"):
        Founding(threshold)


def test_the_threshold_has_a_default() -> None:
    assert Founding().threshold == DEFAULT_THRESHOLD
    assert BASE not in ADAPTERS
