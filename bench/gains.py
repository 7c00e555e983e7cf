"""Draws docs/gains.svg: how long requests wait for their first token, by who chooses the pod.

    python -m bench.gains

One part was measured by `extproc lab loadtest compare standard` on 2026-11-23 (the result is kept);
the other, with llm-d-router 0.10 as a process in place of the router, on 2026-11-22 by the same
command on the same machine. Each is a ratio to the founding policy in the same run, by block.
"""

from __future__ import annotations

from pathlib import Path

from extproc.lab.loadtest.results import LoadResult, load
from extproc.lab.trials.charts import COLOURS, Bar, bar_chart
from extproc.lab.workload.intervals import Interval, paired_ratio

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "loadtest" / "results" / "standard-2026-11-23.json"
PLOT = ROOT / "docs" / "gains.svg"
FOUNDING = "policy:founding"
OTHERS = {
    "policy:round_robin": "round robin",
    "envoy:least_request": "Envoy's least request",
}
# The founding policy's mean TTFT over llm-d's: geometric mean of four blocks, 95 % interval.
LLMD = {
    "llm-d, weights for adapters": Interval(0.43, 0.31, 0.61),
    "llm-d, adapters and its own counts": Interval(0.38, 0.30, 0.49),
    "llm-d, as its chart sets it": Interval(0.24, 0.20, 0.28),
}
_ON_WHITE = '<svg style="background:#fff" '
"""Pages that show a plot may be dark."""


def waits(result: LoadResult) -> dict[str, Interval]:
    """Return mean TTFTs as multiples of the founding policy's, by name."""
    mine = _ttft_s(result, FOUNDING)
    found = {
        name: paired_ratio([theirs[block] for block in mine], list(mine.values()))
        for target, name in OTHERS.items()
        for theirs in [_ttft_s(result, target)]
    }
    return found | {name: _inverse(ratio) for name, ratio in LLMD.items()}


def _ttft_s(result: LoadResult, target: str) -> dict[tuple[float, int], float]:
    runs = (run for run in result.of_kind("real") if run.target == target)
    return {(run.rate_rps, run.seed): run.metrics.ttft_mean_s for run in runs}


def _inverse(ratio: Interval) -> Interval:
    assert ratio.low is not None
    assert ratio.high is not None
    return Interval(1 / ratio.mean, 1 / ratio.high, 1 / ratio.low)


def draw(result: LoadResult) -> str:
    """Return the plot as SVG."""
    bars: list[Bar] = [("extproc, founding policy", 1.0, None, None, COLOURS[0])]
    for place, (name, wait) in enumerate(waits(result).items()):
        colour = COLOURS[9] if place < len(OTHERS) else COLOURS[1]
        bars.append((name, wait.mean, wait.low, wait.high, colour))
    chart = bar_chart(bars, "mean time to first token, in multiples of the founding policy's")
    return chart.replace("<svg ", _ON_WHITE, 1) + "\n"


if __name__ == "__main__":
    PLOT.write_text(draw(load(RESULT)), encoding="utf-8")
