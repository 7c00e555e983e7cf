"""Misses at fixed rates, compared seed by seed."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter

import pytest
from typer.testing import CliRunner

from extproc.commands.lab import lab_app
from extproc.commands.labrun import make_policy
from extproc.sim.trials.misses import misses_table, plan_misses, tails_table
from extproc.sim.trials.specs import Suite
from extproc.sim.trials.trials import Trial, TrialResult, run_trial
from tests.sim.trials.test_suites import VARIANT, suite_text, tiny


def direct(suite: Suite, policy: str, seed: int) -> float:
    """The misses in % of a trial that also searches for the capacity, at 16 requests a second."""
    trial = Trial(suite, suite.scenarios[0], policy, (seed,), (16.0,))
    (done,) = run_trial(trial, make_policy, perf_counter)
    (run,) = [run for run in done.runs if run["rate_rps"] == 16]
    return float(100 * (1 - run["attainment"]))


def cells(table: str, policy: str) -> list[str]:
    own = [line for line in table.splitlines() if line.startswith(f"| `{policy}` |")]
    line = own[0]  # tails come after misses
    return [cell.strip() for cell in line.split("|")[2:-1]]


def invoke(path: Path, *arguments: str) -> str:
    found = CliRunner().invoke(
        lab_app, ["misses", str(path), *arguments, "--requests", "60", "--jobs", "1"]
    )
    return found.stdout if found.exit_code == 0 else found.output + found.stderr


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(suite_text(num_requests=999, variants=[VARIANT]))
    return path


def test_the_table_has_what_the_same_runs_have_in_a_suite(path: Path) -> None:
    own = "round_robin", "B3_informed", "founding, one pod"
    policies = [word for name in ("founding", *own) for word in ("--policy", name)]
    table = invoke(path, "z@16", *policies, "--seeds", "2")
    first = [direct(tiny(), "founding", seed) for seed in (1, 2)]
    on_one_pod = tiny(fleet={"num_pods": 1, "max_loras": 4})

    assert cells(table, "founding") == [f"{sum(first) / 2:.2f}"]
    for name, suite, policy in (
        (own[0], tiny(), "round_robin"),
        (own[1], tiny(), "B3_informed"),
        (own[2], on_one_pod, "founding"),
    ):
        misses = [direct(suite, policy, seed) for seed in (1, 2)]
        less = [a - b for a, b in zip(misses, first, strict=True)]
        error = abs(less[0] - less[1]) / 2
        assert cells(table, name) == [f"{sum(misses) / 2:.2f} ({sum(less) / 2:+.2f} ± {error:.2f})"]


def test_fleet_and_profile_change_every_policy_s_runs(path: Path) -> None:
    asked = ["--policy", "round_robin", "--policy", "founding, one pod", "--seeds", "1"]
    table = invoke(path, "z@16", *asked, "--fleet", "num_pods=3", "--profile", "disk_load_s=0.4")
    dearer = {"scenarios": [{**tiny_scenario(), "profile": {"disk_load_s": 0.4}}]}
    three, one = (
        direct(tiny(fleet={"num_pods": pods, "max_loras": 4}, **dearer), policy, 1)
        for pods, policy in ((3, "round_robin"), (1, "founding"))
    )

    assert cells(table, "round_robin") == [f"{three:.2f}"]
    assert cells(table, "founding, one pod") == [f"{one:.2f} ({one - three:+.2f})"]


def tiny_scenario() -> dict[str, object]:
    return {"name": "z", "workload": {"num_adapters": 12, "output_tokens": 20}}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["y@16"], "y@16: not SCENARIO@RATE; scenarios: z"),
        (["z"], "z: not SCENARIO@RATE"),
        (["z@fast"], "fast is no rate"),
        (["z@0"], "scenario z"),
        (["z@16", "--policy", "nonsense"], "unknown policies: nonsense"),
        (["z@16", "--policy", "least_harm?nonsense=1"], "nonsense"),
        (["z@16", "--policy", "B4_stale_long"], "could not convert"),
        (["z@16", "--fleet", "nonsense=1"], "nonsense"),
        (["z@16", "--profile", "nonsense=1"], "nonsense"),
        (["z@16", "--fleet", "num_routers"], "num_routers: not key=value"),
    ],
)
def test_what_is_unknown_is_said_in_one_line(
    arguments: list[str], message: str, path: Path
) -> None:
    said = invoke(path, *arguments, "--policy", "founding", "--seeds", "1")

    assert message in " ".join(said.split())
    assert "Traceback" not in said


def test_runs_are_whole_even_where_nothing_is_served_well() -> None:
    suite = tiny(scenarios=[{"name": "z", "profile": {"step_s": 10.0}}], seeds=[1])
    (trial,) = plan_misses(suite, ["z@16"], ["founding"], fleet={}, profile={})
    (done,) = run_trial(trial, make_policy, perf_counter)

    assert done.cut == []
    assert cells(misses_table([done]), "founding") == ["100.00"]


def test_the_error_is_of_the_differences_not_of_the_seeds() -> None:
    results = [
        TrialResult("z", policy, seed, "misses", 16.0, runs=[{"attainment": 1 - missed / 100}])
        for policy, own in (("a", (1.0, 9.0, 20.0)), ("b", (2.0, 10.0, 21.0)))
        for seed, missed in enumerate(own)
    ]

    assert cells(misses_table(results), "b") == ["11.00 (+1.00 ± 0.00)"]


def test_tails_are_means_over_the_seeds() -> None:
    results = [
        TrialResult(
            "z",
            "a",
            seed,
            "misses",
            16.0,
            runs=[{"adapter_ttft_p99_s": 0.2 * seed, "worst_adapter_ttft_p99_s": 1.0 * seed}],
        )
        for seed in (1, 2)
    ]

    assert cells(tails_table(results), "a") == ["0.30 / 1.50"]
