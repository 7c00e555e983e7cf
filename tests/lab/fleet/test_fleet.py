"""The fleet in virtual time: conservation, determinism, and who knows what when."""

from __future__ import annotations

import random
from collections import Counter
from math import inf
from statistics import mean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.lab.engine.engine import Engine
from extproc.lab.engine.profiles import H100_8B
from extproc.lab.engine.records import EngineRequest
from extproc.lab.fleet.fleet import Fleet
from extproc.lab.fleet.settings import (
    AdapterRegistered,
    FleetEvent,
    FleetSettings,
    PodJoin,
    PodKind,
    PodLoss,
    SlowPod,
)
from extproc.lab.fleet.virtualpod import FleetPod
from extproc.lab.fleet.virtualrouter import prefix_hashes
from extproc.lab.workload.requests import Workload
from extproc.lab.workload.running import FlightState, LabFlight
from extproc.reports.pace import MAX_S
from extproc.routing.policies import Founding, LeastPending, RandomChoice, RoundRobin
from extproc.types import Choice, RequestInfo, Snapshot, Wait
from tests.lab.lab import arrival, poisson, run, watching, workload


def events() -> st.SearchStrategy[list[FleetEvent]]:
    at_s = st.floats(0.0, 3.0)
    return st.lists(
        st.one_of(
            st.builds(PodLoss, at_s=at_s, pod=st.just(0)),
            st.builds(PodJoin, at_s=at_s),
            st.builds(SlowPod, at_s=at_s, pod=st.just(0), factor=st.floats(0.5, 4)),
            st.builds(AdapterRegistered, at_s=at_s, adapter=st.just("adapter-001")),
        ),
        max_size=3,
        unique_by=type,
    )


class OneAtATime:
    """Holds requests until a pod has none."""

    def choose(
        self, snapshot: Snapshot, request: RequestInfo, *, rng: random.Random
    ) -> Choice | Wait:
        free = [view for view in snapshot.endpoints if not view.num_pending]
        return Choice(free[:1]) if free else Wait(inf, "one")


@given(
    num=st.integers(0, 60),
    seed=st.integers(0, 1000),
    happenings=events(),
    num_routers=st.integers(1, 3),
    peer_delay_s=st.none() | st.floats(0.0, 0.2),
    max_pending=st.none() | st.integers(1, 5),
    patience_s=st.none() | st.floats(0.01, 0.5),
    drain_s=st.sampled_from([0.0, 1.0, 60.0]),
    loads_adapters=st.booleans(),
    policy=st.sampled_from([LeastPending, Founding, RandomChoice, OneAtATime]),
)
def test_every_request_has_exactly_one_final_state(
    num: int,
    seed: int,
    happenings: list[FleetEvent],
    num_routers: int,
    peer_delay_s: float | None,
    max_pending: int | None,
    patience_s: float | None,
    drain_s: float,
    loads_adapters: bool,
    policy: Any,
) -> None:
    """in = finished + failed + shed + abandoned + running, and no pod or pool disagrees."""
    fleet = Fleet(
        FleetSettings(
            num_pods=2,
            num_routers=num_routers,
            peer_delay_s=peer_delay_s,
            peer_loss=0.2,
            max_loras=2,
            max_pending=max_pending,
            patience_s=patience_s,
            drain_s=drain_s,
            loads_adapters=loads_adapters,
        ),
        poisson(num, rate_rps=40, seed=seed),
        policy,
        seed=seed,
        events=happenings,
    )
    result = fleet.run()

    states = Counter(flight.state for flight in result.flights)
    assert states.total() == num
    in_pods = sum(len(pod.flights) for pod in fleet.pods.values())
    num_held = len(fleet._tickets)
    assert states[FlightState.RUNNING] == in_pods + num_held
    for flight in result.flights:
        assert (flight.state is FlightState.RUNNING) == (flight.ended_s is None)
        assert (flight.state is FlightState.SHED) == (flight.status != 0)
    for pod in fleet.pods.values():
        sent = [f for f in result.flights if f.pod == pod.address and f.has_run]
        assert pod.engine.counters.num_submitted == len(sent)
    unheard = sum(len(router.pool.flights) for router in fleet.routers)
    assert in_pods <= unheard <= sum(bool(flight.pod) for flight in result.flights)
    assert sum(len(router.router.queue) for router in fleet.routers) == num_held


