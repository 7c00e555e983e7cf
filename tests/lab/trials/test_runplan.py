"""Runs at fixed rates, compared seed by seed."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from extproc.commands.lab import lab_app
from extproc.lab.trials.runplan import places_of, plan_fixed, with_only
from extproc.lab.trials.specs import Suite
from extproc.lab.trials.trials import Trial, run_trial
from tests.lab.trials.test_suites import VARIANT, suite_text, tiny
from tests.lab.trials.test_table import TENANTS, cells


def direct(suite: Suite, policy: str, seed: int) -> float:
    """The misses in % of a trial that also searches for the capacity, at 16 requests a second."""
    trial = Trial(suite, suite.scenarios[0], policy, (seed,), (16.0,))
    (done,) = run_trial(trial)
    (run,) = [run for run in done.runs if run["rate_rps"] == 16]
    return float(100 * (1 - run["attainment"]))


def invoke(path: Path, *arguments: str) -> str:
    out = "--requests", "30", "--jobs", "1", "--out", str(path.parent)
    found = CliRunner().invoke(lab_app, ["run", str(path), *arguments, *out])
    return found.stdout if found.exit_code == 0 else found.output + found.stderr


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(suite_text(num_requests=999, variants=[VARIANT]))
    return path


def test_the_table_has_what_the_same_runs_have_in_a_suite(path: Path) -> None:
    own = "round_robin", "B3_informed", "founding, one pod"
    only = [word for name in ("founding", *own) for word in ("--only", name)]
    table = invoke(path, "z@16", *only, "--seeds", "2")
    first = [direct(tiny(), "founding", seed) for seed in (1, 2)]
    on_one_pod = tiny(fleet={"num_pods": 1, "max_loras": 4})

    def mean(values: list[float]) -> str:
        return f"{sum(values) / 2:.2f} ± {abs(values[0] - values[1]) / 2:.2f}"

    assert cells(table, "z@16", "`founding`")[:2] == [mean(first), ""]
    for name, suite, policy in (
        ("`round_robin`", tiny(), "round_robin"),
        ("*B3_informed*", tiny(), "B3_informed"),
        ("`founding, one pod`", on_one_pod, "founding"),
    ):
        misses = [direct(suite, policy, seed) for seed in (1, 2)]
        less = mean([a - b for a, b in zip(misses, first, strict=True)])
        sign = "" if less.startswith("-") else "+"
        assert cells(table, "z@16", name)[:2] == [mean(misses), sign + less]


def test_fleet_and_profile_change_every_policy_s_runs(path: Path) -> None:
    asked = ["--only", "round_robin", "--only", "founding, one pod", "--seeds", "1"]
    table = invoke(path, "z@16", *asked, "--fleet", "num_pods=3", "--profile", "disk_load_s=0.4")
    scenario = {"name": "z", "workload": {"num_adapters": 12, "output_tokens": 20}}
    dearer = {"scenarios": [{**scenario, "profile": {"disk_load_s": 0.4}}]}
    three, one = (
        direct(tiny(fleet={"num_pods": pods, "max_loras": 4}, **dearer), policy, 1)
        for pods, policy in ((3, "round_robin"), (1, "founding"))
    )

    assert cells(table, "z@16", "`round_robin`")[0] == f"{three:.2f}"
    of_one = f"{one:.2f}", f"{one - three:+.2f}"
    assert tuple(cells(table, "z@16", "`founding, one pod`")[:2]) == of_one


def test_fixed_runs_go_on_where_they_were_and_leave_the_whole_suite_s_results(path: Path) -> None:
    whole = path.parent / "tiny.json"
    whole.write_text("kept")
    asked = "--fixed", *("--only", "founding") * 2, "--seeds", "1"
    first, second = (invoke(path, *asked) for _ in range(2))

    kept = (path.parent / "tiny-only.trials.jsonl").read_text().strip().splitlines()
    assert len(kept) == 2  # both of the suite's rates, once
    assert first == second
    assert cells(first, "z@8", "`founding`")
    assert "lab report --html" not in first
    assert whole.read_text() == "kept"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["y@16"], "y@16: not SCENARIO@RATE; scenarios: z"),
        (["z"], "z: not SCENARIO@RATE"),
        (["z@fast"], "fast is no rate"),
        (["z@0"], "scenario z"),
        (["z@inf"], "scenario z"),
        (["z@16", "--only", "nonsense"], "unknown policies: nonsense"),
        (["z@16", "--only", "least_harm?nonsense=1"], "nonsense"),
        (["z@16", "--only", "B4_stale_long"], "could not convert"),
        (["z@16", "--fleet", "nonsense=1"], "nonsense"),
        (["z@16", "--profile", "nonsense=1"], "nonsense"),
        (["z@16", "--fleet", "num_routers"], "num_routers: not key=value"),
    ],
)
def test_what_is_unknown_is_said_in_one_line(
    arguments: list[str], message: str, path: Path
) -> None:
    said = invoke(path, *arguments, "--only", "founding", "--seeds", "1")

    assert message in " ".join(said.split())
    assert "Traceback" not in said


def test_runs_are_whole_even_where_nothing_is_served_well() -> None:
    suite = with_only(tiny(scenarios=[{"name": "z", "profile": {"step_s": 10.0}}]), ["founding"])
    trial, _ = plan_fixed(suite, places_of(suite, ["z@16"]))
    (done,) = run_trial(trial)

    assert done.cut == []
    assert done.runs[0]["attainment"] == 0


def test_those_alone_send_what_they_send_beside_others() -> None:
    suite = tiny(scenarios=[TENANTS], rates_rps=[8], seeds=[1], policies=["founding"], bounds=[])
    beside, alone = plan_fixed(suite, places_of(suite))
    runs = [run_trial(each)[0].runs[0] for each in (beside, alone)]

    people = [run["tenants"]["people"]["num_offered"] for run in runs]
    assert people[0] == people[1] == runs[1]["num_offered"]
    assert runs[0]["tenants"]["batch"]["num_offered"] == runs[0]["num_offered"] - people[0]


def test_a_place_is_run_alone_as_well_where_it_has_others_beside() -> None:
    suite = tiny(scenarios=[{"name": "z", "workload": {}}, TENANTS])
    places = places_of(suite, ["z@3", "t@4"])

    assert [(each.name, rate) for each, rate in places] == [("z", 3), ("t", 4), ("t, alone", 4)]


def test_a_run_is_as_long_as_the_suite_says() -> None:
    suite = with_only(tiny(min_run_s=30, seeds=[1]), ["founding"])
    runs = {
        trial.value: run_trial(trial)[0].runs[0] for trial in plan_fixed(suite, places_of(suite))
    }

    counted_s = 30 * (1 - suite.warm_up)
    assert {rate: run["num_offered"] / rate for rate, run in runs.items()} == {
        8.0: pytest.approx(counted_s, rel=0.1),
        16.0: pytest.approx(counted_s, rel=0.1),
    }
