"""Loads: suites, scenarios and workloads by name, and the blocks that they give."""

from __future__ import annotations

from pathlib import Path

import pytest

from extproc.loadtest.blocks import PlanError
from extproc.loadtest.loads import (
    Overrides,
    is_suite,
    plan_suite,
    read_suite,
    scenarios_of,
    workload_block,
)
from extproc.sim.trials.suites import make_trial_parts
from extproc.workload.judge import Slo
from tests.sim.trials.test_suites import tiny

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
    _, workload, _ = make_trial_parts(suite, suite.scenarios[0], rate_rps=5, seed=1)
    assert planned.workload == workload


def test_events_of_the_fleet_are_for_virtual_time() -> None:
    suite = read_suite("evaluation")

    with pytest.raises(PlanError, match="pod-loss-and-join: PodJoin, PodLoss: in virtual time"):
        plan_suite(suite, scenarios_of(suite, ["pod-loss-and-join"]))


def test_overrides_change_fleet_and_objective(suite_path: str) -> None:
    overrides = Overrides(["max_loras=3", "drain_s=7"], "a100-8b", slo_ttft_s=0.2)

    suite = read_suite(suite_path, overrides)
    (first, *_) = plan_suite(suite, suite.scenarios)

    assert (first.settings.max_loras, first.settings.num_pods) == (3, 2)
    assert first.settings.profile.name == "a100-8b"
    assert (first.slo.ttft_s, first.slo.tpot_s) == (0.2, 0.05)


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
        workload_block("zipf", overrides, rate_rps=None, num_requests=None, seed=1)
    with pytest.raises(PlanError, match=message):
        read_suite("quick", overrides)


@pytest.mark.parametrize("name", ["nosuch", "quick/nosuch"])
def test_an_unknown_workload_is_an_error(name: str) -> None:
    with pytest.raises(PlanError, match="nosuch"):
        workload_block(name, Overrides(), rate_rps=1, num_requests=10, seed=1)


def test_files_and_names_of_workloads_are_no_suites() -> None:
    assert is_suite("quick")
    assert is_suite("anything.yaml")
    assert not is_suite("zipf")
    assert not is_suite("recorded.jsonl")


def test_a_workload_by_name_comes_with_its_own_rate() -> None:
    made = workload_block("zipf", Overrides(), rate_rps=None, num_requests=200, seed=1)

    assert made.rate_rps == pytest.approx(10, rel=0.3)
    assert made.settings.warm_up_s == pytest.approx(0.15 * made.workload.duration_s)
