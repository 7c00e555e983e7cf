"""docs/metrics.md is what a router says of its metrics."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "metrics.md"


def test_the_page_is_current() -> None:
    """Otherwise: make docs."""
    command = [sys.executable, str(ROOT / "scripts" / "gen-metrics-docs"), "--check"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    assert subprocess.run(command, check=False, env=environment).returncode == 0


def test_each_metric_has_a_kind_and_whole_sentences() -> None:
    rows = re.findall(r"^\| `\w+` \| .*? \| (\w+) \| (.*) \|$", PAGE.read_text("utf-8"), flags=re.M)

    assert len(rows) > 100
    assert {kind for kind, _ in rows} == {"counter", "gauge", "histogram", "info"}
    assert [text for _, text in rows if not re.match(r"[A-Z1`].*[.]$", text)] == []
