"""The figures that runs are compared by: at the terminal, on pages, in predictions."""

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
        name: For pages, with its unit.
        form: How a page prints a value.
        head: For the terminal, with its unit there.
        factor: From the field's unit to that one.
        needs_pods: Known only of pods that can be asked.
    """

    key: str
    name: str
    form: str
    head: str
    factor: float = 1
    needs_pods: bool = False

    def of(self, run: RunResult | None) -> float | None:
        """Its value in a run; None if it is not known."""
        if run is None or (self.needs_pods and not run.knows_pods):
            return None
        return float(getattr(run.metrics, self.key))

    def mean(self, runs: Iterable[RunResult]) -> float | None:
        """Mean over runs; None if there is none, or it is not known."""
        values = [value for run in runs if (value := self.of(run)) is not None]
        return fmean(values) if values else None

    def shown(self, runs: Iterable[RunResult], target: str) -> tuple[str, str]:
        """A target's mean over real runs, and over virtual ones with their seeds, for people."""
        own = [run for run in runs if run.target == target]
        seeds = {run.seed for run in own if run.kind == "real"}
        real, virtual = (
            self.mean(run for run in own if run.kind == kind and run.seed in seeds)
            for kind in ("real", "virtual")
        )
        return self._text(real), self._text(virtual)

    def _text(self, value: float | None) -> str:
        return "" if value is None else self.form.format(value)


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
