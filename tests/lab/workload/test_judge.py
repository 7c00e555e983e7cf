"""Measures and capacity."""

from __future__ import annotations

from typing import Any

import pytest

from extproc.lab.workload.judge import (
    Slo,
    TenantMetrics,
    attainment_at_most,
    measure,
    percentile,
    satisfaction,
)
from extproc.lab.workload.running import FleetResult, FlightState, LabFlight, PodTotals
from tests.lab.lab import arrival


def flight(
    at_s: float = 1.0, *, ttft_s: float | None = 0.1, tpot_s: float = 0.01, **fields: Any
) -> LabFlight:
    """A finished request with 11 tokens, or a shed one where there is no TTFT."""
    who = {"adapter": fields.pop("adapter", "a"), "tenant": fields.pop("tenant", "")}
    made = LabFlight("0", arrival(at_s, output_tokens=11, **who), 0)
    made.has_objectives = fields.pop("has_objectives", True)
    made.pod = fields.pop("pod", "p1")
    if ttft_s is None:
        made.end(FlightState.SHED, at_s)
        return made
    made.dispatched_s, made.first_token_s = at_s, at_s + ttft_s
    made.end(fields.pop("state", FlightState.FINISHED), at_s + ttft_s + 10 * tpot_s)
    return made


def result(
    *flights: LabFlight, pods: tuple[PodTotals, ...] = (), warm_up_s: float = 0
) -> FleetResult:
    totals = pods or (PodTotals("p1", 0, 0), PodTotals("p2", 0, 0))
    return FleetResult(flights, totals, warm_up_s, 100.0)


def test_only_what_finished_in_time_attains_the_slo() -> None:
    slo = Slo(ttft_s=0.5, tpot_s=0.05)
    metrics = measure(
        result(
            flight(),
            flight(ttft_s=0.6),
            flight(tpot_s=0.06),
            flight(ttft_s=None),
            flight(state=FlightState.FAILED),
        ),
        slo,
    )

    assert metrics.attainment == pytest.approx(1 / 5)
    assert metrics.num_offered == 5
    assert metrics.fates == {"failed": 1, "finished": 3, "shed": 1}


def test_the_warm_up_does_not_count() -> None:
    metrics = measure(result(flight(1.0, ttft_s=9.0), flight(3.0), warm_up_s=2.0), Slo())

    assert metrics.num_offered == 1
    assert metrics.attainment == 1
    with pytest.raises(ValueError, match="warm-up"):
        measure(result(flight(1.0), warm_up_s=2.0), Slo())


def test_rates_are_per_second_between_the_warm_up_and_the_last_arrival() -> None:
    """What finished in that time counts, whenever it came; tails after it do not."""
    before = flight(9.5, ttft_s=0.6)
    metrics = measure(result(before, *(flight(10 + n / 8) for n in range(81)), warm_up_s=10), Slo())

    assert metrics.throughput_rps == pytest.approx((1 + 79) / 10)


def test_slora_satisfaction_falls_with_the_square_and_misses_count_as_nothing() -> None:
    assert satisfaction(0.0) == 1
    assert satisfaction(3.0) == pytest.approx(0.75)
    assert satisfaction(6.0) == satisfaction(60.0) == 0
    metrics = measure(result(flight(ttft_s=3.0), flight(ttft_s=None)), Slo())
    assert metrics.slora_satisfaction == pytest.approx(0.375)


def test_loads_are_per_thousand_requests() -> None:
    pods = (PodTotals("p1", 3, 2), PodTotals("p2", 1, 0))
    metrics = measure(result(*(flight() for _ in range(8)), pods=pods), Slo())

    assert metrics.loads_per_1000 == 500
    assert metrics.disk_loads_per_1000 == 250


def test_the_queue_wait_is_from_the_pod_to_the_first_step() -> None:
    first, second, shed = flight(1.0), flight(2.0), flight(ttft_s=None)
    first.scheduled_s, second.scheduled_s = 1.1, 2.3

    assert measure(result(first, second, shed), Slo()).queue_wait_s == pytest.approx(0.2)


def test_max_over_mean_load_counts_idle_pods() -> None:
    assert measure(result(flight(pod="p1")), Slo()).max_over_mean_load == pytest.approx(2)
    even = result(flight(pod="p1"), flight(pod="p2"))
    assert measure(even, Slo()).max_over_mean_load == pytest.approx(1)


FIRST_TOKENS = [("a", 0.1), ("b", 0.2), ("c", 7.0)]


def test_the_worst_adapter_is_the_one_served_worst() -> None:
    good = [flight(adapter="good") for _ in range(40)]
    bad = [flight(adapter="bad", ttft_s=9.0 if n % 2 else 0.1) for n in range(30)]
    tenant = [flight(adapter="good", tenant="t", ttft_s=9.0 if n % 3 else 0.1) for n in range(30)]

    assert measure(result(*good, *bad), Slo()).worst_adapter == pytest.approx(0.5)
    assert measure(result(*good, *tenant), Slo()).worst_adapter == pytest.approx(1 / 3)


