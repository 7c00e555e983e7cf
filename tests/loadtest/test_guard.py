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
from typer.testing import CliRunner, Result

from extproc.commands import guard as guardcommand
from extproc.commands.guard import EXPECTATION
from extproc.commands.loadtest import loadtest_app
from extproc.commands.twins import virtual_run
from extproc.loadtest.compare import Round
from extproc.loadtest.guard import (
    FIGURE_NAMES,
    MIN_TOLERANCE,
    Expectation,
    GuardError,
    Line,
    Ratios,
    Verdict,
    judged,
    lines_of,
    load_expectation,
    ratios_of,
    save_expectation,
    verdict_of,
)
from extproc.loadtest.loads import plan_suite, read_suite
from extproc.loadtest.runs import BlockRun
from tests.loadtest.builders import block, run

PAIR = ("founding", "least_pending")


def line(ratio: float = 0.3, tolerance: float = 1.2, figure: str = "ttft_mean_s") -> Line:
    return Line(rule=PAIR[0], other=PAIR[1], figure=figure, ratio=ratio, tolerance=tolerance)


def expectation(*lines: Line) -> Expectation:
    return Expectation(suite="guard", lines=lines, num_runs=5, machine="m", date="2026-01-01")


@pytest.mark.parametrize(
    ("seen", "verdict"),
    [
        (0.30, Verdict.OK),
        (0.35, Verdict.OK),
        (0.26, Verdict.OK),
        (0.37, Verdict.HIGH),
        (0.24, Verdict.LOW),
        (0.0, Verdict.MISSING),
        (None, Verdict.MISSING),
    ],
)
def test_a_ratio_is_held_against_its_factor_in_both_directions(
    seen: float | None, verdict: Verdict
) -> None:
    assert verdict_of(line(), seen) is verdict


def test_what_was_not_seen_is_missing_and_not_forgotten() -> None:
    told = judged(expectation(line(), line(figure="attainment")), {(PAIR, "ttft_mean_s"): 0.3})

    assert [verdict for _, _, verdict in told] == [Verdict.OK, Verdict.MISSING]


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
    assert [value for value, each in seen if verdict_of(each, value) is not Verdict.OK] == []


def test_one_run_makes_no_expectation() -> None:
    with pytest.raises(GuardError, match="two runs"):
        lines_of([seen_run(1.0)])


def test_a_missing_ratio_makes_no_expectation() -> None:
    with pytest.raises(GuardError, match="founding over least_pending, attainment"):
        lines_of([seen_run(1.0), {(PAIR, "ttft_mean_s"): 0.3, (PAIR, "attainment"): None}])


def test_ratios_are_of_the_first_rule_over_the_others() -> None:
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


