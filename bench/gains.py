"""Draws docs/gains.svg: the requests a second that four pods serve well, by who chooses the pod.

    python -m bench.gains

It draws a kept result of the laboratory, which this command makes again in two minutes, with the
README's `Warm` in `warm.py`:

    PYTHONPATH=. extproc lab run quick --policy warm:Warm --only least_harm --only founding \
        --only warm:Warm --only least_request_p2c --only round_robin --only B3_informed
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from extproc.lab.trials.charts import COLOURS, Bar, bar_chart
from extproc.lab.workload.intervals import Interval

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "loadtest" / "results" / "quick-2026-11-27.json"
PLOT = ROOT / "docs" / "gains.svg"
BARS = {
    "least_harm": ("extproc: least_harm (default)", COLOURS[0]),
    "founding": ("extproc: founding", COLOURS[0]),
    "warm:Warm": ("extproc: your policy, ten lines", COLOURS[0]),
    "least_request_p2c": ("least request of two", COLOURS[9]),
    "round_robin": ("round robin", COLOURS[9]),
}
BEST = "B3_informed"
_ON_WHITE = '<svg style="background:#fff" '
"""Pages that show a plot may be dark."""


def capacities(result: dict[str, Any]) -> dict[str, Interval]:
    """Return requests a second served well, by policy, with 95 % intervals."""
    (summary,) = result["summary"].values()
    return {row["policy"]: Interval(**row["capacity_rps"]) for row in summary["rows"]}


def draw(result: dict[str, Any]) -> str:
    """Return the plot as SVG."""
    found = capacities(result)
    bars: list[Bar] = [
        (name, found[policy].mean, found[policy].low, found[policy].high, colour)
        for policy, (name, colour) in BARS.items()
    ]
    mark = (found[BEST].mean, "omniscient greedy")
    chart = bar_chart(bars, "requests per second served well (mean and 95 % interval)", mark=mark)
    return chart.replace("<svg ", _ON_WHITE, 1) + "\n"


if __name__ == "__main__":
    PLOT.write_text(draw(json.loads(RESULT.read_text(encoding="utf-8"))), encoding="utf-8")
