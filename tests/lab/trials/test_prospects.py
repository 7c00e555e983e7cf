"""What other policies would have given for a record, with intervals by blocks."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import pytest

from extproc.lab.trials.whatif import Case, prospects
from extproc.lab.workload.intervals import Interval
from extproc.lab.workload.judge import Slo
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


def made(ttfts_s: Sequence[float | None]) -> FleetResult:
    flights = [answered(number, ttft_s) for number, ttft_s in enumerate(ttfts_s)]
    return FleetResult(flights, [PodTotals("pod", len(flights) // 10, 0)], 0.0, 2_000.0)


def test_prospects_are_those_of_the_runs_with_gains_over_the_first() -> None:
    slow = made([0.1, 0.9] * 500)
    fast = made([0.1, 0.1, 0.1, None] * 250)
    cases = [FOUNDING, Case("least_harm", 2, 2)]
    first, second = prospects(cases, {cases[0]: slow, cases[1]: fast}.__getitem__, Slo())

    assert (first.served_well.mean, first.gain) == (0.5, Interval(0.0, 0.0, 0.0))
    assert first.ttft_p50_s.mean == pytest.approx(0.1)
    assert (second.case, second.served_well.mean, second.gain.mean) == (cases[1], 0.75, 0.25)
    assert second.ttft_p99_s.mean == inf  # one in four has no first token
    assert (second.loads_per_1000, second.worst_adapter) == (100, 0.75)


def test_intervals_are_of_blocks_not_of_single_requests() -> None:
    """Half of the requests are bad in both: in one run of them, or one in two."""
    mixed = made([0.1, 0.9] * 500)
    lumped = made([0.1] * 500 + [0.9] * 500)
    (even,) = prospects([FOUNDING], lambda _: mixed, Slo())
    (uneven,) = prospects([FOUNDING], lambda _: lumped, Slo())

    assert (even.served_well.low, even.served_well.high) == (0.5, 0.5)
    assert (uneven.served_well.low or 1.0) < 0.35
    assert (uneven.served_well.high or 0.0) > 0.65