def test_the_same_seed_gives_the_same_bytes() -> None:
    work = poisson(200, rate_rps=40)
    first = run(work, RandomChoice, num_routers=2)
    second = run(work, RandomChoice, num_routers=2)
    other = run(work, RandomChoice, num_routers=2, seed=2)

    assert first.to_bytes() == second.to_bytes()
    assert first.digest() != other.digest()


def test_looking_at_pods_changes_nothing() -> None:
    """Pods are simulated when somebody looks; how often must not matter."""
    work = poisson(300, rate_rps=60, num_adapters=30)
    often = run(work, RoundRobin, scrape_interval_s=0.007, max_loras=2, report_expiry_s=0.0)
    rarely = run(work, RoundRobin, scrape_interval_s=5.0, max_loras=2, report_expiry_s=0.0)

    assert [f.ended_s for f in often.flights] == [f.ended_s for f in rarely.flights]
    assert often.pods == rarely.pods


def test_what_a_token_is_learned_to_cost_is_what_requests_see() -> None:
    learned: list[float] = []

    class Watching(LeastPending):
        def choose(
            self, snapshot: Snapshot, request: RequestInfo, *, rng: random.Random
        ) -> Choice | Wait:
            views = snapshot.endpoints
            learned.extend(view.costs.decode.token_s for view in views if view.costs.decode)
            return super().choose(snapshot, request, rng=rng)

    flights = run(poisson(600, rate_rps=40), Watching, num_pods=2).flights
    seen = [flight.tpot_s for flight in flights if flight.arrival.output_tokens > 10]

    assert mean(learned) == pytest.approx(mean(s for s in seen if s is not None), rel=0.15)


def test_each_router_knows_the_time_per_output_token_of_its_requests() -> None:
    work = poisson(600, rate_rps=40, output_tokens=200)
    fleet = Fleet(FleetSettings(num_pods=2, num_routers=2), work, LeastPending, seed=1)
    flights = fleet.run().flights

    for number, router in enumerate(fleet.routers):
        tpots = router.accounting.tpots
        told_s = tpots.seconds[""] / tpots.num_responses.total()
        long = [f for f in flights if f.router == number and f.arrival.output_tokens > 20]
        seen_s = mean(flight.tpot_s for flight in long if flight.tpot_s is not None)

        assert told_s == pytest.approx(seen_s, rel=0.05)


def test_a_lone_request_takes_what_the_engine_says() -> None:
    work = workload(arrival(1.0, prompt_tokens=100, output_tokens=3))
    result = run(work, num_pods=1, max_loras=1)
    engine = Engine(H100_8B, max_loras=1, ranks={"a": 16})
    engine.submit(EngineRequest.of(arrival(1.0, prompt_tokens=100, output_tokens=3), "0"), now=1.0)
    now = 1.0
    while step := engine.step(now=now):
        now = step.ended_s

    assert result.flights[0].ended_s == pytest.approx(now)
    (pod,) = result.pods
    assert pod.num_loads == pod.num_disk_loads == len(pod.loaded_at_s) == 1
    assert 1.0 < pod.loaded_at_s[0] <= (result.flights[0].first_token_s or 0.0)


def test_a_completion_is_known_only_with_the_next_flush() -> None:
    """With a slow access log the second request still sees the first one pending."""
    seen: list[int] = []

    spy = watching(lambda snapshot, _: seen.append(snapshot.endpoints[0].num_in_flight))
    work = workload(arrival(0.0, output_tokens=1), arrival(1.0))
    for flush_s in (0.05, 30.0):
        run(work, spy, num_pods=1, completion_flush_s=flush_s)

    assert seen == [0, 0, 0, 1]


