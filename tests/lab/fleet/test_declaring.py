"""Adapters that pods do not have at first, in the virtual fleet."""

from __future__ import annotations

import pytest

from extproc.lab.workload.running import FlightState
from extproc.routing.policies import LeastPending
from tests.lab.fleet.test_fleet import OneAtATime
from tests.lab.lab import arrival, poisson, run, workload


@pytest.mark.parametrize("num_routers", [1, 2])
def test_what_is_declared_is_loaded_for_those_that_ask(num_routers: int) -> None:
    work = poisson(60, rate_rps=10, num_adapters=6)

    result = run(work, num_pods=2, max_loras=4, num_routers=num_routers, loads_adapters=True)

    assert {flight.state for flight in result.flights} == {FlightState.FINISHED}


def dispatched_s(policy: type, first: str | None) -> tuple[float, float]:
    """Return when a request for `b` is sent that comes beside a long one, and when that ends."""
    work = workload(arrival(0.0, first, output_tokens=500), arrival(2.0, "b"))
    result = run(work, policy, num_pods=1, max_loras=1, max_hold_s=60.0, loads_adapters=True)
    long, short = result.flights
    assert long.ended_s is not None
    assert short.dispatched_s is not None
    return short.dispatched_s, long.ended_s


def test_what_held_requests_wait_for_is_loaded_before_there_is_room_for_them() -> None:
    """A load takes 101 ms here, and ends while the long request runs."""
    sent_s, ended_s = dispatched_s(OneAtATime, None)

    assert ended_s <= sent_s < ended_s + 0.1


def test_a_load_waits_for_a_slot_that_no_running_adapter_has() -> None:
    sent_s, ended_s = dispatched_s(LeastPending, "a")

    assert ended_s <= sent_s
