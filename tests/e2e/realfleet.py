"""The virtual fleet compared with fake pods behind a real Envoy, on the same requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, replace
from random import Random
from statistics import fmean, stdev

from extproc.envoy.bootstrap import Mode
from extproc.lab.engine.profiles import H100_8B
from extproc.lab.fakepod.podserver import RunningPod
from extproc.lab.fleet.fleet import BASE_MODEL, Fleet
from extproc.lab.fleet.settings import FleetSettings
from extproc.lab.loadtest.fleetfiles import pod_configs
from extproc.lab.loadtest.replay import ReplaySettings, replay
from extproc.lab.loadtest.results import Percentiles
from extproc.lab.workload.exchange import RequestRecord, as_fleet_result
from extproc.lab.workload.judge import Slo, measure, percentile
from extproc.lab.workload.requests import Workload
from extproc.lab.workload.running import FleetResult, PodTotals
from extproc.lab.workload.synthetic import zipf
from extproc.routing.policies import Founding, LeastPending, Policy, RoundRobin
from tests.e2e.conftest import router_config, running_envoy
from tests.e2e.harness import RouterProcess
from tests.fakepods import running_pods

POLICIES: Mapping[str, Callable[[], Policy]] = {
    "founding": Founding,
    "least_pending": LeastPending,
    "round_robin": RoundRobin,
}
SLO = Slo(ttft_s=0.3, tpot_s=0.06)
PROFILE = replace(
    H100_8B,
    name="slow",
    provenance="made up: slow enough for a real-time run on a busy machine",
    step_s=0.02,
    step_per_decode_s=0.0002,
    step_per_prefill_token_s=0.0001,
)
SETTINGS = FleetSettings(
    num_pods=4, profile=PROFILE, max_loras=3, max_cpu_loras=6, max_lora_rank=64
)
NUM_SEEDS = 16
NUM_TRIES = 2
MAX_DELAY_S = 0.05
MAX_ADDED_S = 0.03
"""A step takes about 25 ms. A run disturbed by more than that is repeated."""


def small_workload(duration_s: float, *, rate_rps: float = 12.0, seed: int = 3) -> Workload:
    """More adapters than slots, popular and rare ones, four ranks."""

    def lengths(rng: Random) -> tuple[int, int]:
        return rng.randint(20, 400), rng.randint(5, 35)

    return zipf(
        "small",
        num_adapters=16,
        exponent=1.0,
        rate_rps=rate_rps,
        duration_s=duration_s,
        seed=seed,
        lengths=lengths,
        ranks=(8, 16, 32, 64),
    )


# --- real time ------------------------------------------------------------------------------


@dataclass(frozen=True)
class RealRun:
    """The results of a run in real time.

    Attributes:
        workload: The requests, with the times at which they were sent.
        result: In the form of a virtual run, less `added_s`.
        records: One per request.
        queue_wait_s: Mean time in the pods' queues, by their metrics.
        added_s: The time that network, Envoy, router and client added to the first token: the
            clients' mean less that of the pods' metrics.
    """

    workload: Workload
    result: FleetResult
    records: Sequence[RequestRecord]
    queue_wait_s: float
    added_s: float

    @property
    def disturbance(self) -> str:
        """Why the machine was too busy for this run to count; "" where it was not."""
        delay_s = Percentiles.of(record.delay_s for record in self.records).p99
        if delay_s > MAX_DELAY_S:
            return f"1 % of the requests were sent over {delay_s * 1e3:.0f} ms late"
        if self.added_s > MAX_ADDED_S:
            return f"first tokens took {self.added_s * 1e3:.0f} ms from pod to client"
        return ""


async def run_real(
    workload: Workload,
    policy: str,
    settings: FleetSettings = SETTINGS,
    beside: Callable[[RouterProcess], AbstractAsyncContextManager[None]] | None = None,
) -> RealRun:
    """Send the workload over HTTP to fake pods behind the router and Envoy.

    `beside` is entered before and left after all requests.
    """
    records: list[RequestRecord] = []
    async with AsyncExitStack() as stack:
        configs = pod_configs(settings, workload.adapters, BASE_MODEL)
        pods = await stack.enter_async_context(running_pods(*configs))
        router = RouterProcess(_router_config(pods, policy, settings))
        await stack.enter_async_context(router)
        flush_s = settings.completion_flush_s
        envoy = await stack.enter_async_context(
            running_envoy(Mode.ORIGINAL_DST, router, access_log_flush_interval_s=flush_s)
        )
        if beside is not None:
            await stack.enter_async_context(beside(router))
        await replay(workload, ReplaySettings(envoy.url), records.append)
    assert not any(record.error for record in records)
    num, queue_s, ttft_s = map(sum, zip(*map(_sums, pods), strict=True))
    added_s = fmean(record.ttft_s or 0.0 for record in records) - ttft_s / num
    totals = [_totals(pod) for pod in pods]
    result = as_fleet_result(records, overhead_s=added_s, pods=totals)
    sent = replace(workload, arrivals=tuple(flight.arrival for flight in result.flights))
    return RealRun(sent, result, records, queue_s / num, added_s)


async def run_undisturbed(workload: Workload, policy: str) -> RealRun:
    """Run it, again if the machine was too busy; return the last try in any case."""
    for _ in range(NUM_TRIES - 1):
        run = await run_real(workload, policy)
        if not run.disturbance:
            return run
    return await run_real(workload, policy)


def _router_config(
    pods: Sequence[RunningPod], policy: str, settings: FleetSettings
) -> dict[str, object]:
    return {
        **router_config(pods),
        "pods": {"max_loras": settings.max_loras, "max_cpu_loras": settings.max_cpu_loras},
        "policy": {"name": policy},
        "scrape": {
            "interval_s": settings.scrape_interval_s,
            "models_interval_s": settings.models_interval_s,
            "expiry_s": settings.report_expiry_s,
        },
    }


def _sums(pod: RunningPod) -> tuple[float, ...]:
    """Return a pod's number of requests, and their seconds in its queue and to the first token."""
    labels = {"model_name": BASE_MODEL, "engine": "0"}
    queue, ttft = "vllm:request_queue_time_seconds", "vllm:time_to_first_token_seconds"
    get = pod.pod.page.registry.get_sample_value
    return tuple(get(n, labels) or 0.0 for n in (f"{queue}_count", f"{queue}_sum", f"{ttft}_sum"))


