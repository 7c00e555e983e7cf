"""The opponents: the contract that all keep, and what makes each of them what it is."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, note
from hypothesis import strategies as st
from msgspec.structs import replace

from extproc.lab.opponents import DESCRIPTIONS, OPPONENTS, Hold
from extproc.lab.opponents.gateways import (
    BoundedLoads,
    FilterTree,
    LeastRequest,
    LoadState,
    LoraAffinity,
    ScrapesOnly,
    as_scraped,
    rendezvous_order,
)
from extproc.lab.opponents.papers import LMetric, SinceReport
from extproc.routing.policies import Policy
from extproc.types import Choice, RequestInfo, Snapshot, Wait
from tests.builders import address, endpoint_view, request, snapshot


def chosen(policy: Policy, snap: Snapshot, info: RequestInfo | None = None, seed: int = 1) -> str:
    answer = policy.choose(snap, info or request("a"), rng=random.Random(seed))
    assert isinstance(answer, Choice)
    return answer.endpoints[0].address


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    views = []
    for number in range(1, draw(st.integers(1, 5)) + 1):
        pending = draw(st.dictionaries(st.sampled_from("abc"), st.integers(1, 4)))
        views.append(
            endpoint_view(
                number,
                pending_by_adapter=pending,
                num_in_flight=draw(st.integers(0, 9)),
                num_running=draw(st.integers(0, 9)),
                num_waiting=draw(st.integers(0, 80)),
                kv_usage_ratio=draw(st.floats(0, 1)),
                max_loras=draw(st.none() | st.integers(1, 3)),
                gpu_adapters=tuple(draw(st.lists(st.sampled_from("abc"), unique=True))),
                cpu_adapters=tuple(draw(st.lists(st.sampled_from("abc"), unique=True))),
                reported_at_s=draw(st.none() | st.floats(0, 100)),
            )
        )
    return snapshot(*views, now=100.0)


@given(st.lists(snapshots(), min_size=1, max_size=4), st.none() | st.sampled_from("abc"))
def test_every_policy_chooses_from_the_snapshot_and_is_determined_by_its_seed(
    snaps: list[Snapshot], adapter: str | None
) -> None:
    for name in sorted(OPPONENTS):
        note(name)
        assert_determined_choices(name, snaps, adapter)


def assert_determined_choices(name: str, snaps: list[Snapshot], adapter: str | None) -> None:
    answers = []
    for _ in range(2):
        policy, rng = OPPONENTS[name](), random.Random(1)
        chosen = [policy.choose(snap, request(adapter), rng=rng) for snap in snaps]
        # Terms are a method of the policy: those of two policies are not equal.
        answers.append(
            [replace(each, terms=None) if isinstance(each, Choice) else each for each in chosen]
        )

    assert answers[0] == answers[1]
    for snap, answer in zip(snaps, answers[0], strict=True):
        if isinstance(answer, Wait):
            assert answer.until_s > snap.now
        else:
            assert answer.endpoints[0] in snap.endpoints


def test_every_policy_has_a_description() -> None:
    assert DESCRIPTIONS.keys() == OPPONENTS.keys()


def test_p2c_takes_the_less_busy_of_two() -> None:
    snap = snapshot(endpoint_view(1, num_in_flight=5), endpoint_view(2, num_in_flight=1))
    many = snapshot(*(endpoint_view(n, num_in_flight=n) for n in range(1, 10)))

    assert chosen(LeastRequest(), snap) == address(2)
    hits = {chosen(LeastRequest(), many, seed=seed) for seed in range(100)}
    assert address(9) not in hits
    assert len(hits) > 4


def test_rendezvous_moves_only_what_was_on_the_endpoint_that_left() -> None:
    views = [endpoint_view(number) for number in range(1, 6)]
    for number in range(50):
        before = rendezvous_order(views, f"adapter-{number}")
        after = rendezvous_order(views[1:], f"adapter-{number}")
        assert after == [view for view in before if view is not views[0]]


def test_rendezvous_spreads_adapters() -> None:
    views = [endpoint_view(n) for n in range(1, 5)]
    homes = Counter(rendezvous_order(views, f"adapter-{n}")[0].address for n in range(400))

    assert min(homes.values()) > 60


def test_bounded_loads_leaves_a_home_that_is_above_its_bound() -> None:
    home = rendezvous_order([endpoint_view(1), endpoint_view(2)], "a")[0].address
    other = address(1) if home == address(2) else address(2)

    def snap(at_home: int, elsewhere: int) -> Snapshot:
        loads = {home: at_home, other: elsewhere}
        return snapshot(*(endpoint_view(n, num_pending=loads[address(n)]) for n in (1, 2)))

    assert chosen(BoundedLoads(c=1.5), snap(10, 10)) == home
    assert chosen(BoundedLoads(c=1.5), snap(30, 2)) == other
    with pytest.raises(ValueError, match="above 1"):
        BoundedLoads(c=1.0)


def test_filter_tree_prefers_activity_then_room_then_the_shortest_queue() -> None:
    active = endpoint_view(1, pending_by_adapter={"a": 1, "b": 1}, max_loras=2, num_waiting=5)
    roomy = endpoint_view(2, pending_by_adapter={"b": 1}, max_loras=2, num_waiting=0)
    full = endpoint_view(3, pending_by_adapter={"b": 1, "c": 1}, max_loras=2, num_waiting=0)

    assert chosen(FilterTree(), snapshot(active, roomy, full)) == address(1)
    assert chosen(FilterTree(), snapshot(roomy, full)) == address(2)
    assert chosen(FilterTree(queue_threshold=5), snapshot(active, full, roomy)) == address(2)
    swamped = [endpoint_view(n, num_waiting=50 + 40 * n, max_loras=2) for n in (1, 2)]
    assert chosen(FilterTree(), snapshot(*swamped)) == address(1)


def test_llmd_as_shipped_counts_active_adapters_twice() -> None:
    """Three of four slots in use: there is room, but 2 x 3 is not below 4."""
    three = endpoint_view(1, pending_by_adapter=dict.fromkeys("xyz", 1), max_loras=4)
    full = endpoint_view(2, pending_by_adapter=dict.fromkeys("wxyz", 1), max_loras=4)
    hits = {chosen(LoraAffinity(), snapshot(three, full), seed=seed) for seed in range(20)}

    assert hits == {address(1), address(2)}


def test_llmd_takes_the_reported_queue_or_its_own_requests_in_flight() -> None:
    queued = endpoint_view(1, num_waiting=5)
    busy = endpoint_view(2, num_in_flight=5)

    assert chosen(LoraAffinity(), snapshot(queued, busy)) == address(2)
    assert chosen(LoraAffinity(is_counting=True), snapshot(queued, busy)) == address(1)


def test_as_shipped_sees_pages_and_its_own_number_of_requests_and_no_more() -> None:
    counted = {"num_told": 9, "num_adapter_loads": 5, "prompts_done_s": 100.5}
    fresh = endpoint_view(1, pending_by_adapter={"a": 3}, gpu_adapters=("a",), **counted)
    named = endpoint_view(2, reported_adapters=frozenset("a"), num_running=2, num_waiting=1)
    scraped = as_scraped(named)
    for name in ("llmd_as_shipped", "filter_tree_as_shipped", "llmd_in_flight_as_shipped"):
        policy = OPPONENTS[name]()
        answer = policy.choose(snapshot(fresh, named), request("a"), rng=random.Random(1))

        assert isinstance(answer, Choice)
        assert answer.endpoints == (named,)
    assert as_scraped(fresh).pending_by_adapter == {}
    assert as_scraped(fresh).gpu_adapters == ()
    assert as_scraped(fresh) == as_scraped(endpoint_view(1))
    assert (scraped.pending_by_adapter, scraped.num_pending) == ({"a": 1}, 3)
    counting = OPPONENTS["llmd_in_flight_as_shipped"]()
    sent = endpoint_view(3, num_in_flight=2)
    assert chosen(counting, snapshot(sent, fresh)) == address(1)


def test_as_shipped_a_policy_may_wait() -> None:
    full = endpoint_view(1, reported_adapters=frozenset("b"), max_loras=1)
    policy = ScrapesOnly(Hold(LeastRequest()))

    answer = policy.choose(snapshot(full), request("a"), rng=random.Random(1))
    assert isinstance(answer, Wait)


def test_llmd_follows_an_active_adapter() -> None:
    active = endpoint_view(1, pending_by_adapter={"a": 3}, max_loras=4)

    assert chosen(LoraAffinity(), snapshot(active, endpoint_view(2, max_loras=4))) == address(1)


def test_load_state_ranks_gpu_before_cpu_before_free_before_evictable_before_full() -> None:
    slots: dict[str, Any] = {"max_loras": 2}
    views = [
        endpoint_view(1, gpu_adapters=("a",), **slots),
        endpoint_view(2, cpu_adapters=("a",), **slots),
        endpoint_view(3, **slots),
        endpoint_view(4, gpu_adapters=("b", "c"), **slots),
        endpoint_view(5, pending_by_adapter={"b": 1, "c": 1}, **slots),
    ]
    for first in range(4):
        assert chosen(LoadState(queue_weight=0), snapshot(*views[first:])) == address(first + 1)


def test_since_report_forgets_what_a_later_report_must_show() -> None:
    sent = SinceReport()
    sent.record(address(1), 5, now=1.0)
    sent.record(address(1), 7, now=2.0)

    assert sent.amount(endpoint_view(1, reported_at_s=0.5)) == 12
    assert sent.amount(endpoint_view(1, reported_at_s=1.0)) == 7
    assert sent.amount(endpoint_view(1, reported_at_s=9.0)) == 0
    assert sent.amount(endpoint_view(2)) == 0


def test_lmetric_multiplies_queue_and_batch() -> None:
    info = request("a", body_bytes=400)
    small_batch = endpoint_view(1, num_waiting=3, num_pending=4)
    large_batch = endpoint_view(2, num_waiting=0, num_pending=9)

    assert chosen(LMetric(0, 0), snapshot(small_batch, large_batch), info) == address(2)


def test_lmetric_with_loads_stays_where_the_adapter_is() -> None:
    info = request("a", body_bytes=400)
    warm = endpoint_view(1, gpu_adapters=("a",), num_pending=5, max_loras=2)
    cold = endpoint_view(2, num_pending=1, max_loras=2)
    full = endpoint_view(3, pending_by_adapter={"b": 1, "c": 1}, gpu_adapters=("a",), max_loras=2)

    assert chosen(LMetric(0, 0), snapshot(warm, cold), info) == address(2)
    assert chosen(LMetric(3000, 0), snapshot(warm, cold), info) == address(1)
    assert chosen(LMetric(0, 30_000), snapshot(warm, full), info) == address(1)


def test_hold_waits_only_for_a_slot() -> None:
    policy = Hold(LeastRequest(), again_s=0.02)
    full = endpoint_view(1, pending_by_adapter={"b": 1}, max_loras=1, num_waiting=9)
    answer = policy.choose(snapshot(full, now=1.0), request("a"), rng=random.Random(1))

    assert answer == Wait(1.02, "hold")
    assert chosen(policy, snapshot(full, endpoint_view(2)), request("a")) == address(2)

    assert chosen(policy, snapshot(full), request("b")) == address(1)
    assert chosen(policy, snapshot(full), request(None)) == address(1)
    assert isinstance(policy.choose(snapshot(full), request("a"), rng=random.Random()), Wait)
    larger = endpoint_view(2, pending_by_adapter={"b": 1, "c": 1}, max_loras=3, num_pending=9)
    assert chosen(policy, snapshot(full, larger), request("a")) == address(2)
