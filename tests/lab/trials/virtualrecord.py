"""The record that a run in virtual time would have left."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from random import Random

from extproc.lab.fleet.settings import FleetSettings
from extproc.lab.trials.whatif import Case, simulate
from extproc.lab.workload.recorded import Record, RecordedRequest
from extproc.lab.workload.running import LabFlight
from extproc.lab.workload.synthetic import zipf

SETTINGS = FleetSettings(num_pods=2, max_loras=2)
FOUNDING = Case("founding", 2, 2)


def _lengths(rng: Random) -> tuple[int, int]:
    return rng.randint(50, 300), rng.randint(8, 20)


@cache
def made_record() -> Record:
    """Return a record of `founding` on `SETTINGS`."""
    workload = zipf(
        "z", num_adapters=6, exponent=1.0, rate_rps=20, duration_s=20, seed=1, lengths=_lengths
    )
    requests = tuple(RecordedRequest(each, None, None, "founding") for each in workload.arrivals)
    unknown = Record(requests, 0, 2, 2, 1, 0, is_whole=True)
    flights = simulate(unknown, SETTINGS, FOUNDING).flights
    return replace(unknown, requests=tuple(map(_as_recorded, flights)))


def _as_recorded(flight: LabFlight) -> RecordedRequest:
    assert flight.ended_s is not None
    duration_s = flight.ended_s - flight.arrival.at_s
    own = flight.arrival, flight.ttft_s, flight.tpot_s, "founding"
    return RecordedRequest(*own, duration_s, flight.pod)
