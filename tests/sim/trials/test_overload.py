"""Goodput beyond capacity, and tenants beside each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from extproc.commands.lab import lab_app
from extproc.commands.labrun import make_policy
from extproc.commands.twins import virtual_run
from extproc.loadtest.results import LoadResult, save
from extproc.sim.trials.overload import overload_tables, plan_overload, with_alone
from extproc.sim.trials.suites import SuiteError
from extproc.sim.trials.trials import TrialResult, run_trial
from tests.sim.trials.test_suites import suite_text, tiny

BESIDE = {"num_adapters": 12, "tenant": "people", "beside": {"batch": {"times": 2.0}}}
TENANTS = {"name": "t", "workload": BESIDE}


def result(scenario: str, policy: str, rate_rps: float, seed: int, **run: Any) -> TrialResult:
    measures = {"refusals": {}, "num_offered": 100, "tenants": {}, **run}
    return TrialResult(scenario, policy, seed, "misses", rate_rps, runs=[measures])


def tenants(**attainments: float) -> Mapping[str, Any]:
    return {
        name: {"attainment": part, "longest_wait_s": 10 * part}
        for name, part in attainments.items()
    }


def cells(table: str, *names: str) -> list[str]:
    start = "| " + " | ".join(names) + " |"
    (line,) = [line for line in table.splitlines() if line.startswith(start)]
    return [cell.strip() for cell in line.removeprefix(start).split("|")[:-1]]


def test_goodput_is_given_in_parts_of_the_first_policy_s_at_the_first_rate_seed_by_seed() -> None:
    results = [
        result("z", policy, rate, seed, goodput_rps=goodput, refusals=refusals)
        for policy, rate, goodputs, refusals in (
            ("ours", 8, (8.0, 4.0), {}),
            ("ours", 16, (12.0, 3.0), {"late": 30, "saturated": 5}),
            ("theirs", 8, (6.0, 3.0), {}),
            ("theirs", 16, (2.0, 1.0), {}),
        )
        for seed, goodput in enumerate(goodputs)
    ]
    table = overload_tables(tiny(), results)

    assert cells(table, "z@8", "1", "`ours`")[:2] == ["6.0 ± 2.0", "100.0 ± 0.0"]
    assert cells(table, "z@16", "2", "`ours`")[1:] == [
        "112.5 ± 37.5",
        "late 30.0 ± 0.0, saturated 5.0 ± 0.0",
    ]
    assert cells(table, "z@16", "2", "`theirs`")[1] == "25.0 ± 0.0"


def test_a_tenant_is_compared_with_itself_alone_seed_by_seed() -> None:
    suite = tiny(scenarios=[TENANTS], rates_rps=[8])
    results = [
        result(scenario, "ours", 8, seed, tenants=tenants(**of))
        for scenario, own in (
            ("t", ({"people": 0.9, "batch": 0.5}, {"people": 0.8, "batch": 0.7})),
            ("t, alone", ({"people": 0.95}, {"people": 0.95})),
        )
        for seed, of in enumerate(own)
    ]
    table = overload_tables(suite, results)

    assert cells(table, "t@8", "`ours`", "people")[:3] == ["85.0 ± 5.0", "-10.0 ± 5.0", "8.5 ± 0.5"]
    assert cells(table, "t@8", "`ours`", "batch")[:3] == ["60.0 ± 10.0", "", "6.0 ± 1.0"]


def test_what_did_not_run_is_left_out() -> None:
    suite = tiny(scenarios=[{"name": "z", "workload": {}}, TENANTS], rates_rps=[8, 16])
    some = [
        result("z", "ours", 8, 1, goodput_rps=4.0),
        result("z", "ours", 16, 1, goodput_rps=6.0),
        result("z", "ours", 16, 2, goodput_rps=7.0),
        result("z", "theirs", 16, 1, goodput_rps=2.0),
        result("t", "ours", 8, 1, tenants=tenants(people=0.5)),
    ]
    table = overload_tables(suite, some)

    assert len([line for line in table.splitlines() if "@" in line]) == 4
    assert cells(table, "z@16", "2", "`ours`")[:2] == ["6.5 ± 0.5", "150.0"]
    assert cells(table, "z@16", "2", "`theirs`")[:2] == ["2.0", "50.0"]
    assert cells(table, "t@8", "`ours`", "people")[:2] == ["50.0", ""]


def test_a_load_test_s_real_runs_are_shown_apart_from_their_twins(tmp_path: Path) -> None:
    suite = with_alone(tiny(scenarios=[TENANTS], rates_rps=[8], seeds=[1]))
    twins = [
        virtual_run(suite, scenario, "founding", rate_rps=8, seed=1) for scenario in suite.scenarios
    ]
    lucky = dataclasses.replace(twins[1].metrics.tenants["people"], attainment=0.5)
    beside = dataclasses.replace(twins[0].metrics, tenants={"people": lucky})
    real = [
        msgspec.structs.replace(twins[0], kind="real", metrics=beside),
        msgspec.structs.replace(twins[1], kind="real"),
    ]
    path = tmp_path / "result.json"
    save(LoadResult(name="t", suite=suite, runs=[*real, *twins]), path)

    found = CliRunner().invoke(lab_app, ["table", str(path)]).stdout
    without = tmp_path / "without.json"
    save(LoadResult(name="t", runs=real), without)
    refused = CliRunner().invoke(lab_app, ["table", str(without)])
    no_page = CliRunner().invoke(lab_app, ["report", str(path)])

    shown, predicted = found.split("virtual:")
    assert shown.startswith("real:")
    of_twin = 100 * twins[0].metrics.tenants["people"].attainment
    assert cells(shown, "t@8", "`founding`", "people")[0] == "50.0"
    assert cells(predicted, "t@8", "`founding`", "people")[0] == f"{of_twin:.1f}"
    assert "alone@" not in found
    assert "a load test without a suite" in refused.output + refused.stderr
    assert f"lab table {path}`" in no_page.stderr
    assert no_page.exit_code == 1


def test_those_alone_send_what_they_send_beside_others() -> None:
    suite = tiny(scenarios=[TENANTS], rates_rps=[8], seeds=[1])
    beside, alone = plan_overload(suite, ["founding"], fleet={"num_routers": 2})
    runs = [run_trial(each, make_policy, perf_counter)[0].runs[0] for each in (beside, alone)]

    assert [each.scenario.fleet["num_routers"] for each in (beside, alone)] == [2, 2]
    people = [run["tenants"]["people"]["num_offered"] for run in runs]
    assert people[0] == people[1] == runs[1]["num_offered"]
    assert runs[0]["tenants"]["batch"]["num_offered"] == runs[0]["num_offered"] - people[0]


def test_a_run_is_as_long_as_the_suite_says() -> None:
    suite = tiny(min_run_s=30, seeds=[1])
    runs = {
        trial.value: run_trial(trial, make_policy, perf_counter)[0].runs[0]
        for trial in plan_overload(suite, ["founding"], fleet={})
    }

    counted_s = 30 * (1 - suite.warm_up)
    assert {rate: run["num_offered"] / rate for rate, run in runs.items()} == {
        8.0: pytest.approx(counted_s, rel=0.1),
        16.0: pytest.approx(counted_s, rel=0.1),
    }


def test_the_command_prints_both_tables(tmp_path: Path) -> None:
    path = tmp_path / "tiny.yaml"
    plain = {"name": "z", "workload": {"num_adapters": 12}}
    path.write_text(
        suite_text(
            scenarios=[plain, TENANTS], fleet={"num_pods": 1, "queue": {"order": "deadline"}}
        )
    )
    asked = ["overload", str(path), "--seeds", "1", "--jobs", "1"]
    found = CliRunner().invoke(lab_app, [*asked, "--policy", "founding"])
    wrong = CliRunner().invoke(lab_app, [*asked, "--policy", "nonsense"])

    assert cells(found.stdout, "z@8", "1", "`founding`")[1] == "100.0"
    assert len(cells(found.stdout, "t@16", "`founding`", "people")) == 4
    assert "unknown policies: nonsense" in wrong.output + wrong.stderr


def test_a_queue_that_there_is_not_is_said_so() -> None:
    with pytest.raises(SuiteError, match="nonsense"):
        tiny(fleet={"queue": {"nonsense": 1}})
