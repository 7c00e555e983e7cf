"""The README's plot, and the figures beside it."""

from __future__ import annotations

import json
from pathlib import Path

from bench import gains

ROOT = Path(__file__).parents[1]
RESULT = json.loads(gains.RESULT.read_text(encoding="utf-8"))
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_readme_says_what_the_kept_result_holds() -> None:
    found = gains.capacities(RESULT)
    (caption,) = (line for line in README.splitlines() if "](docs/gains.svg)" in line)

    assert [f"{found[policy].mean:.1f}" in caption for policy in gains.BARS] == [True] * 5
    assert f"`least_harm`, carries {found['least_harm'].mean:.1f} requests a second" in README


def test_the_plot_has_a_bar_for_each_policy() -> None:
    drawn = gains.draw(RESULT)

    assert all(f">{name}<" in drawn for name, _ in gains.BARS.values())


def test_the_result_is_of_the_policy_that_the_readme_shows() -> None:
    """The command that made it names the class."""
    assert "class Warm:" in README
    assert "warm:Warm" in gains.capacities(RESULT)


def test_the_table_of_the_results_page_is_what_the_kept_result_holds() -> None:
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    table = page.split("## The README's plot")[1].split("\n\n")[2]
    cells = [row.split("|")[2].strip() for row in table.splitlines()[2:]]

    found = gains.capacities(RESULT)
    measured = [found[policy] for policy in (*gains.BARS, gains.BEST)]
    assert cells == [f"{each.mean:.1f} ({each.low:.1f} to {each.high:.1f})" for each in measured]
