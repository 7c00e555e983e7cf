"""Measures of one run, and the capacity of a rule.

*Attainment* is the part of the requests *offered* after the warm-up that got their first token and
their tokens in time. What was shed, failed, abandoned or not finished is a miss. *SLO capacity* is
the highest offered rate with an attainment of at least `Slo.target`.

Percentiles of TTFT and TPOT are over the requests that have one; a rule that sheds looks better
there and pays in attainment.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from statistics import fmean

from extproc.sim.flights import Fate, FleetResult, Flight

SLORA_TTFT_S = 6.0
"""S-LoRA's objective for the first token (S-LoRA, section 7, and `slora/utils/metric.py`)."""

MIN_TENANT_REQUESTS = 30
"""A tenant with fewer requests says nothing about fairness."""

MAX_EXTENSIONS = 6
"""Half as high again six times is more than elevenfold."""


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request must meet.

    Attributes:
        ttft_s: Longest time from Envoy to the first token, time held at the gateway included.
        tpot_s: Longest mean time per token after the first.
        target: Part of the offered requests that must meet both.
    """

    ttft_s: float = 0.5
    tpot_s: float = 0.05
    target: float = 0.99

    def is_met(self, flight: Flight) -> bool:
        """Whether a request got what it should."""
        ttft_s, tpot_s = flight.ttft_s, flight.tpot_s
        return (
            ttft_s is not None
            and tpot_s is not None
            and ttft_s <= self.ttft_s
            and tpot_s <= self.tpot_s
        )


@dataclass(frozen=True, slots=True)
class Metrics:
    """Measures of one run, over the requests that came after the warm-up.

    Attributes:
        num_offered: Requests.
        fates: How many met which fate.
        offered_rps: Their rate.
        attainment: Part that met the SLO.
        throughput_rps: Requests that finished between the warm-up and the last arrival, per second,
            whenever they came.
        output_tokens_per_s: Their tokens per second.
        ttft_mean_s: Mean time to the first token.
        ttft_p50_s: Its median.
        ttft_p99_s: Its 99th percentile.
        tpot_mean_s: Mean time per token.
        tpot_p50_s: Its median.
        tpot_p99_s: Its 99th percentile.
        slora_attainment: Part that got a first token within S-LoRA's 6 s.
        slora_satisfaction: Mean over all of `1 - (TTFT / 6 s)^2`, 0 from 6 s on or without one.
        loads_per_1000: Adapters brought into GPU slots per 1,000 requests.
        disk_loads_per_1000: Those of them read from disk.
        queue_wait_s: Mean time from a pod's getting a request to the first step that ran it. What
            is more than a step is waiting for an adapter slot, or for KV where that is short.
        max_over_mean_load: Request-seconds of the busiest pod over the mean pod's.
        fairness_gap: Attainment of the best served tenant less that of the worst served, among
            those with enough requests. Where a workload names no tenants, adapters are tenants.
    """

    num_offered: int
    fates: Mapping[str, int]
    offered_rps: float
    attainment: float
    throughput_rps: float
    output_tokens_per_s: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_mean_s: float
    tpot_p50_s: float
    tpot_p99_s: float
    slora_attainment: float
    slora_satisfaction: float
    loads_per_1000: float
    disk_loads_per_1000: float
    queue_wait_s: float
    max_over_mean_load: float
    fairness_gap: float


def measure(result: FleetResult, slo: Slo) -> Metrics:
    """Measure a run.

    Raises:
        ValueError: No request came after the warm-up.
    """
    flights = result.counted
    if not flights:
        raise ValueError("no request came after the warm-up")
    ttfts_s = sorted(f.ttft_s for f in flights if f.ttft_s is not None)
    tpots_s = sorted(f.tpot_s for f in flights if f.tpot_s is not None)
    finished = _finished_within(result, flights[-1].arrival.at_s)
    num = len(flights)
    offered_s = max(flights[-1].arrival.at_s - result.warm_up_s, 1e-9)
    return Metrics(
        num_offered=num,
        fates=dict(sorted(Counter(f.fate.value for f in flights).items())),
        offered_rps=num / offered_s,
        attainment=sum(map(slo.is_met, flights)) / num,
        throughput_rps=len(finished) / offered_s,
        output_tokens_per_s=sum(f.arrival.output_tokens for f in finished) / offered_s,
        ttft_mean_s=_mean(ttfts_s),
        ttft_p50_s=percentile(ttfts_s, 0.5),
        ttft_p99_s=percentile(ttfts_s, 0.99),
        tpot_mean_s=_mean(tpots_s),
        tpot_p50_s=percentile(tpots_s, 0.5),
        tpot_p99_s=percentile(tpots_s, 0.99),
        slora_attainment=sum(ttft_s < SLORA_TTFT_S for ttft_s in ttfts_s) / num,
        slora_satisfaction=sum(map(satisfaction, ttfts_s)) / num,
        loads_per_1000=1000 * sum(pod.num_loads for pod in result.pods) / num,
        disk_loads_per_1000=1000 * sum(pod.num_disk_loads for pod in result.pods) / num,
        queue_wait_s=_mean([f.queue_wait_s for f in flights if f.queue_wait_s is not None]),
        max_over_mean_load=_max_over_mean(flights, [pod.address for pod in result.pods]),
        fairness_gap=_fairness_gap(flights, slo),
    )


def satisfaction(ttft_s: float) -> float:
    """S-LoRA's user satisfaction: `1 - (t / 6)^2`, nothing from 6 s on."""
    return max(0.0, 1 - (ttft_s / SLORA_TTFT_S) ** 2)


