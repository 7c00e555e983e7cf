"""The bounds: what they promise, and that they bound."""

from __future__ import annotations

import random
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.lab.engine.caches import AdapterCache
from extproc.lab.engine.engine import Engine
from extproc.lab.engine.profiles import H100_8B
from extproc.lab.fleet.fleet import Fleet
from extproc.lab.fleet.settings import FleetSettings, PodKind
from extproc.lab.fleet.virtualpod import FleetPod
from extproc.lab.trials.bestcase import (
    belady_loads,
    count_belady,
    pooled_settings,
    pooled_slots,
    pooled_workload,
)
from extproc.lab.trials.forecast import Queued, forecast, state_of
from extproc.lab.trials.oracle import Oracle, attach_oracles
from extproc.lab.workload.judge import Slo, measure
from extproc.lab.workload.running import FleetResult, LabFlight
from extproc.routing.policies import Founding, LeastPending, RandomChoice
from tests.conftest import some
from tests.lab.lab import arrival, poisson, run, workload

SLO = Slo()


def least_loads(sequence: tuple[str, ...], num_slots: int) -> int:
    """By trying everything: which to evict at each miss."""

    def rest(index: int, held: frozenset[str]) -> int:
        if index == len(sequence):
            return 0
        adapter = sequence[index]
        if adapter in held:
            return rest(index + 1, held)
        if len(held) < num_slots:
            return 1 + rest(index + 1, held | {adapter})
        return 1 + min(rest(index + 1, held - {gone} | {adapter}) for gone in held)

    return rest(0, frozenset())


def test_belady_is_the_least_that_any_eviction_can_reach() -> None:
    for sequence in product("abc", repeat=6):
        assert belady_loads(sequence, 2) == least_loads(sequence, 2)


@given(st.lists(st.sampled_from("abcdefgh"), max_size=60), st.integers(1, 5))
def test_belady_never_loads_more_than_lru(sequence: list[str], num_slots: int) -> None:
    cache = AdapterCache(num_slots, num_slots)
    lru = sum(cache.use(adapter) is not None for adapter in sequence)

    assert len(set(sequence)) <= belady_loads(sequence, num_slots) + num_slots
    assert belady_loads(sequence, num_slots) <= lru


def test_belady_counts_after_the_warm_up_and_ignores_the_base_model() -> None:
    assert belady_loads(["a", None, "b", None, "a"], 2) == 2
    assert belady_loads(["a", "b", "a", "c"], 3, count_from=1) == 2
    work = workload(arrival(0.0, "a"), arrival(2.0, "a"), arrival(3.0, "b"))
    assert count_belady(work, FleetSettings(warm_up_s=1.0)) == 500


def test_the_pooled_engine_does_the_work_of_all_pods_in_one() -> None:
    fleet = FleetSettings(num_pods=4)
    pooled = pooled_settings(fleet)
    alone = fleet.profile.forward_s(
        num_decoding=10, kv_tokens=1000, prefill_tokens=100, num_adapters=1
    )
    together = pooled.profile.forward_s(
        num_decoding=40, kv_tokens=4000, prefill_tokens=400, num_adapters=1
    )

    assert pooled.num_pods == 1
    assert together == pytest.approx(alone)
    assert pooled.profile.kv_blocks(1, 16) == 4 * fleet.profile.kv_blocks(8, 16)
    work = pooled_workload(workload(arrival(0.0, "a"), arrival(1.0, None), arrival(2.0, "b")))
    assert [a.adapter for a in work.arrivals] == ["pooled", None, "pooled"]
    assert [a.tenant for a in work.arrivals] == ["a", "", "b"]


def test_an_adapter_of_the_pooled_engine_is_judged_by_its_own_name() -> None:
    work = pooled_workload(workload(arrival(0.0, "a", tenant=""), arrival(1.0, "b", tenant="t")))

    assert [a.tenant for a in work.arrivals] == ["a", "t"]


def test_pooled_slots_are_those_of_all_pods_and_adapters_cost_a_pods_part_of_the_time() -> None:
    fleet = FleetSettings(num_pods=4, max_loras=8, max_cpu_loras=32)
    pooled = pooled_slots(fleet, patience_s=0.5)
    alone = fleet.profile.forward_s(
        num_decoding=10, kv_tokens=1000, prefill_tokens=100, num_adapters=1
    )
    together = pooled.profile.forward_s(
        num_decoding=40, kv_tokens=4000, prefill_tokens=400, num_adapters=1
    )

    assert (pooled.num_pods, pooled.max_loras, pooled.max_cpu_loras) == (1, 32, 128)
    assert together == pytest.approx(alone)
    for is_from_disk in (True, False):
        whole_s = fleet.profile.load_s(16, is_from_disk=is_from_disk)
        assert pooled.profile.load_s(16, is_from_disk=is_from_disk) == pytest.approx(whole_s / 4)
    assert pooled_slots(FleetSettings(num_pods=2), patience_s=0.5).max_cpu_loras == 16
    assert pooled.patience_s == 0.5


