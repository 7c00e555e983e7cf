"""The figures by which runs are compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from extproc.lab.loadtest.results import RunResult


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of a run.

    Attributes:
        key: Field of `Metrics`.
        head: Its name, with its unit at the terminal.
        factor: From the field's unit to the terminal's.
        needs_pods: Known only for fake pods.
    """

    key: str
    head: str
    factor: float = 1
    needs_pods: bool = False

    def of(self, run: RunResult | None) -> float | None:
        """Return its value in a run; None if it is unknown."""
        if run is None or (self.needs_pods and not run.knows_pods):
            return None
        return float(getattr(run.metrics, self.key))


_ALL = (
    Figure("throughput_rps", "finished/s"),
    Figure("ttft_mean_s", "TTFT mean, ms", 1e3),
    Figure("ttft_p50_s", "TTFT p50, ms", 1e3),
    Figure("ttft_p99_s", "TTFT p99, ms", 1e3),
    Figure("attainment", "served well, %", 1e2),
    Figure("slora_satisfaction", "satisfaction, %", 1e2),
    Figure("loads_per_1000", "adapter loads/1,000", needs_pods=True),
)
FIGURES: Mapping[str, Figure] = {figure.key: figure for figure in _ALL}