def told_counts(**settings: Any) -> list[int]:
    """What two routers knew of each other's requests when each of ten came, 0.1 s apart."""
    seen: list[int] = []

    spy = watching(lambda snapshot, _: seen.append(snapshot.endpoints[0].num_told))
    work = workload(*(arrival(number / 10, output_tokens=2000) for number in range(10)))
    run(work, spy, num_pods=1, num_routers=2, **settings)
    return seen


def test_routers_that_tell_each_other_know_the_others_picks_after_the_delay() -> None:
    at_once, later = told_counts(peer_delay_s=0.01), told_counts(peer_delay_s=0.35)

    assert max(at_once) > max(later) > 0
    assert all(soon >= late for soon, late in zip(at_once, later, strict=True))
    assert told_counts() == told_counts(peer_delay_s=0.01, peer_loss=1.0) == [0] * 10


def test_lost_messages_of_routers_leave_picks_unknown_until_all_is_told_again() -> None:
    work = poisson(200, rate_rps=40)
    settings = FleetSettings(num_routers=2, peer_delay_s=0.01, peer_loss=0.5, warm_up_s=0.0)
    fleet = Fleet(settings, work, LeastPending, seed=1)
    fleet.run()
    told = [router.pool.peer_picks for router in fleet.routers]
    picked = sum(bool(flight.pod) for flight in fleet.flights.values())
    assert picked * 0.3 < sum(each.num_received for each in told) < picked * 0.7

    # Nothing runs at the end, so whatever is counted was lost. The last updates are whole.
    fleet._agenda.go_to(fleet.now + 20.0)
    assert [each.num_in_flight for each in told] == [0, 0]


def test_a_scrape_arrives_with_its_age() -> None:
    ages: list[float] = []

    def look(snapshot: Snapshot, _request: RequestInfo) -> None:
        at_s = snapshot.endpoints[0].reported_at_s
        assert at_s is not None
        ages.append(snapshot.now - at_s)

    work = workload(*(arrival(2 + 0.1 * number) for number in range(40)))
    run(work, watching(look), num_pods=1, scrape_interval_s=0.5, scrape_delay_s=0.2)

    assert min(ages) >= 0.2
    assert 0.5 < max(ages) <= MAX_S + 0.2 + 1e-9


def test_every_pod_is_known_from_the_first_look_on() -> None:
    """Routers look at once, as the scraper does; rare scrapes leave no pod out at the start."""
    known: list[int] = []

    def look(snapshot: Snapshot, _request: RequestInfo) -> None:
        known.append(len(snapshot.endpoints))
        assert all(view.is_known for view in snapshot.endpoints)

    work = workload(*(arrival(0.1 * number) for number in range(1, 10)))
    run(work, watching(look), num_pods=4, scrape_interval_s=1.0, scrape_delay_s=0.01)

    assert known == [4] * 9


def test_adapters_show_on_the_page_from_their_first_token_to_the_step_before_their_last() -> None:
    pod = _pod()
    pod.submit(LabFlight("0", arrival(0.0, "a", output_tokens=3), 0), 0.0)
    ends = _step_ends("a", 3)

    assert pod.report(0.001)[0].active_adapters == frozenset()
    assert pod.report(ends[0])[0].active_adapters == {"a"}
    report, _ = pod.report(ends[2])
    assert report.active_adapters == frozenset()
    assert [name for name, _ in report.adapter_log] == ["a"]
    assert report.adapter_log[0][1] == pytest.approx(1.7e9 + ends[1])
    assert report.num_running == 0
    assert report.max_loras == 8


def test_a_response_of_one_token_never_appears_on_the_page() -> None:
    pod = _pod()
    pod.submit(LabFlight("0", arrival(0.0, "a", output_tokens=1), 0), 0.0)

    assert pod.report(10.0)[0].adapter_log == ()
    assert pod.take_ended()[0].state is FlightState.FINISHED


