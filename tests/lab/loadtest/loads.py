"""Records and runs for the tests of load tests."""

from __future__ import annotations

from random import Random

from extproc.lab.loadtest.results import LoadResult, RunResult, real_run
from extproc.lab.trials.specs import Suite
from extproc.lab.trials.suites import parse_suite
from extproc.lab.workload.exchange import RequestRecord
from extproc.lab.workload.judge import Slo
from extproc.lab.workload.running import PodTotals

SLO = Slo(ttft_s=0.5, tpot_s=0.05)

SUITE = """
name: small
about: Two pods, few slots.
num_requests: 240
warm_up: 0.1
seeds: [1, 2]
rates_rps: [20, 40]
policies: [round_robin, least_pending, founding]
fleet: {num_pods: 2, max_loras: 2, max_cpu_loras: 4}
scenarios:
  - name: zipf
    title: Twelve adapters
    workload: {kind: zipf, num_adapters: 12}
"""


def suite() -> Suite:
    return parse_suite(SUITE)


def records(
    *,
    num: int = 60,
    rate_rps: float = 20.0,
    ttft_s: float = 0.1,
    late_s: float = 0.0,
    seed: int = 1,
) -> list[RequestRecord]:
    """Answers of five tokens; every 20th fails."""
    rng = Random(seed)
    made = []
    for index in range(num):
        at_s = index / rate_rps
        wait_s, fails = ttft_s * rng.uniform(0.5, 2), index % 20 == 19
        made.append(
            RequestRecord(
                index=index,
                adapter=f"adapter-{int(rng.paretovariate(0.7)) % 40:02}",
                tenant=f"tenant-{index % 3}",
                at_s=at_s,
                sent_s=at_s + late_s,
                ended_s=at_s + late_s + wait_s + 0.08,
                first_token_s=None if fails else at_s + late_s + wait_s,
                gaps_s=() if fails else (0.02,) * 4,
                num_tokens=0 if fails else 5,
                wanted_tokens=5,
                prompt_tokens=30,
                status=503 if fails else 200,
                error="http_503" if fails else "",
                served_by="" if fails else f"pod-{index % 2}",
            )
        )
    return made


def run(target: str, *, rate_rps: float = 20.0, seed: int = 1, ttft_s: float = 0.1) -> RunResult:
    """A real run that knows its pods."""
    return real_run(
        records(rate_rps=rate_rps, ttft_s=ttft_s, seed=seed),
        target=target,
        scenario="zipf",
        rate_rps=rate_rps,
        seed=seed,
        slo=SLO,
        pods=[PodTotals("pod-0", 3, 1), PodTotals("pod-1", 5, 2)],
    )


def result(*runs: RunResult, suite: Suite | None = None) -> LoadResult:
    return LoadResult(
        name="small",
        about="A test.",
        date="2026-11-21T23:00:00+00:00",
        machine="m",
        runs=runs,
        suite=suite,
    )
