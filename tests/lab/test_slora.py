"""S-LoRA's orders of admission, in the router's queue; and that the suite can be run."""

from __future__ import annotations

import random
from collections.abc import Mapping

from extproc.lab.fleet.fleet import Fleet
from extproc.lab.fleet.settings import FleetSettings
from extproc.lab.opponents import opponent
from extproc.lab.opponents.papers import SloraRoom
from extproc.lab.trials.suites import find_suite, make_trial_parts, parse_suite
from extproc.lab.workload.judge import Slo, measure
from extproc.lab.workload.running import FleetResult, FlightState
from extproc.types import Choice, RequestInfo, Snapshot, Wait
from tests.builders import endpoint_view, snapshot
from tests.lab.lab import arrival, workload

SLO = Slo(ttft_s=6.0, tpot_s=1.0)


def pod(now: float, pending: Mapping[str, int] | None = None, num_waiting: int = 0) -> Snapshot:
    view = endpoint_view(
        1, pending_by_adapter=pending or {}, num_waiting=num_waiting, reported_at_s=now - 0.01
    )
    return snapshot(view, now=now)


def answer(policy: SloraRoom, state: Snapshot) -> Choice | Wait:
    return policy.choose(state, RequestInfo("a", adapter="a"), rng=random.Random(1))


def test_an_endpoint_takes_no_more_than_it_may_run() -> None:
    policy = SloraRoom(max_running=2)

    assert isinstance(answer(policy, pod(1.0, {"a": 2})), Wait)
    assert isinstance(answer(policy, pod(1.1, {"a": 1})), Choice)


def test_an_endpoint_takes_one_at_a_time_while_none_waits_there() -> None:
    policy = SloraRoom()

    assert isinstance(answer(policy, pod(1.0, num_waiting=1)), Wait)
    assert isinstance(answer(policy, pod(1.1)), Choice)
    assert isinstance(answer(policy, pod(1.1)), Wait), "no report since then"
    assert isinstance(answer(policy, pod(1.2)), Choice)


def overload(name: str, adapters: str = "a") -> FleetResult:
    """Three times as many requests as one pod serves at two at a time."""
    arrivals = (arrival(0.1 * n, adapters[n % len(adapters)], output_tokens=50) for n in range(150))
    settings = FleetSettings(num_pods=1, max_hold_s=60.0, drain_s=120.0, declared=SLO)
    policy = opponent(name)
    assert policy is not None
    return Fleet(settings, workload(*arrivals), policy, seed=1).run()


def test_under_overload_early_abort_meets_more() -> None:
    """Who is aborted is told so, and whoever is served has a first token in time."""
    runs = {order: overload(f"slora_{order}?max_running=2") for order in ("fcfs", "abort")}
    met = {order: measure(run, SLO).attainment for order, run in runs.items()}

    assert met["fcfs"] < met["abort"]
    assert {f.state for f in runs["fcfs"].flights} == {FlightState.FINISHED}
    finished = [f for f in runs["abort"].flights if f.state is FlightState.FINISHED]
    assert {f.reason for f in runs["abort"].flights if f not in finished} == {"late"}
    assert all(SLO.is_met(flight) for flight in finished)


def test_the_slora_suite_has_the_papers_sizes() -> None:
    suite = parse_suite(find_suite("slora").read_text())
    sizes = {}
    for scenario in suite.scenarios:
        settings, work, _ = make_trial_parts(suite, scenario, rate_rps=2.0, seed=1)
        sizes[scenario.name] = (len(work.arrivals), len(work.adapters))
        assert settings.max_loras >= settings.profile.max_num_seqs, "no gate"

    assert sizes == {
        "request-rate": (600, 200),
        "adapter-clusters": (240, 32),
        "table-3": (1200, 100),
    }
