"""How fast a suite was simulated, and one policy of it alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from extproc.commands.labrun import run
from extproc.lab.trials.suites import PlanError
from extproc.lab.trials.summary import speed

SUITE = """
name: tiny
about: Two servers.
num_requests: 40
seeds: [1]
rates_rps: [8, 16]
fleet: {num_pods: 2, max_loras: 4}
policies: [founding, round_robin]
bounds: [B0_pooled]
scenarios: [{name: z, workload: {num_adapters: 12, output_tokens: 20}}]
sweeps:
  - {name: s, title: s, scenario: z, section: fleet, key: max_loras, values: [2, 4],
     rate_rps: 8, policies: [founding]}
"""


@pytest.fixture
def suite(tmp_path: Path) -> str:
    path = tmp_path / "tiny.yaml"
    path.write_text(SUITE)
    return str(path)


def test_one_policy_alone_is_run_without_bounds_and_sweeps(suite: str, tmp_path: Path) -> None:
    result = run(suite, only=["least_harm"], jobs=1, out=tmp_path)

    assert {(trial["policy"], trial["sweep"]) for trial in result["trials"]} == {("least_harm", "")}


def test_an_unknown_policy_is_refused(suite: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="unknown policies: fastest"):
        run(suite, only=["fastest"], jobs=1, out=tmp_path)


def test_the_speed_counts_every_request_of_every_run_and_is_no_part_of_the_results(
    suite: str, tmp_path: Path
) -> None:
    result = run(suite, only=["founding"], jobs=1, out=tmp_path)

    (trial,), (timing,) = result["trials"], result["timing"]
    assert timing["num_simulated"] >= 40 * len(trial["runs"])
    assert timing["cpu_s"] > 0
    assert {"num_simulated", "cpu_s"}.isdisjoint(trial)


def test_the_speed_is_said_in_one_line() -> None:
    timing = [{"num_simulated": 3000, "cpu_s": 2.0}, {"num_simulated": 1000, "cpu_s": 0.5}]

    assert speed(timing) == "4,000 requests simulated, 1,600 per CPU second"
    assert speed([{}]) == "0 requests simulated, 0 per CPU second"