def test_tails_are_of_the_median_adapter_and_of_the_worst_one_and_a_wait_in_vain_counts() -> None:
    groups = [[flight(adapter=name, ttft_s=s) for _ in range(30)] for name, s in FIRST_TOKENS]
    refused = [flight(2.0, adapter="d", ttft_s=None) for _ in range(30)]
    for each in refused:
        each.end(FlightState.SHED, 11.0)

    served = measure(result(*groups[0], *groups[1], *groups[2]), Slo())
    metrics = measure(result(*groups[0], *groups[1], *refused), Slo())

    assert served.adapter_ttft_p99_s == pytest.approx(0.2)
    assert served.worst_adapter_ttft_p99_s == pytest.approx(7.0)
    assert metrics.worst_adapter_ttft_p99_s == pytest.approx(9.0)


def test_rare_adapters_that_are_given_up_show_together() -> None:
    """0.5 % of the requests: attainment hardly sees them."""
    popular = [flight(adapter="popular") for _ in range(6000)]
    rare = [flight(adapter=f"rare-{n}", ttft_s=None) for n in range(30)]
    few = [flight(adapter="popular"), flight(adapter="rare", ttft_s=None)]

    metrics = measure(result(*popular, *rare), Slo())
    assert metrics.attainment > 0.99
    assert metrics.worst_adapter == 0
    assert measure(result(*popular, *rare[:29]), Slo()).worst_adapter == 0
    assert measure(result(*few), Slo()).worst_adapter == 0.5


def test_rare_adapters_left_over_join_other_rare_ones_and_no_popular_one() -> None:
    popular = [flight(adapter="popular") for _ in range(6000)]
    rare = [flight(adapter=f"rare-{n:02}", ttft_s=None if n % 2 else 0.1) for n in range(30)]
    left_over = [flight(adapter=f"rare-{n}", ttft_s=None) for n in range(70, 80)]

    metrics = measure(result(*popular, *rare, *left_over), Slo())
    assert metrics.worst_adapter == pytest.approx(15 / 40)


def test_percentiles_are_values_that_occurred() -> None:
    values = [float(number) for number in range(1, 101)]

    assert percentile(values, 0.5) == 50
    assert percentile(values, 0.99) == 99
    assert percentile(values, 1.0) == 100
    assert percentile([3.0], 0.01) == 3
    assert percentile([], 0.5) == 0


def test_what_can_still_be_attained_counts_every_sure_miss_after_the_warm_up_and_no_other() -> None:
    slo = Slo(ttft_s=0.5, tpot_s=0.05)
    flights = [
        flight(1.0, ttft_s=9.0),  # before the warm-up
        flight(2.0),
        flight(2.0, ttft_s=0.6),
        flight(2.0, tpot_s=0.06),
        flight(2.0, ttft_s=None),
        LabFlight("waits", arrival(8.0), 0),
        LabFlight("waits too long", arrival(7.0), 0),
    ]
    late = LabFlight("late", arrival(3.0), 0)
    late.first_token_s = 4.0
    early = LabFlight("early", arrival(3.0), 0)
    early.first_token_s = 3.1

    at_most = attainment_at_most(
        [*flights, late, early], 9.0, slo=slo, warm_up_s=1.5, num_counted=100
    )

    assert at_most == pytest.approx(0.95)


def test_a_request_without_objectives_is_served_well_once_it_finishes() -> None:
    slow = {"ttft_s": 30.0, "tpot_s": 1.0, "has_objectives": False}
    waiting = LabFlight("waiting", arrival(1.0), 0, False)
    metrics = measure(
        result(flight(**slow), flight(ttft_s=None, has_objectives=False), waiting), Slo()
    )

    assert metrics.attainment == pytest.approx(1 / 3)
    assert attainment_at_most([waiting], 99.0, slo=Slo(), warm_up_s=0, num_counted=1) == 1


def test_goodput_is_what_was_served_well_per_second_of_arrivals() -> None:
    good = [flight(at_s / 10) for at_s in range(81)]
    metrics = measure(result(flight(0.5, ttft_s=2.0), flight(4.0, ttft_s=None), *good), Slo())

    assert metrics.goodput_rps == pytest.approx(81 / 8.0)


def test_each_tenant_that_the_workload_names_is_judged_by_itself() -> None:
    """The longest wait ends with the first token, with a refusal, or not at all."""
    refused = flight(2.0, ttft_s=None, tenant="batch")
    refused.end(FlightState.SHED, 7.0)
    run = FleetResult(
        [flight(tenant="people"), flight(ttft_s=3.0, tenant="batch"), refused],
        (PodTotals("p1", 0, 0),),
        0.0,
        100.0,
        tenants=("people", "batch", "nobody"),
    )
    metrics = measure(run, Slo())
    held = LabFlight("held", arrival(40.0, tenant="batch"), 0)
    still = measure(FleetResult([held], run.pods, 0.0, 100.0, tenants=("batch",)), Slo())

    assert metrics.tenants["people"].attainment == 1.0
    assert metrics.tenants["people"].longest_wait_s == pytest.approx(0.1)
    assert metrics.tenants["batch"] == TenantMetrics(2, 0.0, 5.0)
    assert metrics.tenants["nobody"] == TenantMetrics(0, 0.0, 0.0)
    assert still.tenants["batch"].longest_wait_s == 60.0


def test_refusals_are_counted_by_their_reason() -> None:
    refused = [flight(ttft_s=None) for _ in range(3)]
    for each, reason in zip(refused, ("late", "saturated", "late"), strict=True):
        each.reason = reason

    assert measure(result(flight(), *refused), Slo()).refusals == {"late": 2, "saturated": 1}
