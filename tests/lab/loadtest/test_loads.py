"""Loads: suites, scenarios and workloads by name, and the blocks that they give."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.lab.loadtest.loads import (
    Block,
    by_fleet,
    is_suite,
    overridden,
    plan_suite,
    rotated,
    sliced,
    workload_block,
)
from extproc.lab.trials.suites import PlanError, make_trial_parts, read_suite, scenarios_of
from extproc.lab.workload.judge import Slo
from extproc.lab.workload.requests import Tenant, Workload
from tests.lab.lab import write_trace
from tests.lab.loadtest.builders import block
from tests.lab.trials.test_suites import tiny

TWO_SCENARIOS = """
name: two
about: Two scenarios.
num_requests: 40
seeds: [1, 2]
rates_rps: [5, 10]
policies: [founding]
fleet: {num_pods: 2}
scenarios:
  - {name: small, workload: {num_adapters: 4}}
  - {name: large, workload: {num_adapters: 9}, rates_rps: [20]}
"""


def named(name: str, num_requests: int | None = None) -> Block:
    suite = read_suite("workloads")
    return workload_block(suite, name, rate_rps=None, num_requests=num_requests, seed=1)


@pytest.fixture
def suite_path(tmp_path: Path) -> str:
    path = tmp_path / "two.yaml"
    path.write_text(TWO_SCENARIOS, encoding="utf-8")
    return str(path)


def test_a_suite_is_planned_scenario_by_scenario_seed_by_seed_at_every_rate(
    suite_path: str,
) -> None:
    suite = read_suite(suite_path)

    planned = plan_suite(suite, scenarios_of(suite, ()))

    assert [(b.scenario, b.seed, b.rate_rps) for b in planned] == [
        *(("small", 1, 5), ("small", 1, 10), ("small", 2, 5), ("small", 2, 10)),
        *(("large", 1, 20), ("large", 2, 20)),
    ]


def test_a_block_has_the_fleet_of_each_variant() -> None:
    fleet = {"declares": True, "queue": {"fair": False}}
    suite = tiny(variants=[{"label": "unfair", "policy": "least_harm", "fleet": fleet}])

    (block,) = plan_suite(suite, suite.scenarios, rates_rps=[8], seeds=[1])

    plain, changed = block.settings_of("founding"), block.settings_of("unfair")
    assert (plain.declared, plain.queue.fair) == (None, True)
    assert (changed.declared, changed.queue.fair) == (Slo(), False)
    assert changed.warm_up_s == plain.warm_up_s


def test_rates_and_seeds_can_be_chosen(suite_path: str) -> None:
    suite = read_suite(suite_path)

    planned = plan_suite(suite, scenarios_of(suite, ["small"]), rates_rps=[7], seeds=[3])

    assert [b.name for b in planned] == ["small at 7/s, seed 3"]
    assert planned[0].workload.rate_rps == pytest.approx(7, rel=0.4)


def test_a_real_block_is_the_virtual_run_of_the_same_suite(suite_path: str) -> None:
    suite = read_suite(suite_path)

    (planned,) = plan_suite(suite, suite.scenarios[:1], rates_rps=[5], seeds=[1])

    assert planned.settings.num_pods == 2
    assert planned.settings.warm_up_s == pytest.approx(0.15 * planned.workload.duration_s)
    _, workload, _ = make_trial_parts(suite, suite.scenarios[0], rate_rps=5, seed=1)
    assert planned.workload == workload


def test_events_of_the_fleet_are_for_virtual_time() -> None:
    suite = read_suite("evaluation")

    with pytest.raises(PlanError, match="pod-loss-and-join: PodJoin, PodLoss: in virtual time"):
        plan_suite(suite, scenarios_of(suite, ["pod-loss-and-join"]))


def test_fleet_and_objective_can_be_others(suite_path: str) -> None:
    fleet, slo = {"max_loras": 3, "drain_s": 7}, {"ttft_s": 0.2, "tpot_s": None}

    suite = overridden(read_suite(suite_path), fleet, "a100-8b", slo)
    (first, *_) = plan_suite(suite, suite.scenarios)
    block = workload_block(suite, "zipf", rate_rps=5, num_requests=30, seed=1)

    assert (first.settings.max_loras, first.settings.num_pods) == (3, 2)
    assert first.settings.profile.name == "a100-8b"
    assert (first.slo.ttft_s, first.slo.tpot_s, first.slo.target) == (0.2, 0.05, 0.99)
    assert block.settings.warm_up_s == pytest.approx(0.15 * block.workload.duration_s)
    assert (block.settings.max_loras, block.settings.num_pods) == (3, 2)
    assert block.slo == first.slo


@pytest.mark.parametrize(
    ("fleet", "profile", "message"),
    [
        ({"max_lora": 3}, "", "max_lora"),
        ({"max_loras": 100_000}, "", "KV blocks"),
        ({}, "h200", "profile h200: allowed: h100-8b"),
    ],
)
@pytest.mark.parametrize("name", ["quick", "workloads"])
def test_impossible_fleets_are_refused(
    name: str, fleet: dict[str, int], profile: str, message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        overridden(read_suite(name), fleet, profile, {})


def test_files_and_names_of_workloads_are_no_suites() -> None:
    assert is_suite("quick")
    assert is_suite("anything.yaml")
    assert not is_suite("zipf")
    assert not is_suite("recorded.jsonl")


def test_a_workload_by_name_comes_with_its_own_rate() -> None:
    made = named("zipf", num_requests=200)

    assert isinstance(made.workload, Workload)
    assert made.rate_rps == pytest.approx(10, rel=0.3)


def test_a_workload_is_sent_from_its_file(tmp_path: Path) -> None:
    made = named("zipf", num_requests=30)

    sent = named(str(write_trace(tmp_path, made.workload)))

    assert [each.adapter for each in sent.workload.arrivals] == [
        each.adapter for each in made.workload.arrivals
    ]


# --- blocks -------------------------------------------------------------------------------------


@given(
    times_s=st.lists(st.floats(0, 100, allow_nan=False), min_size=1, max_size=60),
    num_slices=st.integers(1, 6),
)
def test_slices_hold_every_request_once_and_in_order(times_s: list[float], num_slices: int) -> None:
    whole = block(sorted(times_s))
    try:
        slices = sliced(whole, num_slices)
    except PlanError:
        return

    width_s = whole.workload.duration_s / num_slices
    back = [
        number * width_s + arrival.at_s
        for number, part in enumerate(slices)
        for arrival in part.workload.arrivals
    ]
    assert back == pytest.approx(sorted(times_s))
    assert all(part.num_counted for part in slices)
    assert len({part.name for part in slices}) == num_slices


def test_slices_without_a_request_are_refused() -> None:
    with pytest.raises(PlanError, match="5 slices are too many for 4 requests"):
        sliced(block(), 5)


@given(st.lists(st.text(), min_size=1, max_size=6, unique=True), st.integers(0, 50))
def test_in_each_block_every_target_has_one_turn(labels: list[str], number: int) -> None:
    assert sorted(rotated(labels, number)) == sorted(labels)


@given(st.integers(1, 6), st.integers(1, 5))
def test_every_target_begins_equally_often(num_targets: int, times: int) -> None:
    targets = list(range(num_targets))

    firsts = Counter(rotated(targets, number)[0] for number in range(num_targets * times))

    assert firsts == dict.fromkeys(targets, times)


def test_a_running_fleet_is_used_again_as_long_as_it_is_the_same() -> None:
    blocks = [
        block(warm_up_s=1.0),
        block(seed=2, warm_up_s=2.0),
        block(adapters=("a", "b")),
        block(),
    ]

    assert [len(group) for group in by_fleet(blocks)] == [2, 1, 1]


def test_other_tenants_get_another_fleet_because_routers_know_their_claims() -> None:
    plain = block()
    urgent = replace(plain.workload, tenants={"people": Tenant(priority=1)})

    assert len(by_fleet([plain, replace(plain, workload=urgent)])) == 2
