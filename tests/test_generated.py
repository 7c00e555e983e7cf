"""Generated files are those that their scripts make of the code."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
(RECIPE,) = re.findall(
    r"^docs:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.M
)
SCRIPTS = re.findall(r"scripts/([\w-]+)$", RECIPE, flags=re.M)


def test_there_are_scripts() -> None:
    assert {"gen-commands-docs", "gen-config-docs", "gen-release-notes"} < set(SCRIPTS)


@pytest.mark.parametrize("script", SCRIPTS)
def test_what_a_script_generates_is_current(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise: make docs."""
    monkeypatch.setattr(sys, "argv", [script, "--check"])
    monkeypatch.syspath_prepend(ROOT / "scripts")
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(ROOT / "scripts" / script), run_name="__main__")

    assert not caught.value.code, capsys.readouterr()