@pytest.mark.parametrize(
    ("settings", "known_s"),
    [
        ({"scrape_interval_s": 0.2, "completion_flush_s": 9.0, "discovery_delay_s": 9.0}, 2.3),
        ({"scrape_interval_s": 9.0, "completion_flush_s": 0.4, "discovery_delay_s": 9.0}, 2.6),
        ({"scrape_interval_s": 9.0, "completion_flush_s": 9.0, "discovery_delay_s": 1.0}, 3.1),
    ],
    ids=["a refused scrape", "a failed request", "discovery"],
)
def test_a_lost_pod_takes_its_requests_with_it_and_is_hit_until_the_first_source_tells(
    settings: dict[str, Any], known_s: float
) -> None:
    work = workload(*(arrival(0.1 * number, output_tokens=400) for number in range(60)))
    result = run(work, RoundRobin, num_pods=2, events=[PodLoss(2.0, 0)], **settings)
    failed = [flight for flight in result.flights if flight.state is FlightState.FAILED]

    assert {flight.pod for flight in failed} == {"10.0.0.1:8000"}
    assert any(flight.has_run for flight in failed)
    late = [flight for flight in failed if not flight.has_run]
    assert late
    assert max(flight.arrival.at_s for flight in late) <= known_s
    after = [f for f in result.flights if f.arrival.at_s > known_s]
    assert all(flight.state is FlightState.FINISHED for flight in after)


def test_a_pod_that_joins_gets_requests_once_discovery_knows() -> None:
    work = workload(*(arrival(0.1 * number) for number in range(60)))
    result = run(work, RoundRobin, num_pods=1, events=[PodJoin(1.0)], discovery_delay_s=2.0)
    to_new = [f.arrival.at_s for f in result.flights if f.pod == "10.0.0.2:8000"]

    assert min(to_new) >= 3.0
    assert len(to_new) >= 14


def test_a_slow_pod_takes_longer_from_then_on() -> None:
    work = workload(arrival(0.0), arrival(5.0))
    result = run(work, num_pods=1, events=[SlowPod(4.0, 0, 3.0)])
    before, after = (flight.tpot_s for flight in result.flights)

    assert before is not None
    assert after == pytest.approx(3 * before, rel=1e-6)


def test_an_adapter_registered_late_is_404_before_and_served_after() -> None:
    work = workload(arrival(0.5, "b"), arrival(5.0, "b"))
    result = run(work, events=[AdapterRegistered(1.0, "b")])

    assert [flight.state for flight in result.flights] == [FlightState.SHED, FlightState.FINISHED]
    assert result.flights[0].status == 404


def test_pods_come_up_with_what_routers_think_that_they_hold() -> None:
    """As vLLM with --lora-modules: loaded in the order of the list, the last ones stay."""
    work = workload(arrival(0.5, "c"), arrival(4.0, "d"), adapters=("a", "b", "c", "d"))
    believed: list[tuple[str, ...]] = []

    def look(snapshot: Snapshot, _request: RequestInfo) -> None:
        believed.extend(view.gpu_adapters for view in snapshot.endpoints)

    spy = watching(look)
    events: list[FleetEvent] = [PodJoin(1.0), AdapterRegistered(2.0, "d")]
    fleet = Fleet(FleetSettings(num_pods=1, max_loras=2), work, spy, seed=1, events=events)
    true = [pod.engine.gpu_adapters for pod in fleet.pods.values()]
    result = fleet.run()
    true += [pod.engine.gpu_adapters for pod in fleet.pods.values()]

    assert believed == true == [("c", "b"), ("d", "c"), ("d", "c")]
    assert [pod.num_loads for pod in result.pods] == [1, 1]  # "d", when it was registered
    assert [len(pod.loaded_at_s) for pod in result.pods] == [1, 1]
    assert all(2.0 < at_s < 4.0 for pod in result.pods for at_s in pod.loaded_at_s)


class Patient:
    """Holds every request for a second."""

    def choose(
        self, snapshot: Snapshot, request: RequestInfo, *, rng: random.Random
    ) -> Choice | Wait:
        if snapshot.now < request.arrived_at_s + 1.0:
            return Wait(request.arrived_at_s + 1.0)
        return Choice((snapshot.endpoints[0],))


