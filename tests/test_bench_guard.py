"""The regression guard: what it expects, and that it can fail."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import log
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import guard
from bench.guard import (
    EXPECTATION,
    FIGURE_NAMES,
    MIN_TOLERANCE,
    OK,
    Expectation,
    Line,
    Ratios,
    lines_of,
    ratios_of,
    swapped,
)
from extproc.lab.loadtest.compare import Round
from extproc.lab.loadtest.loads import plan_suite
from extproc.lab.loadtest.runs import BlockRun, virtual_run
from extproc.lab.loadtest.targets import parse_targets
from extproc.lab.trials.suites import read_suite
from tests.lab.loadtest.builders import TINY, block, run

PAIR = ("founding", "least_pending")


def line(ratio: float = 0.3, tolerance: float = 1.2, figure: str = "ttft_mean_s") -> Line:
    return Line(policy=PAIR[0], other=PAIR[1], figure=figure, ratio=ratio, tolerance=tolerance)


def expectation(*lines: Line) -> Expectation:
    return Expectation(suite="guard", lines=lines, num_runs=5, machine="m", date="2026-01-01")


@pytest.mark.parametrize(
    ("seen", "verdict"),
    [
        (0.30, OK),
        (0.35, OK),
        (0.26, OK),
        (0.37, "TOO HIGH"),
        (0.24, "TOO LOW"),
        (0.0, "MISSING"),
        (None, "MISSING"),
    ],
)
def test_a_ratio_is_held_against_its_factor_in_both_directions(
    seen: float | None, verdict: str
) -> None:
    assert line().verdict(seen) == verdict


def test_what_was_not_seen_is_missing_and_not_forgotten() -> None:
    told = expectation(line(), line(figure="attainment")).verdicts({(PAIR, "ttft_mean_s"): 0.3})

    assert [verdict for _, _, verdict in told] == [OK, "MISSING"]


def seen_run(factor: float) -> Ratios:
    return {(PAIR, "ttft_mean_s"): 0.3 * factor, (PAIR, "attainment"): 1.3}


def test_an_expectation_is_the_geometric_mean_and_allows_what_runs_differed_by() -> None:
    ttft, attainment = lines_of([seen_run(0.8), seen_run(1.0), seen_run(1.25)])

    assert ttft.ratio == pytest.approx(0.3, abs=1e-4)
    assert ttft.tolerance > 1.25**2
    assert (attainment.ratio, attainment.tolerance) == (1.3, MIN_TOLERANCE)


@given(st.lists(st.floats(0.01, 100), min_size=2, max_size=8))
def test_every_run_that_made_an_expectation_meets_it(values: list[float]) -> None:
    runs: list[Ratios] = [{(PAIR, "ttft_mean_s"): value} for value in values]

    (made,) = lines_of(runs)

    # Five standard deviations of up to eight values hold them all: none is further from their
    # mean than (n - 1) / sqrt(n) of those.
    seen = [(value, made) for value in values if abs(log(value / made.ratio)) > 1e-3]
    assert [value for value, each in seen if each.verdict(value) != OK] == []


def test_a_missing_ratio_makes_no_expectation() -> None:
    with pytest.raises(ValueError, match="founding over least_pending, attainment"):
        lines_of([seen_run(1.0), {(PAIR, "ttft_mean_s"): 0.3, (PAIR, "attainment"): None}])


def test_ratios_are_of_the_first_policy_over_the_others() -> None:
    rounds: list[Round] = [
        [
            run("founding", ttft_s=0.1, num_loads=1),
            run("least_pending", ttft_s=0.2, num_loads=4),
            run("round_robin", ttft_s=0.4, num_loads=2),
        ]
    ]

    seen = ratios_of(rounds, ["founding", "least_pending", "round_robin"])

    assert seen[("founding", "least_pending"), "ttft_mean_s"] == pytest.approx(0.5)
    assert seen[("founding", "round_robin"), "ttft_mean_s"] == pytest.approx(0.25)
    assert seen[("founding", "least_pending"), "loads_per_1000"] == pytest.approx(0.25)
    assert len(seen) == 2 * len(FIGURE_NAMES)


def test_a_policy_can_be_measured_under_the_name_of_another() -> None:
    specs = parse_targets(["policy:founding", "policy:random"])

    assert swapped(specs, "") == specs
    first, second = swapped(specs, "founding=round_robin")
    assert (first.label, first.name, second) == ("founding", "round_robin", specs[1])


# --- the committed expectation ------------------------------------------------------------------


def committed_expectation(path: Path = EXPECTATION) -> Expectation:
    return msgspec.json.decode(path.read_bytes(), type=Expectation)


def test_the_committed_expectation_is_of_the_suite_that_is_run() -> None:
    committed = committed_expectation()
    policies = read_suite(committed.suite).policies

    assert committed.suite == "guard"
    assert {(line.policy, line.other) for line in committed.lines} == {
        ("founding", "least_pending"),
        ("founding", "round_robin"),
    }
    assert policies[0] == "founding"
    assert {line.figure for line in committed.lines} == set(FIGURE_NAMES)


def virtual_ratios(swapped: str = "founding") -> Ratios:
    """The laboratory's ratios for the suite, with another policy in place of ours if asked for."""
    suite = read_suite("guard")
    blocks = plan_suite(suite, suite.scenarios)
    rounds: list[Round] = [
        [
            BlockRun(
                policy,
                block,
                virtual_run(
                    suite,
                    suite.scenarios[0],
                    swapped if policy == "founding" else policy,
                    rate_rps=block.rate_rps,
                    seed=block.seed,
                ),
            )
            for policy in suite.policies
        ]
        for block in blocks
    ]
    return ratios_of(rounds, suite.policies)


