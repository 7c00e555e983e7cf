"""The figures by which runs are compared: at the terminal, on pages, in predictions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean

from extproc.loadtest.results import RunResult


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of a run.

    Attributes:
        key: Field of `Metrics`.
        name: On pages, with its unit.
        form: Format of values on pages.
        head: At the terminal, with its unit there.
        factor: From the field's unit to the terminal's.
        needs_pods: Known only for fake pods.
    """

    key: str
    name: str
    form: str
    head: str
    factor: float = 1
    needs_pods: bool = False

    def of(self, run: RunResult | None) -> float | None:
        """Return its value in a run; None if it is unknown."""
        if run is None or (self.needs_pods and not run.knows_pods):
            return None
        return float(getattr(run.metrics, self.key))

    def shown(self, runs: Iterable[RunResult], target: str) -> tuple[str, str]:
        """Return a target's means over real runs and over their virtual twins, as text."""
        own = [run for run in runs if run.target == target]
        seeds = {run.seed for run in own if run.kind == "real"}
        real, virtual = (
            [self.of(run) for run in own if run.kind == kind and run.seed in seeds]
            for kind in ("real", "virtual")
        )
        return self._mean(real), self._mean(virtual)

    def _mean(self, values: Iterable[float | None]) -> str:
        known = [value for value in values if value is not None]
        return self.form.format(fmean(known)) if known else ""


_ALL = (
    Figure("throughput_rps", "finished per second", "{:.2f}", "finished/s"),
    Figure("ttft_mean_s", "first token, mean (s)", "{:.2f}", "TTFT mean, ms", 1e3),
    Figure("ttft_p50_s", "first token, median (s)", "{:.2f}", "TTFT p50, ms", 1e3),
    Figure("ttft_p99_s", "first token, 99th percentile (s)", "{:.2f}", "TTFT p99, ms", 1e3),
    Figure("attainment", "SLO attainment", "{:.1%}", "served well, %", 1e2),
    Figure("slora_satisfaction", "S-LoRA satisfaction", "{:.3f}", "satisfaction, %", 1e2),
    Figure(
        *("loads_per_1000", "adapter loads per 1,000", "{:.0f}", "adapter loads/1,000"),
        needs_pods=True,
    ),
)
FIGURES: Mapping[str, Figure] = {figure.key: figure for figure in _ALL}
