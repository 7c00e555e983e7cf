"""docs/commands.md is what the command line says of itself."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "commands.md"


def test_it_lists_commands_of_commands_too() -> None:
    text = PAGE.read_text(encoding="utf-8")

    assert "### extproc serve\n" in text
    assert "### extproc lab loadtest compare\n" in text
    assert "| `--fake-pods` | `INTEGER` |" in text
