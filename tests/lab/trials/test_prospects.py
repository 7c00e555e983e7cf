"""What other policies would have given for a record, with intervals by blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

import pytest

from extproc.lab.trials.prospects import prospects
from extproc.lab.trials.whatif import Case
from extproc.lab.workload.intervals import Interval
from extproc.lab.workload.judge import Slo, measure
from extproc.lab.workload.requests import Arrival
from extproc.lab.workload.running import FleetResult, FlightState, LabFlight, PodTotals
from tests.lab.trials.virtualrecord import FOUNDING


def answered(number: int, ttft_s: float | None) -> LabFlight:
    flight = LabFlight(str(number), Arrival(float(number), "a", 10, 11), 0)
    flight.pod, flight.dispatched_s = "pod", flight.arrival.at_s
    if ttft_s is not None:
        flight.first_token_s = flight.arrival.at_s + ttft_s
        flight.end(FlightState.FINISHED, flight.first_token_s + 0.1)
    return flight


def made(ttfts_s: Sequence[float | None], loaded_at_s: Sequence[float] = ()) -> FleetResult:
    flights = [answered(number, ttft_s) for number, ttft_s in enumerate(ttfts_s)]
    pod = PodTotals("pod", len(loaded_at_s), 0, loaded_at_s)
    return FleetResult(flights, [pod], 0.0, 2_000.0)


def test_prospects_are_those_of_the_runs_with_gains_over_the_first() -> None:
    slow = made([0.1, 0.9] * 500)
    fast = made([0.1, 0.1, 0.1, None] * 250, range(0, 1_000, 10))
    cases = [FOUNDING, Case("least_harm", 2, 2)]
    first, second = prospects(cases, {cases[0]: slow, cases[1]: fast}.__getitem__, Slo())

    assert (first.served_well.mean, first.gain) == (0.5, Interval(0.0, 0.0, 0.0))
    assert first.ttft_p50_s.mean == pytest.approx(0.1)
    assert (second.case, second.served_well.mean, second.gain.mean) == (cases[1], 0.75, 0.25)
    assert second.ttft_p99_s.mean == inf  # one in four has no first token
    assert second.loads_per_1000 == Interval(100, 100, 100)
    assert (first.loads_per_1000.mean, second.worst_adapter.mean) == (0, 0.75)


def test_intervals_are_of_blocks_not_of_single_requests() -> None:
    """Half of the requests are bad in both: in one run of them, or one in two."""
    mixed = made([0.1, 0.9] * 500)
    lumped = made([0.1] * 500 + [0.9] * 500)
    (even,) = prospects([FOUNDING], lambda _: mixed, Slo())
    (uneven,) = prospects([FOUNDING], lambda _: lumped, Slo())

    assert (even.served_well.low, even.served_well.high) == (0.5, 0.5)
    assert (uneven.served_well.low or 1.0) < 0.35
    assert (uneven.served_well.high or 0.0) > 0.65


def test_loads_have_an_interval_by_the_blocks_in_which_they_were() -> None:
    """A hundred loads, all in the first half, or after the last request, in its block."""
    (early,) = prospects([FOUNDING], lambda _: made([0.1] * 1_000, range(0, 500, 5)), Slo())
    (late,) = prospects([FOUNDING], lambda _: made([0.1] * 1_000, [1_500.0] * 100), Slo())

    assert early.loads_per_1000.mean == late.loads_per_1000.mean == 100
    assert (early.loads_per_1000.low or 100.0) < 70
    assert (early.loads_per_1000.high or 0.0) > 130
    assert late.loads_per_1000.low == 0


def test_the_worst_adapter_has_an_interval_by_the_blocks_in_which_it_was_served_badly() -> None:
    """Every second request is of an adapter that waits in the second half."""
    result = made([0.1] * 500 + [0.1, 0.9] * 250)
    for number, flight in enumerate(result.flights):
        flight.arrival = replace(flight.arrival, adapter="ab"[number % 2])
    (found,) = prospects([FOUNDING], lambda _: result, Slo())

    assert found.worst_adapter.mean == measure(result, Slo()).worst_adapter == 0.5
    assert (found.worst_adapter.low or 1.0) < 0.35
    assert (found.worst_adapter.high or 0.0) > 0.65


def test_a_block_may_lack_an_adapter() -> None:
    """Forty requests of another adapter are in one block of twenty."""
    result = made([0.9] * 40 + [0.1] * 760)
    for number, flight in enumerate(result.flights):
        flight.arrival = replace(flight.arrival, adapter="ab"[number >= 40])
    (found,) = prospects([FOUNDING], lambda _: result, Slo())

    assert found.worst_adapter == Interval(0.0, 0.0, 1.0)
