"""How far a policy is from its aim."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from extproc.commands.lab import lab_app
from extproc.sim.trials.aim import aim_tables
from extproc.sim.trials.summary import FORMAT

VARIANTS = [
    {"label": "least_harm, one router", "policy": "least_harm"},
    {"label": "founding, one router", "policy": "founding"},
]
CAPACITIES: dict[str, dict[str, list[float]]] = {
    "zipf": {
        "B3_informed": [100, 100, 100],
        "founding": [50, 40, 60],
        "least_harm": [90, 90, 90],
        "least_harm, one router": [95, 95, 95],
        "founding, one router": [99, 99, 99],
        "lmetric": [92, 92],
        "random": [10, 10, 10],
    },
    "arena": {
        "B3_informed": [10, 10, 10],
        "founding": [5, 5, 5],
        "least_harm": [8, 8, 8],
        "lmetric": [8.0, 8.2, 7.8],
        "random": [1, 20, 3],
    },
    "small": {"B3_informed": [10], "founding": [5], "least_harm": [9], "B1_pooled_slots": [12]},
}


def result(capacities: dict[str, dict[str, list[float]]] = CAPACITIES) -> dict[str, Any]:
    trials = [
        {"scenario": scenario, "policy": policy, "seed": seed, "sweep": "", "capacity_rps": rps}
        for scenario, own in capacities.items()
        for policy, values in own.items()
        for seed, rps in enumerate(values)
    ]
    swept = {**trials[0], "sweep": "loads", "capacity_rps": 0.0}
    return {"format": FORMAT, "suite": {"variants": VARIANTS}, "trials": [*trials, swept]}


def tables() -> list[list[list[str]]]:
    """The cells of each table's lines, without the rule."""
    texts = aim_tables(result(), "least_harm").split("\n\n")
    parts = [[line.strip("| ").split(" | ") for line in text.splitlines()] for text in texts]
    return [[lines[0], *lines[2:]] for lines in parts]


def test_a_policy_and_its_variants_stand_beside_b3_and_founding_in_each_scenario() -> None:
    head, zipf, arena, small = tables()[0]

    assert head[1:] == ["B3", "`founding`", "`least_harm`", "`least_harm, one router`"]
    assert zipf == [
        "zipf",
        "100.0",
        "50.0",
        "90.0; 0.90 (0.90); 1.82 (1.10)",
        "95.0; 0.95 (0.95); 1.93 (1.16)",
    ]
    assert arena[:4] == ["arena", "10.0", "5.0", "8.0; 0.80 (0.80); 1.60 (1.60)"]
    assert small[3] == "9.0; 0.90; 1.80"  # one seed has no interval


def test_the_median_and_the_worst_scenario_of_every_policy_over_b3() -> None:
    head, *lines = tables()[1]
    rows = {line[0]: line[1:] for line in lines}

    assert head == ["over B3", "median", "worst", "in", "scenarios"]
    assert rows["`least_harm`"] == ["0.90", "0.80", "arena", "3"]
    assert rows["`founding`"] == ["0.50", "0.49", "zipf", "3"]
    assert rows["*B1_pooled_slots*"] == ["1.20", "1.20", "small", "1"]
    assert "*B3_informed*" not in rows
    assert [line[0] for line in lines][:2] == ["*B1_pooled_slots*", "`founding, one router`"]


def test_opponents_that_may_be_better_are_named_with_the_scenario() -> None:
    _, *lines = tables()[2]

    assert (
        lines
        == [
            ["`founding, one router`", "zipf", "0.91 (0.91 to 0.91)"],
            ["`lmetric`", "arena", "1.00 (0.94 to 1.06)"],
            ["`random`", "arena", "2.04 (0.05 to 88.21)"],
            ["`founding`", "small", "1.80"],
        ]
        or lines
    )


@pytest.mark.parametrize("missing", ["least_harm", "founding", "B3_informed"])
def test_a_result_without_what_it_needs_is_refused_in_one_line(
    missing: str, tmp_path: Path
) -> None:
    scenarios = {name: dict(own) for name, own in CAPACITIES.items()}
    del scenarios["arena"][missing]
    path = tmp_path / "result.json"
    path.write_bytes(msgspec.json.encode(result(scenarios)))
    failed = CliRunner().invoke(lab_app, ["table", str(path), "--aim", "least_harm"])

    assert failed.exit_code == 1
    assert f"scenario arena was not run with {missing}" in failed.stderr