def _totals(pod: RunningPod) -> PodTotals:
    counters = pod.pod.runner.engine.counters
    return PodTotals(pod.name, counters.num_gpu_loads, counters.num_disk_loads)


# --- both -----------------------------------------------------------------------------------


ALLOWED: Mapping[str, tuple[float, float, float]] = {
    "TTFT p50, ms": (0.05, 3, 0.25),
    "TTFT p90, ms": (0.07, 5, 1),
    "TTFT p99, ms": (0.12, 10, 2),
    "TTFT mean, ms": (0.05, 3, 0),
    "TPOT mean, ms": (0.05, 0.5, 0),
    "served well, %": (0.0, 3, 0),
    "loads per 1,000": (0.05, 0, 0),
    "disk loads per 1,000": (0.05, 0, 0),
    "queue wait mean, ms": (0.10, 3, 0),
    "busiest pod over mean": (0.05, 0, 0),
}
"""How far the two may be apart: the sum of a part of the virtual value, a constant, and a part of
the time that network, Envoy, router and client add, whose mean is taken off but which differs from
request to request."""
COUNTS = ("loads per 1,000", "disk loads per 1,000", "busiest pod over mean")
"""Those that no clock takes part in."""
NUM_SDS = 3.0
"""Added to that: standard deviations of the virtual runs, which differ by chance alone."""


def figures(result: FleetResult, queue_wait_s: float | None = None) -> dict[str, float]:
    """Return the figures that are compared, in the order of `ALLOWED`."""
    metrics = measure(result, SLO)
    ttfts_s = sorted(flight.ttft_s for flight in result.counted if flight.ttft_s is not None)
    waited_s = metrics.queue_wait_s if queue_wait_s is None else queue_wait_s
    values = (
        *(percentile(ttfts_s, part) * 1e3 for part in (0.5, 0.9, 0.99)),
        metrics.ttft_mean_s * 1e3,
        metrics.tpot_mean_s * 1e3,
        metrics.attainment * 1e2,
        metrics.loads_per_1000,
        metrics.disk_loads_per_1000,
        waited_s * 1e3,
        metrics.max_over_mean_load,
    )
    return dict(zip(ALLOWED, values, strict=True))


@dataclass(frozen=True)
class Line:
    """One figure of both runs."""

    name: str
    real: float
    virtual: float
    sd: float
    added_ms: float

    @property
    def limit(self) -> float:
        """Largest difference that counts as agreement."""
        ratio, constant, spread = ALLOWED[self.name]
        return NUM_SDS * self.sd + ratio * self.virtual + constant + spread * self.added_ms

    @property
    def is_met(self) -> bool:
        """Whether the two agree."""
        return abs(self.real - self.virtual) <= self.limit

    def __str__(self) -> str:
        apart = self.real - self.virtual
        numbers = f"{self.real:8.2f} {self.virtual:8.2f} {self.sd:8.2f} {apart:+8.2f}"
        return f"  {self.name:22} {numbers} {self.limit:8.2f}{'' if self.is_met else '  DIFFERS'}"


def compare(
    real: RealRun, policy: str, settings: FleetSettings = SETTINGS, *, num_seeds: int = NUM_SEEDS
) -> list[Line]:
    """Simulate what was sent, with several seeds, and compare."""
    measured = figures(real.result, real.queue_wait_s)
    virtual = [
        figures(Fleet(settings, real.workload, POLICIES[policy], seed=seed).run())
        for seed in range(num_seeds)
    ]
    columns = {name: [each[name] for each in virtual] for name in ALLOWED}
    added_ms = real.added_s * 1e3
    return [Line(n, measured[n], fmean(c), stdev(c), added_ms) for n, c in columns.items()]


def table(real: RealRun, policy: str, lines: Sequence[Line]) -> str:
    """The comparison, for people."""
    rate_rps, num = real.workload.rate_rps, len(real.workload.arrivals)
    delay_ms = Percentiles.of(record.delay_s for record in real.records).p50 * 1e3
    head = f"  {'':22} {'Envoy':>8} {'virtual':>8} {'sd':>8} {'apart':>8} {'allowed':>8}"
    return "\n".join(
        [
            f"{policy}: {num} requests at {rate_rps:.1f}/s, sent {delay_ms:.1f} ms late (median); "
            f"network, Envoy, router and client {real.added_s * 1e3:.1f} ms (mean), taken off",
            head,
            *map(str, lines),
        ]
    )
