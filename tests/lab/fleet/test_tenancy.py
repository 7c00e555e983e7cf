"""What a workload's requests claim, and the queue that they are held in."""

from __future__ import annotations

import random
from typing import Any

from extproc.lab.fleet.fleet import Fleet
from extproc.lab.fleet.settings import FleetSettings
from extproc.lab.workload.judge import Slo
from extproc.lab.workload.requests import Tenant, Workload
from extproc.lab.workload.running import FlightState
from extproc.queue import QueueSettings
from extproc.tenancy import NO_CLAIM, Claim
from extproc.types import Choice, RequestInfo, Snapshot, Wait
from tests.lab.lab import arrival, watching

TENANTS = {"people": Tenant(weight=2.0), "batch": Tenant(priority=-1, has_objectives=False)}


def claims(**settings: Any) -> dict[str, Claim]:
    """The claims of a request each of two tenants and of somebody else."""
    seen: dict[str, Claim] = {}

    def look(_snapshot: Snapshot, request: RequestInfo) -> None:
        seen[names[int(request.request_id)]] = request.claim

    names = ["people", "batch", "other"]
    arrivals = tuple(arrival(float(n), tenant=name) for n, name in enumerate(names))
    work = Workload("w", arrivals, {"a": 16}, TENANTS)
    Fleet(FleetSettings(num_pods=1, **settings), work, watching(look), seed=1).run()
    return seen


def test_requests_claim_their_tenant_s_priority_and_share() -> None:
    assert claims() == {
        "people": Claim(tenant="people", weight=2.0),
        "batch": Claim(tenant="batch", priority=-1),
        "other": NO_CLAIM,
    }


def test_who_has_objectives_claims_them_where_the_fleet_declares_any() -> None:
    found = claims(declared=Slo(ttft_s=0.4, tpot_s=0.03))

    assert {name: (claim.ttft_s, claim.tpot_s) for name, claim in found.items()} == {
        "people": (0.4, 0.03),
        "batch": (None, None),
        "other": (0.4, 0.03),
    }


def test_routers_hold_requests_in_the_queue_that_was_asked_for() -> None:
    """What it has no place for gets the reason why."""

    class Never:
        def choose(
            self, snapshot: Snapshot, request: RequestInfo, *, rng: random.Random
        ) -> Choice | Wait:
            return Wait(snapshot.now + 100, "never")

    work = Workload("w", tuple(arrival(0.1 * n) for n in range(5)), {"a": 16})
    settings = FleetSettings(num_pods=1, queue=QueueSettings(max_requests=2), drain_s=1.0)
    flights = Fleet(settings, work, Never, seed=1).run().flights
    shed = [flight for flight in flights if flight.state is FlightState.SHED]

    assert len(shed) == 3
    assert {(flight.status, flight.reason) for flight in shed} == {(429, "saturated")}
