"""A load test's result file: figures, targets, date and machine.

It holds no single requests (`extproc.lab.workload.exchange.save_records` does), so that it is small
enough to be committed. Real runs and their virtual twins are in the same file.
"""

from __future__ import annotations

import json
import os
import platform
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from extproc.lab.loadtest.replay import MAX_MEDIAN_DELAY_S
from extproc.lab.trials.specs import Suite
from extproc.lab.workload.exchange import RequestRecord, as_fleet_result
from extproc.lab.workload.judge import Metrics, Slo, measure, percentile
from extproc.lab.workload.requests import NO_TENANTS, Tenant
from extproc.lab.workload.running import PodTotals

FORMAT = "extproc-loadtest-2"
NUM_DIGITS = 5
"""Significant digits in the file: far more than a measurement has."""

Kind = Literal["real", "virtual"]


class ResultError(ValueError):
    """A result cannot be read or made; the message says why."""


class Percentiles(msgspec.Struct, frozen=True):
    """A distribution's middle and its end; 0 without values."""

    p50: float = 0.0
    p99: float = 0.0

    @classmethod
    def of(cls, values: Iterable[float]) -> Percentiles:
        """Return those of some values."""
        ordered = sorted(values)
        return cls(percentile(ordered, 0.5), percentile(ordered, 0.99))


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """One run: one target, one workload. Requests of the warm-up do not count, all later ones do.

    Attributes:
        target: As on the command line: `policy:founding`, `url:http://...`.
        scenario: The name of workload and fleet.
        rate_rps: The nominal rate.
        kind: `virtual` for the same requests in virtual time.
        metrics: The laboratory's measures of the run.
        errors: Failed requests by kind (`RequestRecord.error`); of a virtual run see `metrics`.
        delay_s: The generator's delay.
        knows_pods: The adapter loads in `metrics` are known; else they are not 0 but unknown.
    """

    target: str
    scenario: str
    rate_rps: float
    seed: int
    kind: Kind
    metrics: Metrics
    errors: dict[str, int] = {}
    delay_s: Percentiles = Percentiles()
    knows_pods: bool = False

    @property
    def policy(self) -> str:
        """The target's policy; for other targets their whole name."""
        return self.target.removeprefix("policy:")

    @property
    def num_errors(self) -> int:
        """The number of failed requests."""
        return sum(self.errors.values())

    @property
    def has_lagged(self) -> bool:
        """Whether the generator's median delay is too long for the figures to be trusted."""
        return self.delay_s.p50 > MAX_MEDIAN_DELAY_S

    @property
    def error_words(self) -> str:
        """The failures in words; "" without any."""
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.errors.items())
        num = self.metrics.num_offered
        return f"{self.num_errors} of {num} failed: {kinds}" if kinds else ""

    @property
    def delay_words(self) -> str:
        """How late the generator was, in words."""
        return (
            f"THE GENERATOR LAGGED: the median request was sent {1e3 * self.delay_s.p50:.1f} ms "
            f"late, the 99th percentile {1e3 * self.delay_s.p99:.1f} ms; over "
            f"{1e3 * MAX_MEDIAN_DELAY_S:g} ms the load is not the one that was asked for, and "
            "these figures are not to be trusted"
        )


class LoadResult(msgspec.Struct, frozen=True, kw_only=True):
    """A load test.

    Attributes:
        name: Short, for titles and file names.
        about: A description for people.
        date: Begin, ISO 8601 with its zone.
        machine: See `describe_machine`.
        suite: None for an endpoint of which nothing is known.
        note: Caveats for people who read the figures.
    """

    name: str
    about: str = ""
    date: str = ""
    machine: str = ""
    slo: Slo = Slo()
    runs: Sequence[RunResult] = ()
    suite: Suite | None = None
    note: str = ""
    format: str = FORMAT


def real_run(
    records: Sequence[RequestRecord],
    *,
    target: str,
    scenario: str,
    rate_rps: float,
    seed: int,
    slo: Slo,
    warm_up_s: float = 0.0,
    pods: Sequence[PodTotals] = (),
    tenants: Mapping[str, Tenant] = NO_TENANTS,
) -> RunResult:
    """Measure a run of real requests, by the measures of a virtual one.

    Args:
        records: One per request, in any order.
        pods: Their totals after the warm-up, if known, by the names in `x-served-by`.
        tenants: The workload's.

    Raises:
        ValueError: No request was planned after the warm-up.
    """
    # By plan, also where the generator lags: each target's figures are of the same requests.
    planned = (record.sent_s for record in records if record.at_s >= warm_up_s)
    began_s = min(planned, default=warm_up_s)
    named = _named(pods, records)
    result = as_fleet_result(records, warm_up_s=began_s, pods=named, tenants=tenants)
    counted = [record for record in records if record.sent_s >= began_s]
    errors = Counter(sorted(record.error for record in counted if record.error))
    return RunResult(
        target=target,
        scenario=scenario,
        rate_rps=rate_rps,
        seed=seed,
        kind="real",
        metrics=measure(result, slo),
        errors=dict(errors.most_common()),
        delay_s=Percentiles.of(record.delay_s for record in counted),
        knows_pods=bool(pods),
    )


def _named(pods: Sequence[PodTotals], records: Sequence[RequestRecord]) -> list[PodTotals]:
    """Return the known pods, and every other pod that responded."""
    if not pods:
        return []
    known = {pod.address for pod in pods}
    others = {record.served_by for record in records} - known - {""}
    return [*pods, *(PodTotals(name, 0, 0) for name in sorted(others))]


def describe_machine() -> str:
    """Return cores, processor, system and Python of this machine, without its name."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (
        f"{cores} cores ({_processor()}), {platform.system()} {platform.release().split('-')[0]}, "
        f"Python {platform.python_version()}"
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


# --- the file -------------------------------------------------------------------------------


def save(result: LoadResult, path: Path) -> None:
    """Write a load test as JSON; create the folder if necessary.

    Raises:
        OSError: It cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    content = json.loads(msgspec.json.encode(result), parse_float=_rounded)
    path.write_bytes(msgspec.json.encode(content) + b"\n")


def load(path: Path) -> LoadResult:
    """Read what `save` wrote.

    Raises:
        OSError: It cannot be read.
        ResultError: It is something else.
    """
    try:
        head = msgspec.json.decode(path.read_bytes(), type=_Head)
        if head.format != FORMAT:
            raise ResultError(f"{path}: its format is {head.format!r}, not {FORMAT!r}")
        return msgspec.json.decode(path.read_bytes(), type=LoadResult)
    except msgspec.DecodeError as error:
        raise ResultError(f"{path}: not a load test's result: {error}") from error


class _Head(msgspec.Struct):
    format: str = ""


def _rounded(number: str) -> float:
    return float(f"{float(number):.{NUM_DIGITS}g}")


# --- the figures by which runs are compared ---------------------------------------------------


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