def test_an_expectation_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "new" / "expectation.json"
    written = expectation(line())

    save_expectation(written, path)

    assert msgspec.json.encode(load_expectation(path)) == msgspec.json.encode(written)


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "not an expectation"), ('{"format": "x"}', "not an expectation")],
)
def test_something_else_is_no_expectation(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "expectation.json"
    path.write_text(content)

    with pytest.raises(GuardError, match=message):
        load_expectation(path)


def test_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "expectation.json"
    save_expectation(msgspec.structs.replace(expectation(), format="extproc-0"), path)

    with pytest.raises(GuardError, match="extproc-0"):
        load_expectation(path)


def test_without_an_expectation_it_is_said_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(GuardError, match="guard --write"):
        load_expectation(tmp_path / "none.json")


# --- the committed expectation ------------------------------------------------------------------


def test_the_committed_expectation_is_of_the_suite_that_is_run() -> None:
    committed = load_expectation(EXPECTATION)
    rules = read_suite(committed.suite).rules

    assert committed.suite == "guard"
    assert {(line.rule, line.other) for line in committed.lines} == {
        ("founding", "least_pending"),
        ("founding", "round_robin"),
    }
    assert rules[0] == "founding"
    assert {line.figure for line in committed.lines} == set(FIGURE_NAMES)


def virtual_ratios(swapped: str = "founding") -> Ratios:
    """What the laboratory says of the suite, another rule in the place of ours if there is one."""
    suite = read_suite("guard")
    blocks = plan_suite(suite, suite.scenarios)
    rounds: list[Round] = [
        [
            BlockRun(
                rule,
                block,
                virtual_run(
                    suite,
                    suite.scenarios[0],
                    swapped if rule == "founding" else rule,
                    rate_rps=block.rate_rps,
                    seed=block.seed,
                ),
            )
            for rule in suite.rules
        ]
        for block in blocks
    ]
    return ratios_of(rounds, suite.rules)


def test_the_committed_expectation_is_what_the_laboratory_says() -> None:
    told = judged(load_expectation(EXPECTATION), virtual_ratios())

    assert [each for each in told if each[2] is not Verdict.OK] == []


@pytest.mark.parametrize("instead", ["random", "least_pending", "founding?threshold=1"])
def test_the_guard_fails_when_another_rule_is_in_the_place_of_ours(instead: str) -> None:
    told = judged(load_expectation(EXPECTATION), virtual_ratios(instead))

    wrong = {line.figure for line, _, verdict in told if verdict is not Verdict.OK}
    assert {"ttft_mean_s", "loads_per_1000"} <= wrong


SEEN: Mapping[str, Sequence[float]] = {
    "founding": (1.189, 0.289, 0.197, 1.366, 0.233, 0.191),
    "random": (0.797, 1.649, 0.946, 0.918, 1.325, 0.910),
}
"""What `extproc loadtest guard` saw with real pods, pickers and Envoys, on a machine with eight
others at work; `random` with `--swap founding=random`. In the order of the expectation's lines."""


@pytest.mark.parametrize(
    ("rule", "verdicts"),
    [
        ("founding", [Verdict.OK] * 6),
        ("random", [Verdict.LOW, Verdict.HIGH, Verdict.HIGH] * 2),
    ],
)
def test_the_guard_tells_a_real_run_from_one_with_another_rule(
    rule: str, verdicts: list[Verdict]
) -> None:
    expected = load_expectation(EXPECTATION)
    figures = [((line.rule, line.other), line.figure) for line in expected.lines]
    seen: Ratios = dict(zip(figures, SEEN[rule], strict=True))

    assert [verdict for _, _, verdict in judged(expected, seen)] == verdicts


# --- the command --------------------------------------------------------------------------------


def guarded(
    monkeypatch: pytest.MonkeyPatch, *rounds: Sequence[BlockRun], arguments: Sequence[str] = ()
) -> Result:
    """The command, with these rounds instead of real ones."""
    monkeypatch.setattr(guardcommand, "measured", lambda *_, **__: list(rounds))
    return CliRunner().invoke(loadtest_app, ["guard", *arguments])


def as_expected(delay_s: float = 0.0) -> list[BlockRun]:
    """Rules that are as far apart as the committed expectation says, but for attainment."""
    return [
        run("founding", ttft_s=0.1, num_loads=1),
        run("least_pending", ttft_s=0.31, num_loads=4),
        run("round_robin", ttft_s=0.37, num_loads=4, delay_s=delay_s),
    ]


def test_every_line_is_printed_with_what_was_expected_and_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result = guarded(monkeypatch, as_expected())

    assert result.output.count("founding/") == 6
    assert len(re.findall(r"0\.\d{3} +ok |1\.000 +(?:ok|TOO LOW) ", result.output)) == 6
    assert "from 5 runs" in result.output


def test_a_machine_that_is_too_busy_is_neither_good_nor_bad(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result = guarded(monkeypatch, as_expected(), as_expected(delay_s=0.1))

    assert result.exit_code == 3
    assert "not measured: the machine is too busy" in result.output
    assert "the generator lagged" in result.output


def test_a_fleet_that_died_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    died = BlockRun("founding", block(), trouble="envoy ended with status 1", is_gone=True)

    result = guarded(monkeypatch, [died, *as_expected()[1:]])

    assert result.exit_code == 1
    assert "envoy ended with status 1" in result.output


def test_a_new_expectation_is_met_by_what_made_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "expectation.json"
    at = ["--expectation", str(path)]

    written = guarded(monkeypatch, as_expected(), arguments=["--write", "--runs", "3", *at])
    checked = guarded(monkeypatch, as_expected(), arguments=at)

    assert written.exit_code == checked.exit_code == 0
    assert load_expectation(path).num_runs == 3
    assert "all as expected" in checked.output


def test_an_expectation_that_cannot_be_written_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    at = ["--expectation", str(tmp_path / "file" / "x.json")]

    result = guarded(monkeypatch, as_expected(), arguments=["--write", *at])

    assert result.exit_code == 1
    assert len(result.stderr.splitlines()) == 1
