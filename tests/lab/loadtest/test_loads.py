"""Loads: suites, scenarios and workloads by name, and the blocks that they give."""

from __future__ import annotations

from pathlib import Path

import pytest

from extproc.lab.loadtest.loads import (
    Overrides,
    SuiteLoad,
    WorkloadLoad,
    find_load,
    is_suite,
    plan_suite,
    read_suite,
    workload_load,
)
from extproc.lab.trials.suites import PlanError, scenarios_of
from extproc.lab.workload.judge import Slo
from extproc.lab.workload.requests import Workload
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
    again = SuiteLoad(suite, suite.scenarios[0]).block(rate_rps=5, num_requests=None, seed=1)
    assert planned == again


def test_events_of_the_fleet_are_for_virtual_time() -> None:
    suite = read_suite("evaluation")

    with pytest.raises(PlanError, match="pod-loss-and-join: PodJoin, PodLoss: in virtual time"):
        plan_suite(suite, scenarios_of(suite, ["pod-loss-and-join"]))


def test_overrides_change_fleet_and_objective(suite_path: str) -> None:
    overrides = Overrides(["max_loras=3", "drain_s=7"], "a100-8b", (0.2, None, 0.5))

    suite = read_suite(suite_path, overrides)
    (first, *_) = plan_suite(suite, suite.scenarios)

    assert (first.settings.max_loras, first.settings.num_pods) == (3, 2)
    assert first.settings.profile.name == "a100-8b"
    assert (first.slo.ttft_s, first.slo.tpot_s, first.slo.target) == (0.2, 0.05, 0.5)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (Overrides(["max_lora=3"]), "max_lora=3.*max_loras"),
        (Overrides(["max_loras"]), "KEY=VALUE"),
        (Overrides(["num_pods=many"]), "Expected `int`"),
        (Overrides(["max_loras=100000"]), "KV blocks"),
        (Overrides(profile="h200"), "profile h200: allowed: h100-8b"),
    ],
)
def test_impossible_overrides_are_refused(overrides: Overrides, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        workload_load("zipf", overrides)
    with pytest.raises(PlanError, match=message):
        read_suite("quick", overrides)


def test_a_load_is_found_by_suite_scenario_workload_or_file(
    suite_path: str, tmp_path: Path
) -> None:
    made = workload_load("zipf", Overrides()).block(rate_rps=5, num_requests=30, seed=1)
    made.workload.save(tmp_path / "saved.jsonl")

    loads = [find_load(n) for n in (suite_path, f"{suite_path}/large", "zipf")]
    saved = find_load(str(tmp_path / "saved.jsonl"))

    assert isinstance(loads[0], SuiteLoad)
    assert isinstance(loads[1], SuiteLoad)
    assert [load.scenario.name for load in loads[:2] if isinstance(load, SuiteLoad)] == [
        "small",
        "large",
    ]
    assert isinstance(loads[2], WorkloadLoad)
    got = saved.block(rate_rps=made.workload.rate_rps, num_requests=None, seed=1).workload
    assert len(got.arrivals) == len(made.workload.arrivals)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nosuch", "no workload 'nosuch'"),
        ("nosuch.yaml", "no such file"),
        ("quick/nosuch", "no scenario nosuch: zipf-60"),
    ],
)
def test_an_unknown_name_is_an_error(name: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        find_load(name).block(rate_rps=1, num_requests=10, seed=1)


def test_a_number_of_requests_holds_also_for_a_scenario_with_its_own() -> None:
    load = find_load("slora/table-3")

    made = load.block(rate_rps=10, num_requests=50, seed=1)

    assert len(made.workload.arrivals) < 100


def test_files_and_names_of_workloads_are_no_suites() -> None:
    assert is_suite("quick")
    assert is_suite("anything.yaml")
    assert not is_suite("zipf")
    assert not is_suite("recorded.jsonl")


def test_a_workload_by_name_comes_with_its_own_rate() -> None:
    made = workload_load("zipf", Overrides()).block(rate_rps=None, num_requests=200, seed=1)

    assert isinstance(made.workload, Workload)
    assert made.rate_rps == pytest.approx(10, rel=0.3)
