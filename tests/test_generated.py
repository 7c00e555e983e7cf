"""Generated files are those that their scripts make of the code."""

from __future__ import annotations

import os
import re
import subprocess
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
def test_what_a_script_generates_is_current(script: str) -> None:
    """Otherwise: make docs."""
    command = [sys.executable, str(ROOT / "scripts" / script), "--check"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)

    assert done.returncode == 0, done.stdout + done.stderr
