"""A chart of first tokens over the time of a test: locust's own are of complete requests alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median

from extproc.lab.trials.charts import COLOURS, GREYS, Axis, Series, line_chart
from extproc.lab.workload.exchange import RequestRecord

NUM_SLICES = 50
"""Parts of the time, each with a median."""


def chart(records: Sequence[RequestRecord]) -> str:
    """Return an SVG with a point for each first token, by the time when its request was sent."""
    points = [(each.sent_s, 1e3 * each.ttft_s) for each in records if each.ttft_s is not None]
    end_s = max((at_s for at_s, _ in points), default=0.0) or 1.0
    parts: dict[int, list[float]] = defaultdict(list)
    for at_s, first_ms in points:
        parts[int(at_s / end_s * NUM_SLICES)].append(first_ms)
    middle = [((at + 0.5) * end_s / NUM_SLICES, median(each)) for at, each in sorted(parts.items())]
    most_ms = max((first_ms for _, first_ms in points), default=1.0)
    return line_chart(
        [
            Series("a request", points, GREYS["B0"], "o"),
            Series("median", middle, COLOURS[0], "-"),
        ],
        Axis("seconds since the begin", 0.0, end_s),
        Axis("ms to the first token", 0.0, 1.05 * most_ms),
    )
