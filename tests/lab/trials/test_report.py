"""The report: one page that stands alone, from the JSON of a run."""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from extproc.commands.lab import lab_app, report
from extproc.commands.labrun import run
from extproc.lab.trials.charts import Axis, Series, bar_chart, curve, line_chart
from extproc.lab.trials.report import PageError, curves, near
from extproc.lab.trials.table import capacities
from tests.lab.trials.test_suites import suite_text, sweep

VOID = {"meta", "br"}


def is_away(link: str | None) -> bool:
    """Whether it leads out of the page."""
    return not str(link).startswith(("#", "data:"))


class Checker(HTMLParser):
    """Remembers what is open and every attribute that could fetch something."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [str(v) for k, v in attrs if k.endswith(("src", "href")) and is_away(v)]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [str(v) for k, v in attrs if k.endswith(("src", "href")) and is_away(v)]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a small suite and its report."""
    out = tmp_path_factory.mktemp("lab")
    path = out / "tiny.yaml"
    path.write_text(
        suite_text(
            about="Two <servers> & a gateway.",
            num_requests=20,
            rates_rps=[8],
            sweeps=[{**sweep("workload", "num_adapters", 4), "values": [4, 8]}],
        )
    )
    run(str(path), jobs=1, out=out)
    report(out / "tiny.json")
    return out


def test_the_page_is_well_formed_and_fetches_nothing(folder: Path) -> None:
    page = (folder / "tiny.html").read_text(encoding="utf-8")
    checker = Checker()
    checker.feed(page)

    assert checker.open == []
    assert checker.fetched == []
    assert set(re.findall(r"url\((.)", page)) == {"#"}
    assert set(re.findall(r"https?://[^\"'\s<]+", page)) == {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }


def test_the_page_says_what_is_compared_and_shows_every_plot(folder: Path) -> None:
    page = (folder / "tiny.html").read_text(encoding="utf-8")

    assert "Two &lt;servers&gt; &amp; a gateway." in page
    assert "model, not measured" in page
    for text in (
        "founding",
        "least_pending",
        "all-knowing greedy",
        "perfect pooling",
        "adapter places pooled",
        "worst adapter there",
        "a reference, not a limit",
        "serves the",
    ):
        assert text in page
    # capacity, latency, attainment, loads, two of the sweep
    assert page.count("<svg") == 6
    assert "nan" not in page
    assert "inf" not in re.sub(r"inform\w*", "", page)


def test_the_commands_work_and_fail_in_one_line(tmp_path: Path) -> None:
    runner = CliRunner()
    path = tmp_path / "tiny.yaml"
    path.write_text(suite_text(bounds=[], policies=["least_pending"], seeds=[1], rates_rps=[8]))
    ran = runner.invoke(lab_app, ["run", str(path), "--out", str(tmp_path), "--jobs", "1"])
    made = runner.invoke(lab_app, ["report", "--html", "--out", str(tmp_path)])

    assert ran.exit_code == 0
    assert "| `least_pending` |" in ran.output
    assert "of the worst, s" in ran.output
    assert made.exit_code == 0
    assert (tmp_path / "tiny.html").is_file()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "old.json").write_bytes(msgspec.json.encode({"format": "something"}))
    for arguments, message in (
        (["run", "nonsense"], "no such file"),
        (["run", str(path), "--policy", "no_such:rule"], "no_such"),
        (["report", "--out", str(tmp_path / "empty")], "no results"),
        (["report", "--out", str(tmp_path / "other")], "not a result"),
        (["report", str(tmp_path / "missing.json")], "No such file"),
    ):
        failed = runner.invoke(lab_app, arguments)
        assert failed.exit_code == 1
        assert message in " ".join(failed.stderr.split())


def test_a_chart_is_light_and_takes_its_colours_from_the_page() -> None:
    lines = [
        Series(f"policy {n}", [(rate, rate * n) for rate in range(10)], "#0b6e99")
        for n in range(12)
    ]
    charts = [
        line_chart(lines, Axis("x", 0, 9), Axis("y", 0.1, 99, is_log=True), mark=(5, "here")),
        bar_chart([("a", 2.0, 1.0, 3.0, "#0b6e99"), ("b", 1.0, None, None, "#d9730d")], "label"),
    ]

    for chart in charts:
        assert len(chart) < 40_000
        assert "currentColor" in chart
        assert "#333333" not in chart
    assert "here" in charts[0]
    assert "policy 11" in charts[0]


