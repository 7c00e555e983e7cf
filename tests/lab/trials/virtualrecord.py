"""The record that a run in virtual time would have left."""

from __future__ import annotations

from functools import cache
from random import Random

from extproc.lab.fleet.settings import FleetSettings
from extproc.lab.trials.whatif import Case, simulate
from extproc.lab.workload.recorded import Record, RecordedRequest
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
    told = [RecordedRequest(f.arrival, f.ttft_s, f.tpot_s, "founding") for f in flights]
    return Record(tuple(told), 0, 2, 2, 1, 0, is_whole=True)
