"""The tables of a result: places with their tenants, and ratios of capacities."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from extproc.commands.lab import lab_app
from extproc.lab.loadtest.results import LoadResult, save
from extproc.lab.loadtest.runs import virtual_run
from extproc.lab.trials.runplan import with_alone
from extproc.lab.trials.suites import PlanError
from extproc.lab.trials.summary import FIXED, FORMAT
from extproc.lab.trials.table import places, ratios
from tests.lab.trials.test_suites import suite_text, tiny

BESIDE = {"num_adapters": 12, "tenant": "people", "beside": {"batch": {"times": 2.0}}}
TENANTS = {"name": "t", "workload": BESIDE}


def trial(scenario: str, policy: str, rate_rps: float, seed: int, **run: Any) -> dict[str, Any]:
    measures = {"refusals": {}, "num_offered": 100, "tenants": {}, "attainment": 1.0, **run}
    at = {"scenario": scenario, "sweep": FIXED, "value": rate_rps}
    return {**at, "policy": policy, "seed": seed, "runs": [{**measures, "rate_rps": rate_rps}]}


def table(*trials: Mapping[str, Any], baseline: str = "ours") -> str:
    return places({"suite": {"baseline": baseline}, "summary": {}, "trials": trials})


def tenants(**attainments: float) -> Mapping[str, Any]:
    return {
        name: {"attainment": part, "longest_wait_s": 10 * part}
        for name, part in attainments.items()
    }


def cells(table: str, *names: str) -> list[str]:
    start = "| " + " | ".join(names) + " | "
    line, *_ = [line for line in table.splitlines() if line.startswith(start)]  # tenants follow
    has_tenants = any(line.startswith("| place | policy | tenant") for line in table.splitlines())
    skipped = has_tenants and len(names) == 2
    return [cell.strip() for cell in line.removeprefix(start).split("|")[skipped:-1]]


def column(table: str, head: str, *names: str) -> str:
    heads = [cell.strip() for cell in table.splitlines()[0].split("|")[1:-1]]
    start = "| " + " | ".join(names) + " |"
    line, *_ = [line for line in table.splitlines() if line.startswith(start)]
    return [cell.strip() for cell in line.split("|")[1:-1]][heads.index(head)]


def test_goodput_is_given_in_parts_of_the_first_policy_s_at_the_first_rate_seed_by_seed() -> None:
    found = table(
        *(
            trial("z", policy, rate, seed, goodput_rps=goodput, refusals=refusals)
            for policy, rate, goodputs, refusals in (
                ("ours", 8, (8.0, 4.0), {}),
                ("ours", 16, (12.0, 3.0), {"late": 30, "saturated": 5}),
                ("theirs", 8, (6.0, 3.0), {}),
                ("theirs", 16, (2.0, 1.0), {}),
            )
            for seed, goodput in enumerate(goodputs)
        )
    )
    part = "of the first's at the first rate, %"

    assert column(found, "served well, req/s", "z@8", "`ours`") == "6.00 ± 2.00"
    assert column(found, part, "z@8", "`ours`") == "100.00 ± 0.00"
    assert column(found, part, "z@16", "`ours`") == "112.50 ± 37.50"
    assert (
        column(found, "refused, %", "z@16", "`ours`") == "late 30.00 ± 0.00, saturated 5.00 ± 0.00"
    )
    assert column(found, part, "z@16", "`theirs`") == "25.00 ± 0.00"


def test_a_tenant_is_compared_with_itself_alone_and_with_the_baseline_seed_by_seed() -> None:
    found = table(
        *(
            trial(scenario, "ours", 8, seed, tenants=tenants(**of))
            for scenario, own in (
                ("t", ({"people": 0.9, "batch": 0.5}, {"people": 0.8, "batch": 0.7})),
                ("t, alone", ({"people": 0.95}, {"people": 0.95})),
            )
            for seed, of in enumerate(own)
        ),
        *(trial("t", "theirs", 8, seed, tenants=tenants(people=0.5, batch=0.5)) for seed in (0, 1)),
    )
    people, batch = ("t@8", "`ours`", "people"), ("t@8", "`ours`", "batch")

    assert column(found, "misses, %", *people) == "15.00 ± 5.00"
    assert column(found, "less alone", *people) == "+10.00 ± 5.00"
    assert column(found, "longest wait, s", *people) == "8.50 ± 0.50"
    assert column(found, "misses, %", *batch) == "40.00 ± 10.00"
    assert column(found, "less alone", *batch) == ""
    assert column(found, "less the first's", "t@8", "`theirs`", "people") == "+35.00 ± 5.00"
    assert "alone@" not in found


def test_what_did_not_run_is_left_out() -> None:
    found = table(
        trial("z", "ours", 8, 1, goodput_rps=4.0),
        trial("z", "ours", 16, 1, goodput_rps=6.0),
        trial("z", "ours", 16, 2, goodput_rps=7.0),
        trial("z", "theirs", 16, 1, goodput_rps=2.0),
        trial("t", "ours", 8, 1, tenants=tenants(people=0.5)),
    )
    part = "of the first's at the first rate, %"

    assert len([line for line in found.splitlines() if "@" in line]) == 5
    assert column(found, "served well, req/s", "z@16", "`ours`") == "6.50 ± 0.50"
    assert column(found, part, "z@16", "`ours`") == "150.00"
    assert column(found, part, "z@16", "`theirs`") == "50.00"
    assert column(found, "misses, %", "t@8", "`ours`", "people") == "50.00"
    assert "less alone" not in found


def test_the_error_is_of_the_differences_not_of_the_seeds() -> None:
    found = table(
        *(
            trial("z", policy, 16, seed, attainment=1 - missed / 100)
            for policy, own in (("b", (2.0, 10.0, 21.0)), ("a", (1.0, 9.0, 20.0)))
            for seed, missed in enumerate(own)
        ),
        baseline="a",
    )

    assert cells(found, "z@16", "`b`")[:2] == ["11.00 ± 5.51", "+1.00 ± 0.00"]
    assert cells(found, "z@16", "`a`")[:2] == ["10.00 ± 5.51", ""]


def test_tails_are_means_over_the_seeds() -> None:
    found = table(
        *(
            trial("z", "a", 16, n, adapter_ttft_p99_s=0.2 * n, worst_adapter_ttft_p99_s=1.0 * n)
            for n in (1, 2)
        )
    )

    assert column(found, "p99 of the median adapter, s", "z@16", "`a`") == "0.30 ± 0.10"
    assert column(found, "of the worst, s", "z@16", "`a`") == "1.50 ± 0.50"


def test_a_sweep_has_each_policy_at_each_value_over_its_seeds() -> None:
    swept = [
        {**trial("z", "x", 5, seed, attainment=part, loads_per_1000=25), "sweep": "cv", "value": 8}
        for seed, part in ((1, 0.5), (2, 0.7))
    ]
    found = table(*swept, {**trial("z", "x", 5, 1), "sweep": ""})

    (line,) = [line for line in found.splitlines() if "`x`" in line]
    assert line.startswith("| cv=8 | `x` | 40.00 ± 10.00 |")
    assert column(found, "loads/1,000", "cv=8", "`x`") == "25.00 ± 0.00"


def test_a_load_test_s_real_runs_stand_beside_their_twins(tmp_path: Path) -> None:
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

    found = CliRunner().invoke(lab_app, ["report", str(path)]).stdout
    without = tmp_path / "without.json"
    save(LoadResult(name="t", runs=real), without)
    refused = CliRunner().invoke(lab_app, ["report", str(without)])
    no_page = CliRunner().invoke(lab_app, ["report", "--html", str(path)])

    of_twin = 100 * (1 - twins[0].metrics.tenants["people"].attainment)
    assert column(found, "misses, %", "t@8", "`founding`", "people") == f"50.00 ({of_twin:.2f})"
    assert "alone@" not in found
    assert "a load test without a suite" in refused.output + refused.stderr
    assert "not a result" in no_page.stderr
    assert no_page.exit_code == 1


def test_the_command_prints_tenants_and_what_is_served_well(tmp_path: Path) -> None:
    path = tmp_path / "tiny.yaml"
    plain = {"name": "z", "workload": {"num_adapters": 12}}
    fleet = {"num_pods": 1, "queue": {"order": "deadline"}}
    path.write_text(suite_text(scenarios=[plain, TENANTS], fleet=fleet))
    asked = ["run", str(path), "--fixed", "--seeds", "1", "--jobs", "1", "--out", str(tmp_path)]
    found = CliRunner().invoke(lab_app, [*asked, "--only", "founding"])
    page = CliRunner().invoke(lab_app, ["report", "--html", "--out", str(tmp_path)])

    part = "of the first's at the first rate, %"
    assert column(found.stdout, part, "z@8", "`founding`") == "100.00"
    assert column(found.stdout, "longest wait, s", "t@16", "`founding`", "people")
    assert found.stdout.startswith(page.stdout)
    assert page.exit_code == 1
    assert "tiny-only was run at fixed rates" in " ".join(page.stderr.split())


def test_a_queue_that_there_is_not_is_said_so() -> None:
    with pytest.raises(PlanError, match="nonsense"):
        tiny(fleet={"queue": {"nonsense": 1}})


# --- capacities over another policy's -------------------------------------------------------

CAPACITIES: dict[str, dict[str, list[float]]] = {
    "zipf": {
        "B3_informed": [100, 100, 100],
        "founding": [50, 40, 60],
        "least_harm": [90, 90, 90],
        "least_harm, one router": [95, 95, 95],
        "lmetric": [92, 92],
        "random": [10, 10, 10],
    },
    "arena": {
        "B3_informed": [10, 10, 10],
        "least_harm": [8, 8, 8],
        "lmetric": [8.0, 8.2, 7.8],
        "random": [1, 20, 3],
    },
    "small": {"B3_informed": [10], "least_harm": [9], "B1_pooled_slots": [12]},
}


def result(capacities: dict[str, dict[str, list[float]]] = CAPACITIES) -> dict[str, Any]:
    trials = [
        {"scenario": scenario, "policy": policy, "seed": seed, "sweep": "", "capacity_rps": rps}
        for scenario, own in capacities.items()
        for policy, values in own.items()
        for seed, rps in enumerate(values)
    ]
    swept = {**trials[0], "sweep": "loads", "capacity_rps": 0.0}
    return {"format": FORMAT, "suite": {}, "summary": {}, "trials": [*trials, swept]}


def lines_over(policy: str) -> Mapping[str, Sequence[str]]:
    split = [line.strip("| ").split(" | ") for line in ratios(result(), policy).splitlines()]
    assert split[0] == [f"over `{policy}`", "median", "worst", *CAPACITIES]
    return {name: [cell.strip() for cell in cells] for name, *cells in split[2:]}


def test_every_policy_stands_over_another_in_each_scenario_and_in_the_middle() -> None:
    over_b3 = lines_over("B3_informed")

    assert over_b3["`least_harm`"] == [
        "0.90",
        "0.80",
        "0.90 (0.90 to 0.90)",
        "0.80 (0.80 to 0.80)",
        "0.90 *",
    ]
    assert over_b3["`founding`"][:3] == ["0.49", "0.49", "0.49 (0.30 to 0.82)"]
    assert over_b3["*B1_pooled_slots*"][:2] == ["1.20", "1.20"]
    assert "*B3_informed*" not in over_b3
    assert list(over_b3)[:2] == ["*B1_pooled_slots*", "`least_harm, one router`"]


def test_what_a_policy_may_be_behind_has_a_star() -> None:
    ours = lines_over("least_harm")
    starred = {
        (name, scenario)
        for name, (_, _, *own) in ours.items()
        for scenario, cell in zip(CAPACITIES, own, strict=False)
        if cell.endswith("*")
    }

    assert {each for each in starred if each[0] in ("`lmetric`", "`random`", "`founding`")} == {
        ("`lmetric`", "arena"),
        ("`random`", "arena"),
    }
    assert ("*B3_informed*", "zipf") in starred


def test_a_result_without_the_policy_is_refused_in_one_line(tmp_path: Path) -> None:
    scenarios = {name: dict(own) for name, own in CAPACITIES.items()}
    del scenarios["arena"]["least_harm"]
    path = tmp_path / "result.json"
    path.write_bytes(msgspec.json.encode(result(scenarios)))
    failed = CliRunner().invoke(lab_app, ["report", str(path), "--over", "least_harm"])

    assert failed.exit_code == 1
    assert "scenario arena was not run with least_harm" in " ".join(failed.stderr.split())