def test_time_held_at_the_gateway_counts() -> None:
    flight = run(workload(arrival(0.0)), Patient).flights[0]

    assert flight.dispatched_s == pytest.approx(1.0)
    assert flight.ttft_s is not None
    assert flight.ttft_s > 1.0


def test_a_request_held_too_long_is_shed_with_429() -> None:
    flight = run(workload(arrival(0.0)), Patient, max_hold_s=0.5).flights[0]

    assert (flight.state, flight.status) == (FlightState.SHED, 429)
    assert flight.ended_s == pytest.approx(0.5)


def test_a_held_request_is_sent_when_its_router_hears_of_an_end() -> None:
    work = workload(arrival(0.0, "a"), arrival(0.001, "a"))
    first, second = run(work, OneAtATime, num_pods=1, scrape_interval_s=100.0).flights

    assert first.ended_s is not None
    assert second.dispatched_s is not None
    heard_s = first.ended_s + FleetSettings().completion_flush_s
    assert first.ended_s <= second.dispatched_s <= heard_s + 0.01


def test_a_client_that_leaves_while_held_is_never_sent() -> None:
    work = workload(arrival(0.0, "a", output_tokens=500), arrival(0.001, "a"))
    fleet = Fleet(FleetSettings(num_pods=1, patience_s=0.2), work, OneAtATime, seed=1)
    first, second = fleet.run().flights

    assert (first.state, second.state) == (FlightState.FINISHED, FlightState.ABANDONED)
    assert second.ended_s == pytest.approx(0.201)
    assert (second.pod, second.dispatched_s) == ("", None)
    assert not any(router.router.queue for router in fleet.routers)


def test_a_client_without_a_first_token_leaves() -> None:
    work = workload(arrival(0.0, "a"), arrival(0.001, "b", output_tokens=500))
    result = run(work, num_pods=1, max_loras=1, patience_s=0.2)

    assert [flight.state for flight in result.flights] == [
        FlightState.FINISHED,
        FlightState.ABANDONED,
    ]
    assert result.flights[1].ended_s == pytest.approx(0.201)


def test_totals_begin_after_the_warm_up() -> None:
    work = workload(arrival(0.0, "a"), arrival(5.0, "a"), arrival(5.0, "b"))
    result = run(work, num_pods=1, max_loras=1, warm_up_s=3.0)

    assert result.pods[0].num_loads == 1
    assert [at_s > 5.0 for at_s in result.pods[0].loaded_at_s] == [True]
    assert [flight.id for flight in result.counted] == ["1", "2"]


def test_waiting_for_a_slot_is_seen() -> None:
    work = workload(arrival(0.0, "a"), arrival(0.001, "b"))
    with_gate = run(work, num_pods=1, max_loras=1).flights[1].queue_wait_s
    without = run(work, num_pods=1, max_loras=2).flights[1].queue_wait_s

    assert without is not None
    assert with_gate is not None
    assert with_gate > without + 0.1


def _pod() -> FleetPod:
    engine = Engine(H100_8B, max_loras=8)
    return FleetPod("10.0.0.1:8000", engine, base_model="base", adapters=["a"], now=0.0)


def _step_ends(adapter: str, num: int) -> list[float]:
    engine = Engine(H100_8B, max_loras=8)
    engine.submit(EngineRequest.of(arrival(0.0, adapter, output_tokens=num), "0"), now=0.0)
    ends = []
    now = 0.0
    while step := engine.step(now=now):
        now = step.ended_s
        ends.append(now)
    return ends


# --- the size of CPU caches -------------------------------------------------------------------


@pytest.mark.parametrize(("presumed", "num_warnings"), [(16, 1), (None, 0), (0, 0)])
def test_routers_say_once_that_caches_are_smaller_than_configured(
    presumed: int | None, num_warnings: int
) -> None:
    settings = FleetSettings(
        num_pods=2, num_routers=2, max_loras=2, max_cpu_loras=4, presumed_cpu_loras=presumed
    )
    fleet = Fleet(
        settings, poisson(600, rate_rps=6, num_adapters=12, output_tokens=20), Founding, seed=1
    )
    fleet.run()

    for router in fleet.routers:
        said = [*router.pool.speeds.take_news(), *router.pool.speeds.take_news()]
        assert len(said) == num_warnings
        assert all("pods.max_cpu_loras (16) more than" in each for each in said)


