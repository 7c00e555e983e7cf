"""Measures of one run.

*Attainment* is the part of the requests *offered* after the warm-up that got their first token and
their tokens in time. Requests that were shed, abandoned, failed or not finished are misses. *SLO
capacity* is the highest offered rate with an attainment of at least `Slo.target`.

Percentiles of TTFT and TPOT are over the requests that have one; a policy that sheds looks better
there and pays in attainment.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from statistics import fmean, median

from msgspec import Struct

from extproc.lab.workload.exchange import RequestRecord
from extproc.lab.workload.running import FleetResult, FlightState, LabFlight

SLORA_TTFT_S = 6.0
"""S-LoRA's objective for the first token (S-LoRA, section 7, and `slora/utils/metric.py`)."""

MAX_UNSEEN_S = 1.0
"""A pod in virtual time advances when it is observed, which happens more often than this."""

MIN_ADAPTER_REQUESTS = 30
"""Adapters with fewer requests are judged together."""


class Slo(Struct, frozen=True, forbid_unknown_fields=True):
    """The objectives of a request.

    Attributes:
        ttft_s: Longest time from Envoy to the first token, time held at the gateway included.
        tpot_s: Longest mean time per token after the first.
        target: Part of the offered requests that must meet both.
    """

    ttft_s: float = 0.5
    tpot_s: float = 0.05
    target: float = 0.99

    def is_served_well(self, flight: LabFlight) -> bool:
        """Return whether a request met the objectives, or finished if it has none."""
        if flight.has_objectives:
            return self.is_met(flight)
        return flight.state is FlightState.FINISHED

    def is_met(self, request: LabFlight | RequestRecord) -> bool:
        """Return whether a request met both objectives."""
        ttft_s, tpot_s = request.ttft_s, request.tpot_s
        return (
            ttft_s is not None
            and tpot_s is not None
            and ttft_s <= self.ttft_s
            and tpot_s <= self.tpot_s
        )


@dataclass(frozen=True, slots=True)
class TenantMetrics:
    """Measures of one tenant's requests.

    Attributes:
        longest_wait_s: Until a first token, or an end without one.
    """

    num_offered: int
    attainment: float
    longest_wait_s: float


@dataclass(frozen=True, slots=True)
class Metrics:
    """Measures of one run, over the requests that came after the warm-up.

    Attributes:
        fates: Number of requests in each state at the end.
        attainment: Part that met the SLO, or finished if it has no objectives.
        throughput_rps: Requests that finished between the warm-up and the last arrival, per second,
            whenever they came.
        slora_satisfaction: Mean over all of `1 - (TTFT / 6 s)^2`, 0 from 6 s on or without one.
        loads_per_1000: Adapters brought into GPU slots per 1,000 requests.
        disk_loads_per_1000: Those of them read from disk.
        queue_wait_s: Mean time from dispatch to the first step that ran the request. More than a
            step is waiting for an adapter slot or for KV.
        max_over_mean_load: Request-seconds of the busiest pod over the mean pod's.
        worst_adapter: Attainment of the worst served adapter; the base model is one, and tenants
            count instead where there are any. Those with fewer than 30 requests are taken
            together, the rarest first, until they have 30; those left over join the last of
            these, and are judged by themselves if there is none.
        adapter_ttft_p99_s: Of the median adapter; a request without a first token counts with the
            time until its end. Adapters as for `worst_adapter`, in the next as well.
        worst_adapter_ttft_p99_s: Of the one with the highest.
        goodput_rps: Requests served well, per second of arrivals.
        refusals: Number of rejections by reason.
        tenants: Of those that the workload names.
    """

    num_offered: int
    fates: Mapping[str, int]
    attainment: float
    throughput_rps: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_mean_s: float
    tpot_p99_s: float
    slora_satisfaction: float
    loads_per_1000: float
    disk_loads_per_1000: float
    queue_wait_s: float
    max_over_mean_load: float
    worst_adapter: float = 0.0  # defaults are for result files that do not have them
    goodput_rps: float = 0.0
    refusals: Mapping[str, int] = field(default_factory=dict)
    tenants: Mapping[str, TenantMetrics] = field(default_factory=dict)
    adapter_ttft_p99_s: float = 0.0
    worst_adapter_ttft_p99_s: float = 0.0


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
    finished = [
        flight
        for flight in result.flights
        if flight.state is FlightState.FINISHED
        and flight.ended_s is not None
        and result.warm_up_s <= flight.ended_s <= flights[-1].arrival.at_s
    ]
    num = len(flights)
    offered_s = max(flights[-1].arrival.at_s - result.warm_up_s, 1e-9)
    num_good = sum(map(slo.is_served_well, flights))
    groups = _groups(flights)
    tails_s = sorted(percentile(sorted(_waits_s(own, result)), 0.99) for own in groups)
    return Metrics(
        num_offered=num,
        fates=dict(sorted(Counter(f.state.value for f in flights).items())),
        attainment=num_good / num,
        throughput_rps=len(finished) / offered_s,
        ttft_mean_s=_mean(ttfts_s),
        ttft_p50_s=percentile(ttfts_s, 0.5),
        ttft_p99_s=percentile(ttfts_s, 0.99),
        tpot_mean_s=_mean(tpots_s),
        tpot_p99_s=percentile(tpots_s, 0.99),
        slora_satisfaction=sum(map(satisfaction, ttfts_s)) / num,
        loads_per_1000=1000 * sum(pod.num_loads for pod in result.pods) / num,
        disk_loads_per_1000=1000 * sum(pod.num_disk_loads for pod in result.pods) / num,
        queue_wait_s=_mean([f.queue_wait_s for f in flights if f.queue_wait_s is not None]),
        max_over_mean_load=_max_over_mean(flights, [pod.address for pod in result.pods]),
        worst_adapter=min(_attainment(own, slo) for own in groups),
        goodput_rps=num_good / offered_s,
        refusals=dict(sorted(Counter(f.reason for f in flights if f.reason).items())),
        tenants={
            tenant: _of_tenant([f for f in flights if f.arrival.tenant == tenant], result, slo)
            for tenant in result.tenants
        },
        adapter_ttft_p99_s=median(tails_s),
        worst_adapter_ttft_p99_s=tails_s[-1],
    )