def test_the_committed_expectation_is_what_the_laboratory_says() -> None:
    told = committed_expectation().verdicts(virtual_ratios())

    assert [each for each in told if each[2] != OK] == []


@pytest.mark.parametrize("instead", ["random", "least_pending", "founding?threshold=1"])
def test_the_guard_fails_when_another_policy_is_in_the_place_of_ours(instead: str) -> None:
    told = committed_expectation().verdicts(virtual_ratios(instead))

    wrong = {line.figure for line, _, verdict in told if verdict != OK}
    assert {"ttft_mean_s", "loads_per_1000"} <= wrong


SEEN: Mapping[str, Sequence[float]] = {
    "founding": (1.189, 0.289, 0.197, 1.366, 0.233, 0.191),
    "random": (0.797, 1.649, 0.946, 0.918, 1.325, 0.910),
}
"""What the guard saw with real pods, routers and Envoys, on a machine with eight
others at work; `random` with `--swap founding=random`. In the order of the expectation's lines."""


@pytest.mark.parametrize(
    ("policy", "verdicts"),
    [
        ("founding", [OK] * 6),
        ("random", ["TOO LOW", "TOO HIGH", "TOO HIGH"] * 2),
    ],
)
def test_the_guard_tells_a_real_run_from_one_with_another_policy(
    policy: str, verdicts: list[str]
) -> None:
    expected = committed_expectation()
    figures = [((line.policy, line.other), line.figure) for line in expected.lines]
    seen: Ratios = dict(zip(figures, SEEN[policy], strict=True))

    assert [verdict for _, _, verdict in expected.verdicts(seen)] == verdicts


# --- the command --------------------------------------------------------------------------------


def guarded(
    monkeypatch: pytest.MonkeyPatch,
    *rounds: Sequence[BlockRun],
    arguments: Sequence[str] = (),
    path: Path = EXPECTATION,
) -> int:
    """The exit status with these rounds instead of real ones."""
    monkeypatch.setattr(guard, "measured", lambda *_, **__: list(rounds))
    return guard.main(arguments, path=path)


def as_expected(delay_s: float = 0.0) -> list[BlockRun]:
    """Policies that are as far apart as the committed expectation says, but for attainment."""
    return [
        run("founding", ttft_s=0.1, num_loads=1),
        run("least_pending", ttft_s=0.31, num_loads=4),
        run("round_robin", ttft_s=0.37, num_loads=4, delay_s=delay_s),
    ]


def test_every_line_is_printed_with_the_expected_and_the_seen_ratio(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    guarded(monkeypatch, as_expected())

    output = capsys.readouterr().out
    assert output.count("founding/") == 6
    assert len(re.findall(r"0\.\d{3} +ok |1\.000 +(?:ok|TOO LOW) ", output)) == 6
    assert "from 5 runs" in output


def test_a_machine_that_is_too_busy_is_neither_good_nor_bad(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status = guarded(monkeypatch, as_expected(), as_expected(delay_s=0.1))

    output = capsys.readouterr().out
    assert status == 3
    assert "not measured: the machine is too busy" in output
    assert "the generator lagged" in output


def test_a_fleet_that_died_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    died = BlockRun("founding", block(), trouble="envoy ended with status 1", is_gone=True)

    assert guarded(monkeypatch, [died, *as_expected()[1:]]) == 1
    assert "envoy ended with status 1" in capsys.readouterr().out


def test_a_new_expectation_is_met_by_the_runs_that_made_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "expectation.json"

    assert guarded(monkeypatch, as_expected(), arguments=["--write", "--runs=3"], path=path) == 0
    assert guarded(monkeypatch, as_expected(), path=path) == 0
    assert committed_expectation(path).num_runs == 3


@pytest.mark.e2e
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("ratio", "status"), [(1.0, 0), (1e9, 1)])
def test_the_guard_tells_a_ratio_that_is_expected_from_one_that_is_not(
    ratio: float, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    suite, path = tmp_path / "tiny.yaml", tmp_path / "expectation.json"
    suite.write_text(TINY, encoding="utf-8")
    expected = Line(
        policy="founding", other="round_robin", figure="ttft_mean_s", ratio=ratio, tolerance=1000
    )
    path.write_bytes(msgspec.json.encode(expectation(expected)))

    found = guard.main([], name=str(suite), path=path)
    output = capsys.readouterr().out
    if found == 3:
        pytest.skip("the machine is too busy")

    assert found == status, output
    assert ("TOO LOW" in output) is bool(status)