# --- kinds of pods -------------------------------------------------------------------------------

SMALL = PodKind(1, max_loras=1, max_cpu_loras=2, max_lora_rank=8, slowness=3.0)


def two_kinds(**fields: Any) -> Fleet:
    """A small pod, and one that is as the fleet; adapter b fits the second alone."""
    work = Workload("test", (arrival(0.0, "b"), arrival(0.0, "a")), {"a": 8, "b": 16})
    settings = FleetSettings(num_pods=2, kinds=(SMALL,), max_loras=4, max_cpu_loras=6, **fields)
    return Fleet(settings, work, LeastPending, seed=1, events=[PodJoin(0.5)])


def test_a_pod_is_of_its_kind_and_serves_what_fits_it() -> None:
    fleet = two_kinds()
    result = fleet.run()

    small, *others = fleet.pods.values()
    assert (small.engine.max_loras, small.engine.profile) == (1, H100_8B.slowed(3.0))
    assert small.registered == {"base", "a"}
    assert [pod.registered for pod in others] == [{"base", "a", "b"}] * 2
    assert [pod.engine.profile for pod in others] == [H100_8B] * 2
    assert [flight.state for flight in result.flights] == [FlightState.FINISHED] * 2
    assert fleet.settings.num_slots == 5


@pytest.mark.parametrize("knows_kinds", [True, False])
def test_routers_know_the_kinds_unless_the_scenario_says_otherwise(knows_kinds: bool) -> None:
    fleet = two_kinds(knows_kinds=knows_kinds)
    small, other = fleet.routers[0].pool.snapshot(now=0.0).endpoints

    assert (other.max_loras, other.max_lora_rank) == (4, None)
    assert (small.max_loras, small.max_lora_rank) == ((1, 8) if knows_kinds else (4, None))
    ratio = small.costs.prompt_s_per_byte / other.costs.prompt_s_per_byte
    assert ratio == pytest.approx(3.0 if knows_kinds else 1.0)


def test_an_adapter_that_is_registered_late_comes_to_the_pods_that_it_fits() -> None:
    work = Workload("test", (arrival(3.0, "b"),), {"a": 8, "b": 16})
    settings = FleetSettings(num_pods=2, kinds=(SMALL,))
    fleet = Fleet(settings, work, LeastPending, seed=1, events=[AdapterRegistered(0.5, "b")])
    fleet.run()

    assert ["b" in pod.registered for pod in fleet.pods.values()] == [False, True]


def test_a_router_sees_which_kib_of_its_prompts_are_the_same() -> None:
    shared = {"prompt_tokens": 1000, "prefix": "text", "prefix_tokens": 600}
    made = [arrival(float(number), "a", **shared) for number in range(2)]
    other = arrival(2.0, "b", **shared)
    plain = arrival(3.0, "a", prompt_tokens=1000)
    seen: dict[str, tuple[int, ...]] = {}

    class Looking(LeastPending):
        uses_cached_bytes = True

        def choose(
            self, snapshot: Snapshot, request: RequestInfo, *, rng: random.Random
        ) -> Choice | Wait:
            seen[request.request_id] = request.prefix_hashes
            return super().choose(snapshot, request, rng=rng)

    class Blind(Looking):
        uses_cached_bytes = False

    work = workload(*made, other, plain)
    run(work, Blind, num_pods=1)
    assert seen == dict.fromkeys("0123", ())  # as in production
    result = run(work, Looking, num_pods=1)
    first, second, third = (seen[number] for number in "012")

    assert len(first) == len(second) == 3  # of 4,000 bytes
    assert first[:2] == second[:2]  # 2,400 bytes in common
    assert first[2] != second[2]
    assert not set(first) & set(third)
    assert seen["3"] == ()
    assert first == prefix_hashes(made[0], "0")
    assert (result.flights[1].ttft_s or 9) < (result.flights[2].ttft_s or 0)  # KV is per adapter
