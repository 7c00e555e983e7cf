"""The informed greedy: when it places, holds and sheds, and what its forecasts are worth."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from extproc.lab.engine.profiles import H100_8B
from extproc.lab.fleet.fleet import Fleet
from extproc.lab.fleet.settings import FleetEvent, FleetSettings, PodKind, PodLoss
from extproc.lab.opponents import opponent
from extproc.lab.trials.oracle import Oracle, attach_oracles
from extproc.lab.workload.judge import Slo, measure
from extproc.lab.workload.requests import Workload
from extproc.lab.workload.running import FleetResult, FlightState
from extproc.types import Choice, RequestInfo, Snapshot, Wait
from tests.conftest import some
from tests.lab.lab import arrival, poisson, workload

SLO = Slo()


def served(
    work: Workload, age_s: float = 0.0, events: Sequence[FleetEvent] = (), **fields: int
) -> FleetResult:
    settings = FleetSettings(**fields)  # type: ignore[arg-type]
    fleet = Fleet(settings, work, lambda: Oracle(SLO, age_s), seed=1, events=events)
    attach_oracles(fleet)
    return fleet.run()


def test_it_goes_where_its_adapter_runs_rather_than_to_an_idle_pod() -> None:
    work = workload(*(arrival(0.1 * number, "a", output_tokens=100) for number in range(5)))

    assert len({flight.pod for flight in served(work, num_pods=3, max_loras=2).flights}) == 1


def test_a_burst_that_one_pod_cannot_take_in_time_is_spread() -> None:
    work = workload(*(arrival(0.0, "a", prompt_tokens=2000) for _ in range(16)))
    result = served(work, num_pods=4, max_loras=2)

    assert len({flight.pod for flight in result.flights}) > 1
    assert measure(result, SLO).attainment == 1.0


def test_it_holds_a_request_until_a_slot_is_free() -> None:
    work = workload(arrival(0.0, "a", output_tokens=20), arrival(0.05, "b"))
    first, second = served(work, num_pods=1, max_loras=1).flights

    assert first.ended_s is not None
    assert second.dispatched_s is not None
    assert second.dispatched_s >= first.ended_s - 0.02
    assert second.queue_wait_s == pytest.approx(0.0, abs=0.02)
    assert SLO.is_met(second)


def test_it_goes_where_the_beginning_of_the_prompt_is_cached() -> None:
    """The pods differ in nothing else once the first request is done."""
    long = {"prompt_tokens": 4000, "prefix": "text", "prefix_tokens": 3900, "output_tokens": 2}
    for seed in range(4):
        work = workload(*(arrival(2.0 * number, "a", **long) for number in range(3)))
        fleet = Fleet(FleetSettings(num_pods=4), work, lambda: Oracle(SLO), seed=seed)
        attach_oracles(fleet)
        first, second, third = fleet.run().flights

        assert first.pod == second.pod == third.pod
        assert (second.ttft_s or 9) < (first.ttft_s or 0) / 2


def test_it_does_not_shed_a_prompt_that_is_in_time_where_its_beginning_is_cached() -> None:
    """The whole prompt would take longer than the objective on any pod."""
    first = arrival(0.0, "a", prompt_tokens=6100, prefix="text", prefix_tokens=6000)
    second = arrival(10.0, "a", prompt_tokens=8000, prefix="text", prefix_tokens=6000)
    slo = Slo(ttft_s=0.3)
    fleet = Fleet(FleetSettings(num_pods=1), workload(first, second), lambda: Oracle(slo), seed=1)
    attach_oracles(fleet)

    assert [slo.is_met(flight) for flight in fleet.run().flights] == [True, True]


@pytest.mark.parametrize("age_s", [0.0, 0.05, 1.0])
def test_who_else_looks_at_a_pod_changes_no_decision(age_s: float) -> None:
    """An old state is as old in what it says of cached beginnings."""

    class Looking(Oracle):
        def choose(
            self, snapshot: Snapshot, request: RequestInfo, *, rng: random.Random
        ) -> Choice | Wait:
            assert self._fleet is not None
            for pod in self._fleet.pods.values():
                pod.catch_up(snapshot.now)
            return super().choose(snapshot, request, rng=rng)

    rng, names = random.Random(1), "abcdef"
    work = workload(
        *(
            arrival(
                number / 40,
                rng.choice(names),
                prompt_tokens=2100,
                prefix=f"text-{rng.randrange(4)}",
                prefix_tokens=2000,
            )
            for number in range(200)
        ),
        adapters=names,
    )
    digests = set()
    for make in (Oracle, Looking):
        settings = FleetSettings(num_pods=4, scrape_interval_s=1.0, completion_flush_s=1.0)
        fleet = Fleet(settings, work, lambda make=make: make(SLO, age_s), seed=1)  # type: ignore[misc]
        attach_oracles(fleet)
        digests.add(fleet.run().digest())

    assert len(digests) == 1


def test_it_sheds_what_is_certainly_too_late() -> None:
    work = workload(arrival(0.0, "a", output_tokens=400), arrival(0.1, "b"))
    first, second = served(work, num_pods=1, max_loras=1).flights

    assert (first.state, second.state, second.status) == (
        FlightState.FINISHED,
        FlightState.SHED,
        429,
    )
    assert second.dispatched_s is None


def test_the_last_slot_goes_to_the_adapter_that_serves_most_of_the_held() -> None:
    long_one = arrival(0.05, "b", output_tokens=300)
    short_ones = [arrival(0.06 + 0.01 * number, "c", output_tokens=30) for number in range(3)]
    work = workload(arrival(0.0, "a", output_tokens=20), long_one, *short_ones)
    flights = served(work, num_pods=1, max_loras=1).flights

    assert [SLO.is_met(flight) for flight in flights] == [True, False, True, True, True]


def test_an_idle_pod_is_open_whatever_is_held_for_a_larger_one() -> None:
    """The held one would make better use of the slot, but is of a rank that does not fit."""
    ranks = {"large": 64, "also-large": 64, "small": 16}
    arrivals = (
        arrival(0.0, "large", output_tokens=400),
        arrival(0.1, "also-large", output_tokens=10),
        arrival(0.11, "small", output_tokens=100),
    )
    settings = FleetSettings(num_pods=2, kinds=(PodKind(1, max_lora_rank=64),), max_loras=1)
    work = Workload("test", arrivals, ranks)
    fleet = Fleet(settings, work, lambda: Oracle(SLO), seed=1)
    attach_oracles(fleet)
    *_, small = fleet.run().flights

    assert small.dispatched_s == small.arrival.at_s


def test_routers_share_what_they_hold() -> None:
    """Two oracles that knew only their own would both give the slot to what comes first."""
    long_ones = [arrival(0.05, "b", output_tokens=300)]
    short_ones = [arrival(0.06 + 0.01 * number, "c", output_tokens=30) for number in range(6)]
    work = workload(arrival(0.0, "a", output_tokens=20), *long_ones, *short_ones)
    flights = served(work, num_pods=1, max_loras=1, num_routers=2).flights

    assert {flight.router for flight in flights} == {0, 1}
    assert [SLO.is_met(flight) for flight in flights] == [True, False, *[True] * 6]


def test_it_survives_a_pod_that_routers_still_know() -> None:
    result = served(poisson(60, rate_rps=20), 0.05, [PodLoss(1.0, 0)], num_pods=2)
    assert {f.state for f in result.flights} <= {
        FlightState.FINISHED,
        FlightState.FAILED,
        FlightState.SHED,
    }


def test_with_the_truth_it_sends_nothing_to_a_dead_pod() -> None:
    result = served(poisson(60, rate_rps=20), 0.0, [PodLoss(1.0, 0)], num_pods=2)
    failed = [f for f in result.flights if f.state is FlightState.FAILED]

    assert all(f.arrival.at_s < 1.0 for f in failed)


def test_an_old_state_is_worth_less_than_a_fresh_one() -> None:
    work = poisson(200, rate_rps=60, num_adapters=12, output_tokens=300)
    fresh, stale = (
        measure(served(work, age_s, num_pods=3, max_loras=4), SLO) for age_s in (0.0, 5.0)
    )

    assert fresh.attainment > stale.attainment


@pytest.mark.parametrize(("rate_rps", "num"), some([(20.0, 200), (60.0, 500)], 1))
def test_no_policy_beats_it_with_or_without_holding(rate_rps: float, num: int) -> None:
    work = poisson(num, rate_rps=rate_rps, num_adapters=30, output_tokens=300)
    informed = served(work, num_pods=3, max_loras=4)

    for policy in ("founding_hold_slots", "bounded_loads", "random"):
        make = opponent(policy)
        assert make is not None
        other = Fleet(FleetSettings(num_pods=3, max_loras=4), work, make, seed=1).run()
        assert measure(informed, SLO).attainment >= measure(other, SLO).attainment, policy


def test_the_same_seed_decides_everything() -> None:
    work = poisson(80, rate_rps=40, num_adapters=30, output_tokens=300)
    first, second = (served(work, num_pods=3, max_loras=4, num_routers=2) for _ in range(2))

    assert first.to_bytes() == second.to_bytes()


def test_a_burst_of_long_prompts_is_not_forecast_too_well() -> None:
    """Prompts beyond a step's token budget take several steps; what is admitted keeps its SLO."""
    budget = H100_8B.max_num_batched_tokens
    work = workload(*(arrival(0.001 * n, "a", prompt_tokens=budget // 4) for n in range(40)))
    result = served(work, num_pods=1, max_loras=2)
    sent = [flight for flight in result.flights if flight.dispatched_s is not None]

    assert 0 < len(sent) < 40
    assert all(SLO.is_met(flight) for flight in sent)