def test_pooled_slots_bound_the_pods_near_the_target() -> None:
    for rate_rps in some((8, 12), 1):
        work = poisson(600, rate_rps=rate_rps, num_adapters=30, output_tokens=300)
        fleet = FleetSettings(num_pods=3, max_loras=4)
        slots = Fleet(pooled_slots(fleet, patience_s=0.5), work, RandomChoice, seed=1).run()
        free = Fleet(pooled_settings(fleet), pooled_workload(work), RandomChoice, seed=1).run()
        informed = bounded_run(work, lambda: Oracle(SLO), num_pods=3, max_loras=4)

        attained = [measure(each, SLO).attainment for each in (free, slots, informed)]
        assert attained[0] > attained[1] > attained[2]


def bounded_run(work: object, policy: object, **fields: object) -> FleetResult:
    fleet = Fleet(FleetSettings(**fields), work, policy, seed=1)  # type: ignore[arg-type]
    attach_oracles(fleet)
    return fleet.run()


def test_no_policy_beats_the_pooled_bound_and_the_informed_greedy_beats_random() -> None:
    work = poisson(300, rate_rps=40, num_adapters=30, output_tokens=300)
    fields = {"num_pods": 3, "max_loras": 4}
    fleet = FleetSettings(num_pods=3, max_loras=4)
    pooled = Fleet(pooled_settings(fleet), pooled_workload(work), RandomChoice, seed=1).run()
    informed = measure(bounded_run(work, lambda: Oracle(SLO), **fields), SLO)
    blind = measure(bounded_run(work, RandomChoice, **fields), SLO)

    assert measure(pooled, SLO).attainment >= informed.attainment > blind.attainment


@given(seed=st.integers(0, 10_000), num=st.integers(1, 25), slots=st.integers(1, 4))
def test_the_forecast_is_near_to_what_the_engine_then_does(seed: int, num: int, slots: int) -> None:
    """Sum of ends within a fifth, for requests that come at once: cold loads, gate, batch."""
    rng = random.Random(seed)
    engine = Engine(H100_8B, max_loras=slots, ranks=dict.fromkeys("abcdef", 16))
    pod = FleetPod("p", engine, base_model="base", adapters="abcdef", now=0.0)
    for number in range(num):
        made = arrival(
            0.0,
            rng.choice("abcdef"),
            prompt_tokens=rng.randint(5, 400),
            output_tokens=rng.randint(1, 200),
        )
        pod.submit(LabFlight(str(number), made, 0), 0.0)
    expected = forecast(state_of(pod, dict.fromkeys("abcdef", 16)), SLO, now=0.0)
    pod.catch_up(10_000.0)
    ends = [flight.ended_s for flight in pod.take_ended()]

    assert len(ends) == num
    assert expected.total_s == pytest.approx(sum(end or 0.0 for end in ends), rel=0.2)


def test_a_forecast_in_the_middle_continues_from_there() -> None:
    engine = Engine(H100_8B, max_loras=8, ranks={"a": 16})
    pod = FleetPod("p", engine, base_model="base", adapters="a", now=0.0)
    pod.submit(LabFlight("0", arrival(0.0, output_tokens=100), 0), 0.0)
    pod.catch_up(0.6)
    state = state_of(pod, {"a": 16})
    alone = forecast(state, SLO, now=0.6)
    with_other = forecast(state, SLO, now=0.6, extra=Queued(0.6, 50, 20, "a"))
    pod.catch_up(100.0)

    assert alone.total_s == pytest.approx(pod.take_ended()[0].ended_s, rel=0.05)
    assert with_other.total_s > alone.total_s + 0.6
    assert with_other.slot_s == pytest.approx(alone.slot_s, rel=0.2)


def test_a_forecast_sees_misses_of_the_new_request_and_of_those_it_delays() -> None:
    engine = Engine(H100_8B, max_loras=1, ranks={"a": 16, "b": 16})
    pod = FleetPod("p", engine, base_model="base", adapters="ab", now=0.0)
    pod.submit(LabFlight("0", arrival(0.0, "a", output_tokens=400), 0), 0.0)
    pod.catch_up(0.3)
    state = state_of(pod, {"a": 16, "b": 16})

    gated = forecast(state, SLO, now=0.3, extra=Queued(0.3, 50, 20, "b"))
    joined = forecast(state, SLO, now=0.3, extra=Queued(0.3, 50, 20, "a"))
    assert (gated.num_misses, joined.num_misses) == (1, 0)


def test_no_policy_loads_less_than_the_clairvoyant_without_queues() -> None:
    work = poisson(300, rate_rps=3, num_adapters=20, output_tokens=10)
    fleet = FleetSettings(num_pods=2, max_loras=4)
    for policy in (LeastPending, Founding):
        metrics = measure(run(work, policy, num_pods=2, max_loras=4), SLO)
        assert metrics.queue_wait_s < 0.05
        assert metrics.loads_per_1000 >= count_belady(work, fleet) > 0


def test_the_pooled_engine_of_two_kinds_does_the_work_of_both() -> None:
    alone = FleetSettings(num_pods=2)
    fleet = FleetSettings(num_pods=4, kinds=(PodKind(4, max_loras=4, slowness=2.0),))
    work = {"num_decoding": 10, "kv_tokens": 1000, "prefill_tokens": 100, "num_adapters": 1}
    as_fast, pooled = pooled_settings(alone).profile, pooled_settings(fleet)

    assert pooled.profile.forward_s(**work) == pytest.approx(as_fast.forward_s(**work))
    assert pooled.profile.kv_blocks(1, 16) == 4 * fleet.profile.kv_blocks(4, 16)
    assert not pooled.kinds