def _attainment(flights: Sequence[LabFlight], slo: Slo) -> float:
    return sum(map(slo.is_served_well, flights)) / max(1, len(flights))


def _of_tenant(flights: Sequence[LabFlight], result: FleetResult, slo: Slo) -> TenantMetrics:
    longest_s = max(_waits_s(flights, result), default=0.0)
    return TenantMetrics(len(flights), _attainment(flights, slo), longest_s)


def _waits_s(flights: Iterable[LabFlight], result: FleetResult) -> Iterator[float]:
    """Yield each request's time until its first token, or until its end without one."""
    for flight in flights:
        times_s = (flight.first_token_s, flight.ended_s, result.ended_s)
        yield next(t for t in times_s if t is not None) - flight.arrival.at_s


def attainment_at_most(
    flights: Iterable[LabFlight], now: float, *, slo: Slo, warm_up_s: float, num_counted: int
) -> float:
    """Return the highest attainment still possible at `now`, of `num_counted` requests."""
    missed = sum(
        flight.arrival.at_s >= warm_up_s and _is_surely_missed(flight, now, slo)
        for flight in flights
    )
    return 1 - missed / num_counted


def _is_surely_missed(flight: LabFlight, now: float, slo: Slo) -> bool:
    if flight.state is not FlightState.RUNNING:
        return not slo.is_served_well(flight)
    if not flight.has_objectives:
        return False
    if flight.first_token_s is None:
        return now - flight.arrival.at_s > slo.ttft_s + MAX_UNSEEN_S
    return flight.first_token_s - flight.arrival.at_s > slo.ttft_s


def satisfaction(ttft_s: float) -> float:
    """Return S-LoRA's user satisfaction: `1 - (t / 6)^2`, 0 from 6 s on."""
    return max(0.0, 1 - (ttft_s / SLORA_TTFT_S) ** 2)


def percentile(ordered: Sequence[float], part: float) -> float:
    """Return the smallest value that `part` of the ordered values do not exceed; 0 of none."""
    if not ordered:
        return 0.0
    return ordered[max(0, ceil(part * len(ordered)) - 1)]


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0


def _max_over_mean(flights: Iterable[LabFlight], addresses: Iterable[str]) -> float:
    loads_s = dict.fromkeys(addresses, 0.0)
    for flight in flights:
        if flight.dispatched_s is not None and flight.ended_s is not None:
            loads_s[flight.pod] += flight.ended_s - flight.dispatched_s
    mean_s = _mean(list(loads_s.values()))
    return max(loads_s.values()) / mean_s if mean_s else 1.0


def _groups(flights: Iterable[LabFlight]) -> list[list[LabFlight]]:
    """Return the requests of each adapter or tenant, rare ones together."""
    by_name: defaultdict[str, list[LabFlight]] = defaultdict(list)
    for flight in flights:
        by_name[flight.arrival.tenant or flight.arrival.adapter or ""].append(flight)
    alone, rare = [], [list[LabFlight]()]
    for _, own in sorted(by_name.items(), key=lambda item: (len(item[1]), item[0])):
        if len(own) >= MIN_ADAPTER_REQUESTS:
            alone.append(own)
            continue
        rare[-1] += own
        if len(rare[-1]) >= MIN_ADAPTER_REQUESTS:
            rare.append([])
    last = rare.pop()
    if rare:
        rare[-1] += last
    elif last:
        rare = [last]
    return alone + rare