def test_the_same_chart_is_the_same_bytes() -> None:
    axis = Axis("x", 0, 1)
    charts = {line_chart([Series("a", [(0, 0), (1, 1)], "#0b6e99")], axis, axis) for _ in range(2)}

    assert len(charts) == 1


def test_equal_values_still_make_a_chart() -> None:
    axis = Axis("x", 5, 5)

    assert "here" in line_chart([Series("a", [(5, 5)], "#d9730d")], axis, axis, mark=(5, "here"))
    assert "<svg" in bar_chart([("a", 0.0, None, None, "#d9730d")], "none")


def test_names_in_charts_are_escaped() -> None:
    axis = Axis("<x>", 0, 1)

    assert "<b>" not in line_chart([Series("<b>", [(0, 0)], "#d9730d")], axis, axis)
    assert "&lt;x&gt;" in line_chart([], axis, axis)


def test_a_curve_has_a_band_where_every_point_has_several_seeds() -> None:
    several = curve("a", {2.0: [5.0, 7.0], 1.0: [1.0, 3.0]}, "#d9730d")
    few = curve("a", {1.0: [1.0, 3.0], 2.0: [5.0]}, "#d9730d")

    assert several.points == [(1.0, 2.0), (2.0, 6.0)]
    assert [low < 6 < high for low, high in several.band[1:]] == [True]
    assert few.band == ()


def test_without_its_libraries_a_page_is_one_line(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    with pytest.raises(PageError, match="needs the extra"):
        report(folder / "tiny.json")


def test_runs_at_nearly_the_same_rate_are_one_point_of_a_curve() -> None:
    runs = [{"rate_rps": rate, "ttft_p99_s": rate} for rate in (8, 20.6, 21.4, 40.0)]
    trial = {"policy": "founding", "runs": runs}

    (line,) = curves([trial], "ttft_p99_s", {}, lambda _, run: near(run["rate_rps"], [8]))

    assert [value for _, value in line.points] == pytest.approx([8, 21.0, 40])
    assert [rate for rate, _ in line.points] == pytest.approx([8, 21.0, 40], rel=0.05)


def test_the_table_has_a_line_per_policy_and_a_column_per_scenario(folder: Path) -> None:
    done = CliRunner().invoke(lab_app, ["report", "--out", str(folder)])
    lines = done.stdout.strip().split("\n\n")[-1].splitlines()
    result = msgspec.json.decode((folder / "tiny.json").read_bytes())
    (rows,) = (each["rows"] for each in result["summary"].values())

    assert done.exit_code == 0
    assert lines[0] == "| policy | z | of B3 |"
    assert len(lines) == 2 + len(rows)
    assert {line.count("|") for line in lines} == {4}
    founding = next(row for row in rows if row["policy"] == "founding")
    line = next(line for line in lines if line.startswith("| `founding`"))
    assert f"| {founding['capacity_rps']['mean']:.1f} ± " in line
    assert f"| {founding['over_informed']['mean']:.0%} |" in line
    assert any(line.startswith("| *B0_pooled*") for line in lines)
    parts = [float(line.split("|")[3].rstrip("% ")) for line in lines[2:]]
    assert parts == sorted(parts, reverse=True)


def test_a_policy_that_ran_on_some_scenarios_only_has_empty_cells() -> None:
    def row(policy: str, over: float | None) -> dict[str, Any]:
        capacity = {"mean": 5.0, "low": None, "high": None}
        informed = None if over is None else {"mean": over}
        return {
            "policy": policy,
            "is_bound": False,
            "capacity_rps": capacity,
            "worst_adapter": {"mean": 0.955},
            "over_informed": informed,
        }

    summary = {"a": {"rows": [row("x", 0.5), row("y", 0.9)]}, "b": {"rows": [row("x", 0.5)]}}
    table = capacities({"summary": summary}).splitlines()

    assert table[2:] == [
        "| `y` | 5.0 (96%) |  | 90% |",
        "| `x` | 5.0 (96%) | 5.0 (96%) | 50% |",
    ]
