"""The README's plot."""

from __future__ import annotations

from pathlib import Path

from bench import gains
from extproc.lab.loadtest.results import load

ROOT = Path(__file__).parents[1]


def test_the_table_of_the_readmes_plot_is_what_was_measured() -> None:
    page = (ROOT / "docs" / "loadtest-results.md").read_text(encoding="utf-8")
    table = page.split("## The README's plot")[1].split("\n\n")[2]
    cells = [row.split("|")[2].strip() for row in table.splitlines()[2:]]

    found = gains.waits(load(gains.RESULT)).values()
    assert cells == [f"{each.mean:.1f} ({each.low:.1f} to {each.high:.1f})" for each in found]


def test_the_readmes_plot_has_a_bar_for_each_target() -> None:
    drawn = gains.draw(load(gains.RESULT))

    assert all(f">{name}<" in drawn for name in (*gains.OTHERS.values(), *gains.LLMD))
