"""Traffic that is recorded at a real router, and what the laboratory tells by it."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from extproc.lab.calibration.fromrecord import fit_record
from extproc.lab.engine.profiles import EngineProfile
from extproc.lab.fleet.settings import FleetSettings
from extproc.lab.trials.prospects import Prospect, prospects
from extproc.lab.trials.whatif import (
    WARM_UP,
    Case,
    PredictedTime,
    add,
    compare_times,
    missing_s,
    simulate,
)
from extproc.lab.workload.intervals import Interval
from extproc.lab.workload.judge import Slo, percentile
from extproc.lab.workload.recorded import Record
from extproc.lab.workload.running import FleetResult
from tests.e2e.harness import RouterProcess
from tests.waiting import eventually

EXTPROC = (sys.executable, "-m", "extproc", "lab")


Row = tuple[str, ...]


def heads(other_profile: str) -> Row:
    """Return the names of the columns of `Question.rows`."""
    by_other = f"by the {other_profile} profile"
    return "seed", "figure", "predicted (95 %)", by_other, "real", "difference", "covered"


def recorder(path: Path) -> Callable[[RouterProcess], AbstractAsyncContextManager[None]]:
    """Return what records a router's traffic to a file."""

    @asynccontextmanager
    async def record(router: RouterProcess) -> AsyncIterator[None]:
        with path.open("wb") as out:
            command = (*EXTPROC, "record", router.address, "--minutes", "60")
            process = await asyncio.create_subprocess_exec(
                *command, stdout=out, stderr=asyncio.subprocess.PIPE
            )
            assert process.stderr is not None
            assert b"recording" in await process.stderr.readline()
            await asyncio.sleep(2.0)  # until it watches: a record without a request fails the test
            yield
            await eventually(router.has_none_in_flight, within_s=30.0)
            await asyncio.sleep(1.0)
            process.send_signal(signal.SIGINT)
            assert await process.wait() == 0

    return record


@dataclass(frozen=True)
class Question:
    """What a policy would have given where another one was recorded, on the same pods.

    Attributes:
        settings: The fleet; its profile is the one to judge.
        slo: Objectives that some requests miss.
    """

    settings: FleetSettings
    slo: Slo
    recorded: str = "founding"
    other: str = "least_harm"

    def _case(self, policy: str) -> Case:
        return Case(policy, self.settings.num_pods, self.settings.max_loras)

    def predicted(self, record: Record, profile: EngineProfile) -> Prospect:
        """Return what the model says of the other policy."""
        settings, recorded = replace(self.settings, profile=profile), self._case(self.recorded)
        added_s = missing_s(record, simulate(record, settings, recorded))
        print(f"{1e3 * added_s:.1f} ms are added to each first token; {profile.provenance}")

        def run(case: Case) -> FleetResult:
            return add(simulate(record, settings, case), added_s)

        *_, other = prospects([recorded, self._case(self.other)], run, self.slo)
        return other

    def wrongly_told(self, record: Record, profile: EngineProfile) -> list[PredictedTime]:
        """Return what the model says of the recorded policy that is off."""
        settings = replace(self.settings, profile=profile)
        result = simulate(record, settings, self._case(self.recorded))
        compared = compare_times(record, add(result, missing_s(record, result)))
        return [each for each in compared if each.is_off]

    def fitted(self, record: Record) -> EngineProfile:
        """Return the profile that explains the record."""
        loras, cpu_loras = self.settings.max_loras, self.settings.max_cpu_loras
        profile = self.settings.profile
        return fit_record(record.requests, profile, max_loras=loras, max_cpu_loras=cpu_loras)

    def happened(self, record: Record) -> dict[str, float]:
        """Return the figures of a record, after the same warm-up."""
        after_s = WARM_UP * record.requests[-1].arrival.at_s
        requests = [each for each in record.requests if each.arrival.at_s >= after_s]
        ttfts_s = sorted(each.ttft_s for each in requests if each.ttft_s is not None)
        num_well = sum(
            each.ttft_s is not None
            and each.ttft_s <= self.slo.ttft_s
            and (each.tpot_s or 0.0) <= self.slo.tpot_s
            for each in requests
        )
        return {
            "TTFT p50, ms": 1e3 * percentile(ttfts_s, 0.5),
            "TTFT p99, ms": 1e3 * percentile(ttfts_s, 0.99),
            "served well, %": 100 * num_well / len(requests),
        }

    def rows(
        self, seed: int, own: Prospect, by_other: Prospect, real: dict[str, float]
    ) -> Iterator[Row]:
        """Yield the rows of a table (`heads`)."""
        told = zip(real.items(), figures(own), figures(by_other), strict=True)
        for (name, value), each, other in told:
            assert each.low is not None
            assert each.high is not None
            is_covered = each.low <= value <= each.high
            yield (
                *(str(seed), name, f"{each.mean:.1f} ({each.low:.1f} to {each.high:.1f})"),
                *(f"{other.mean:.1f}", f"{value:.1f}", f"{each.mean / value - 1:+.0%}"),
                "yes" if is_covered else "",
            )


def figures(prospect: Prospect) -> list[Interval]:
    """Return those of `Question.happened`."""
    parts = (prospect.ttft_p50_s, 1e3), (prospect.ttft_p99_s, 1e3), (prospect.served_well, 100)
    return [
        Interval(each.mean * by, (each.low or 0.0) * by, (each.high or 0.0) * by)
        for each, by in parts
    ]
