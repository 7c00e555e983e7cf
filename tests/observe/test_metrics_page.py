"""docs/metrics.md is what a router says of its metrics."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "metrics.md"


def test_each_metric_has_a_kind_and_whole_sentences() -> None:
    rows = re.findall(r"^\| `\w+` \| .*? \| (\w+) \| (.*) \|$", PAGE.read_text("utf-8"), flags=re.M)

    assert len(rows) > 100
    assert {kind for kind, _ in rows} == {"counter", "gauge", "histogram", "info"}
    assert [text for _, text in rows if not re.match(r"[A-Z1`].*[.]$", text)] == []
