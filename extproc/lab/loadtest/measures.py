"""A load test's summary: the laboratory's measures over the records of real requests.

Attainment, satisfaction, throughput and time per token are computed by
`extproc.lab.workload.judge`, from the records in the form of a virtual run: a real and a virtual
run differ only in the source of their times. Requests of the warm-up do not count; all later ones
do, failed or not.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from statistics import fmean

import msgspec

from extproc.lab.loadtest.replay import MAX_MEDIAN_DELAY_S
from extproc.lab.workload.exchange import RequestRecord, as_fleet_result
from extproc.lab.workload.flights import FleetResult, Flight, PodTotals
from extproc.lab.workload.judge import Slo, measure, percentile, satisfaction
from extproc.lab.workload.requests import NO_TENANTS, Arrival, Tenant

BASE = "(base model)"
"""The group of the requests for the base model."""
NOBODY = "(no tenant)"
"""The group of the requests without a tenant."""


class Percentiles(msgspec.Struct, frozen=True, omit_defaults=True):
    """A distribution; all 0 without values."""

    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    max: float = 0.0

    @classmethod
    def of(cls, values: Iterable[float]) -> Percentiles:
        """Return the distribution of some values."""
        ordered = sorted(values)
        if not ordered:
            return cls()
        return cls(
            mean=fmean(ordered),
            p50=percentile(ordered, 0.5),
            p90=percentile(ordered, 0.9),
            p95=percentile(ordered, 0.95),
            p99=percentile(ordered, 0.99),
            max=ordered[-1],
        )


class GroupSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of one adapter or tenant; the fields are those of `LoadSummary`."""

    num_requests: int
    num_met: int
    num_errors: int
    output_tokens: int
    satisfaction: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_mean_s: float

    @property
    def attainment(self) -> float:
        """The share of requests that met the SLO."""
        return self.num_met / self.num_requests


class LoadSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A load test in numbers, over the requests sent after the warm-up.

    Attributes:
        num_requests: Requests offered.
        num_met: Requests that met the SLO, or finished if they have no objectives.
        duration_s: From the end of the warm-up to the last request's sending.
        offered_rps: 0 if all requests came at once.
        throughput_rps: Requests that finished within `duration_s`, whenever they came, per second.
        output_tokens_per_s: Tokens of those requests per second.
        prompt_tokens: Nominal, from the workload.
        satisfaction: S-LoRA's, mean over all requests.
        ttft_s: From sending to the first token, of requests that have one.
        tpot_s: Mean time per token after the first, of requests that finished.
        gap_s: From each piece of a response to the next.
        e2e_s: From sending to the end, of requests that finished.
        delay_s: The generator's delay.
        has_lagged: The generator's median delay is too long for the figures to be trusted.
        errors: Failed requests by kind (`RequestRecord.error`).
        by_pod: Requests by the pod that served them, for pods that send their names.
        by_adapter: Most requests first; requests for the base model are under `BASE`.
        by_tenant: Most requests first; requests without a tenant are under `NOBODY`.
    """

    num_requests: int
    num_met: int
    duration_s: float
    offered_rps: float
    throughput_rps: float
    output_tokens_per_s: float
    prompt_tokens: int
    output_tokens: int
    attainment: float
    satisfaction: float
    ttft_s: Percentiles
    tpot_s: Percentiles
    gap_s: Percentiles
    e2e_s: Percentiles
    delay_s: Percentiles
    has_lagged: bool
    errors: dict[str, int]
    by_pod: dict[str, int]
    by_adapter: dict[str, GroupSummary]
    by_tenant: dict[str, GroupSummary]


def summarize_records(
    records: Sequence[RequestRecord],
    *,
    slo: Slo,
    warm_up_s: float = 0.0,
    tenants: Mapping[str, Tenant] = NO_TENANTS,
) -> LoadSummary:
    """Measure a load test, from records in any order, of any number of generators.

    Tenants are those of the workload.

    Raises:
        ValueError: No request was sent after the warm-up.
    """
    result = fleet_result_of(records, warm_up_s=warm_up_s, tenants=tenants)
    metrics = measure(result, slo)
    counted = [record for record in records if record.sent_s >= warm_up_s]
    flights = result.counted
    duration_s = flights[-1].arrival.at_s - warm_up_s
    delay_s = Percentiles.of(record.delay_s for record in counted)
    pairs = list(zip(flights, sorted(counted, key=_order), strict=True))
    return LoadSummary(
        num_requests=len(flights),
        num_met=sum(map(slo.is_served_well, flights)),
        duration_s=duration_s,
        offered_rps=metrics.offered_rps if duration_s else 0.0,
        throughput_rps=metrics.throughput_rps if duration_s else 0.0,
        output_tokens_per_s=metrics.output_tokens_per_s if duration_s else 0.0,
        prompt_tokens=sum(record.prompt_tokens for record in counted),
        output_tokens=sum(record.num_tokens for record in counted),
        attainment=metrics.attainment,
        satisfaction=metrics.slora_satisfaction,
        ttft_s=Percentiles.of(f.ttft_s for f in flights if f.ttft_s is not None),
        tpot_s=Percentiles.of(_tpots_s(flights)),
        gap_s=Percentiles.of(chain.from_iterable(record.gaps_s for record in counted)),
        e2e_s=Percentiles.of(r.ended_s - r.sent_s for r in counted if not r.error),
        delay_s=delay_s,
        has_lagged=delay_s.p50 > MAX_MEDIAN_DELAY_S,
        errors=_counts(record.error for record in counted),
        by_pod=_counts(record.served_by for record in counted),
        by_adapter=_groups(pairs, [record.adapter or BASE for _, record in pairs], slo),
        by_tenant=_groups(pairs, [record.tenant or NOBODY for _, record in pairs], slo),
    )


def fleet_result_of(
    records: Iterable[RequestRecord],
    *,
    warm_up_s: float = 0.0,
    overhead_s: float = 0.0,
    pods: Sequence[PodTotals] = (),
    tenants: Mapping[str, Tenant] = NO_TENANTS,
) -> FleetResult:
    """Return records in the form of a virtual run; see `as_fleet_result`.

    Responses count with their real lengths: a server that ends early is not faster per token.
    """
    ordered = sorted(records, key=_order)
    return as_fleet_result(
        [_arrival(record) for record in ordered],
        [msgspec.structs.replace(record, index=number) for number, record in enumerate(ordered)],
        warm_up_s=warm_up_s,
        overhead_s=overhead_s,
        pods=pods,
        tenants=tenants,
    )


def _order(record: RequestRecord) -> tuple[float, int]:
    """The order of `as_fleet_result`."""
    return record.sent_s, record.index


def _arrival(record: RequestRecord) -> Arrival:
    return Arrival(
        record.sent_s,
        record.adapter,
        record.prompt_tokens,
        record.num_tokens or record.wanted_tokens,
        record.tenant,
    )


def _groups(
    pairs: Sequence[tuple[Flight, RequestRecord]], names: Sequence[str], slo: Slo
) -> dict[str, GroupSummary]:
    members: defaultdict[str, list[tuple[Flight, RequestRecord]]] = defaultdict(list)
    for name, pair in zip(names, pairs, strict=True):
        members[name].append(pair)
    ordered = sorted(members.items(), key=lambda item: (-len(item[1]), item[0]))
    return {name: _group(own, slo) for name, own in ordered}


def _group(pairs: Sequence[tuple[Flight, RequestRecord]], slo: Slo) -> GroupSummary:
    flights = [flight for flight, _ in pairs]
    ttft_s = Percentiles.of(f.ttft_s for f in flights if f.ttft_s is not None)
    satisfied = (0.0 if f.ttft_s is None else satisfaction(f.ttft_s) for f in flights)
    return GroupSummary(
        num_requests=len(pairs),
        num_met=sum(map(slo.is_served_well, flights)),
        num_errors=sum(bool(record.error) for _, record in pairs),
        output_tokens=sum(record.num_tokens for _, record in pairs),
        satisfaction=sum(satisfied) / len(pairs),
        ttft_mean_s=ttft_s.mean,
        ttft_p50_s=ttft_s.p50,
        ttft_p99_s=ttft_s.p99,
        tpot_mean_s=Percentiles.of(_tpots_s(flights)).mean,
    )


def _tpots_s(flights: Iterable[Flight]) -> list[float]:
    return [flight.tpot_s for flight in flights if flight.tpot_s is not None]


def _counts(names: Iterable[str]) -> dict[str, int]:
    """Count each name except "", the most frequent first."""
    return dict(Counter(sorted(filter(None, names))).most_common())


# --- a summary in words -----------------------------------------------------------------------


def error_words(summary: LoadSummary) -> str:
    """Return the failures in words."""
    if not summary.errors:
        return "no errors"
    kinds = ", ".join(f"{count} {kind}" for kind, count in summary.errors.items())
    return f"{sum(summary.errors.values())} of {summary.num_requests} failed: {kinds}"


def delay_words(summary: LoadSummary) -> str:
    """Return in words whether the generator kept up."""
    delay = summary.delay_s
    late = (
        f"the median request was sent {1e3 * delay.p50:.1f} ms late, the 99th percentile "
        f"{1e3 * delay.p99:.1f} ms"
    )
    if summary.has_lagged:
        return (
            f"THE GENERATOR LAGGED: {late}; over {1e3 * MAX_MEDIAN_DELAY_S:g} ms the load is not "
            "the one that was asked for, and these figures are not to be trusted"
        )
    return f"the generator kept up: {late}"
