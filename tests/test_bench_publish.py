"""A load test for documentation: Markdown tables and SVG files."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

from bench import gains
from bench.publish import markdown, merged, save_plots, trimmed
from extproc.commands.twins import twins_of
from extproc.loadtest.figures import FIGURES
from extproc.loadtest.results import LoadResult, ResultError, load
from tests.loadtest.loads import result, run, suite

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def made() -> LoadResult:
    real = [
        run(target, rate_rps=rate_rps)
        for rate_rps in (20.0, 40.0)
        for target in ("policy:founding", "url:here")
    ]
    return result(*real, *twins_of(suite(), real), suite=suite())


def test_a_table_has_real_figures_with_virtual_ones_in_brackets(made: LoadResult) -> None:
    tables = markdown(made).split("\n\n")

    assert len(tables) == 2
    lines = [line.strip("|").split("|") for line in tables[0].strip().splitlines()]
    assert [cell.strip() for cell in lines[0]] == [
        "zipf, 20/s",
        "founding",
        "url:here",
        "order as predicted",
    ]
    assert len(lines) == 2 + len(FIGURES)
    assert len({len(line) for line in lines}) == 1
    measured = made.runs[0].metrics.throughput_rps
    assert lines[2][1].strip().startswith(f"{measured:.2f} (")
    assert lines[2][2].strip() == f"{measured:.2f}"


def test_plots_are_images_that_stand_alone(made: LoadResult, tmp_path: Path) -> None:
    paths = save_plots(made, tmp_path / "plots")

    assert [path.name for path in paths] == [
        "zipf-wait.svg",
        "zipf-served.svg",
        "zipf-satisfaction.svg",
    ]
    for path in paths:
        root = ElementTree.fromstring(path.read_text(encoding="utf-8"))
        assert root.get("style") == "background:#fff"
        assert root.find(".//{http://www.w3.org/2000/svg}path") is not None


def test_parts_of_one_suite_are_one_result(made: LoadResult) -> None:
    later = msgspec.structs.replace(
        made, date="2026-11-22T00:00:00+00:00", note="late", runs=[run("policy:b")]
    )

    whole = merged([later, made])

    assert whole.date == made.date
    assert len(whole.runs) == 1 + len(made.runs)
    assert whole.note == "late"
    with pytest.raises(ResultError, match="another suite or machine"):
        merged([made, msgspec.structs.replace(made, machine="another")])
    with pytest.raises(ResultError, match="no results"):
        merged([])


def test_of_a_run_that_was_made_again_the_last_one_counts() -> None:
    first, again = result(run("policy:a")), result(run("policy:a", ttft_s=0.2))

    assert list(merged([first, again]).runs) == list(again.runs)


def test_trimming_keeps_the_ends_and_every_figure() -> None:
    whole = result(run("policy:founding"), msgspec.structs.replace(run("policy:x"), kind="virtual"))

    small = trimmed(whole, num_groups=2)

    real, virtual = small.runs
    names = list(whole.runs[0].summary.by_adapter)
    assert len(names) > 4
    assert list(real.summary.by_adapter) == [*names[:2], *names[-2:]]
    assert list(real.summary.by_tenant) == ["tenant-0", "tenant-1", "tenant-2"]
    assert virtual.summary.by_adapter == {}
    assert [each.metrics for each in small.runs] == [each.metrics for each in whole.runs]
    assert small.is_trimmed
    assert virtual.summary.ttft_quantiles_s == whole.runs[1].summary.ttft_quantiles_s != ()
    assert not whole.is_trimmed


def test_of_seeds_that_were_not_run_for_real_no_distribution_is_kept() -> None:
    other = msgspec.structs.replace(run("policy:founding", seed=2), kind="virtual")

    small = trimmed(result(run("policy:founding"), other))

    assert [bool(each.summary.ttft_quantiles_s) for each in small.runs] == [True, False]
    assert small.runs[1].metrics == other.metrics


# --- the README's plot -----------------------------------------------------------------------


def test_the_table_of_the_readmes_plot_is_what_was_measured() -> None:
    page = (ROOT / "docs" / "loadtest-results.md").read_text(encoding="utf-8")
    table = page.split("## The README's plot")[1].split("\n\n")[2]
    cells = [row.split("|")[2].strip() for row in table.splitlines()[2:]]

    found = gains.waits(load(gains.RESULT)).values()
    assert cells == [f"{each.mean:.1f} ({each.low:.1f} to {each.high:.1f})" for each in found]


def test_the_readmes_plot_has_a_bar_for_each_target() -> None:
    drawn = gains.draw(load(gains.RESULT))

    assert all(f">{name}<" in drawn for name in (*gains.OTHERS.values(), *gains.LLMD))