def percentile(ordered: Sequence[float], part: float) -> float:
    """The smallest value that `part` of the ordered values do not exceed; 0 of none."""
    if not ordered:
        return 0.0
    return ordered[max(0, ceil(part * len(ordered)) - 1)]


def _finished_within(result: FleetResult, until_s: float) -> list[Flight]:
    return [
        flight
        for flight in result.flights
        if flight.fate is Fate.FINISHED
        and flight.ended_s is not None
        and result.warm_up_s <= flight.ended_s <= until_s
    ]


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0


def _max_over_mean(flights: Iterable[Flight], addresses: Iterable[str]) -> float:
    loads_s = dict.fromkeys(addresses, 0.0)
    for flight in flights:
        if flight.dispatched_s is not None and flight.ended_s is not None:
            loads_s[flight.pod] += flight.ended_s - flight.dispatched_s
    mean_s = _mean(list(loads_s.values()))
    return max(loads_s.values()) / mean_s if mean_s else 1.0


def _fairness_gap(flights: Iterable[Flight], slo: Slo) -> float:
    tenants: defaultdict[str, list[bool]] = defaultdict(list)
    for flight in flights:
        tenants[flight.arrival.tenant or flight.arrival.adapter or "base"].append(
            slo.is_met(flight)
        )
    parts = [sum(met) / len(met) for met in tenants.values() if len(met) >= MIN_TENANT_REQUESTS]
    return max(parts) - min(parts) if parts else 0.0


# --- capacity -------------------------------------------------------------------------------


@dataclass(slots=True)
class CapacitySearch:
    """Finds the capacity of one rule from attainments at chosen rates.

    Attributes:
        attainment_at: Runs the rule at a rate.
        target: Attainment that must be reached.
        points: What was measured, rate to attainment.
    """

    attainment_at: Callable[[float], float]
    target: float = 0.99
    points: dict[float, float] = field(default_factory=dict)

    def run(self, rates_rps: Iterable[float], num_refinements: int = 0) -> float:
        """Measure at every rate, and beyond them where all or none are attained; then refine.

        Beyond is half as high again, or as low, `MAX_EXTENSIONS` times at most. Refining halves the
        gap that the capacity lies in.
        """
        for rate_rps in rates_rps:
            self._measure(rate_rps)
        for _ in range(MAX_EXTENSIONS):
            low, high = bracket(self.points, self.target)
            if low and high is not None:
                break
            self._measure(low * 1.5 if high is None else high / 1.5)
        for _ in range(num_refinements):
            low, high = bracket(self.points, self.target)
            if high is None:
                break
            self._measure((low + high) / 2)
        return capacity(self.points, self.target)

    def _measure(self, rate_rps: float) -> None:
        if rate_rps not in self.points:
            self.points[rate_rps] = self.attainment_at(rate_rps)


def bracket(points: Mapping[float, float], target: float) -> tuple[float, float | None]:
    """The highest rate up to which every measured rate reached the target, and the next one.

    The first is 0 if none did; the second is None if all did.
    """
    low = 0.0
    for rate_rps in sorted(points):
        if points[rate_rps] < target:
            return low, rate_rps
        low = rate_rps
    return low, None


def capacity(points: Mapping[float, float], target: float) -> float:
    """The rate at which attainment falls below the target, on the line between two measurements.

    At rate 0 everything is attained. If every measurement reached the target it is the highest
    rate measured: a lower bound.
    """
    low, high = bracket(points, target)
    if high is None:
        return low
    above, below = points.get(low, 1.0), points[high]
    return low + (high - low) * (above - target) / (above - below)
