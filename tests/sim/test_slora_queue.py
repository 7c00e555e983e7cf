"""S-LoRA's orders of admission: who goes next, who is dropped, and that the suite can be run."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest

from extproc.core.types import Choice, RequestInfo, Snapshot, Wait
from extproc.sim.fleet.fleet import Fleet
from extproc.sim.fleet.settings import FleetSettings
from extproc.sim.opponents.slora import Order, SloraQueue
from extproc.sim.trials.suites import find_suite, make_trial_parts, parse_suite
from extproc.workload.flights import FleetResult, FlightState
from extproc.workload.judge import Slo, measure
from tests.builders import endpoint_view, snapshot
from tests.sim.lab import arrival, workload


def info(number: int, arrived_at_s: float, adapter: str = "a") -> RequestInfo:
    return RequestInfo(adapter, adapter=adapter, request_id=str(number), arrived_at_s=arrived_at_s)


def pod(now: float, pending: Mapping[str, int] | None = None, num_waiting: int = 0) -> Snapshot:
    view = endpoint_view(
        1, pending_by_adapter=pending or {}, num_waiting=num_waiting, reported_at_s=now - 0.01
    )
    return snapshot(view, now=now)


def winner(queue: SloraQueue, *requests: RequestInfo) -> str:
    """Which of the requests, held at 1 s, is sent at 1.1 s, whoever asks first."""
    for each in requests:
        answer = queue.choose(pod(1.0, num_waiting=1), each, rng=random.Random(1))
        assert isinstance(answer, Wait)
    sent = [
        each.request_id
        for each in requests
        if isinstance(queue.choose(pod(1.1, {"a": 1, "b": 1}), each, rng=random.Random(1)), Choice)
    ]
    assert len(sent) == 1, "one at a time"
    return sent[0]


@pytest.mark.parametrize(("order", "first"), [("fcfs", "1"), ("lcfs", "3"), ("abort", "3")])
def test_the_order_decides_who_goes_first(order: Order, first: str) -> None:
    queue = SloraQueue(order)

    assert winner(queue, info(1, 0.1), info(2, 0.2), info(3, 0.3))[0] == first


def test_a_full_cluster_lets_its_own_adapters_pass() -> None:
    held = info(1, 0.1, "c"), info(2, 0.2, "b")

    assert winner(SloraQueue(cluster_size=2), *held) == "2"
    assert winner(SloraQueue(cluster_size=3), *held) == "1"


def test_early_abort_drops_what_cannot_have_its_first_token_in_time() -> None:
    queue = SloraQueue("abort")
    late = queue.choose(pod(6.0), info(1, 0.4), rng=random.Random(1))
    in_time = queue.choose(pod(6.0), info(2, 0.6), rng=random.Random(1))

    assert isinstance(late, Wait)
    assert late.reason == "abort"
    assert isinstance(in_time, Choice)


def test_early_abort_turns_to_the_oldest_once_fewer_come_than_are_admitted() -> None:
    queue = SloraQueue("abort", weight=0.7)
    held = [info(number, 0.1 * number) for number in range(1, 6)]
    for each in held:
        queue.choose(pod(1.0, num_waiting=1), each, rng=random.Random(1))
    sent = []
    for step in range(5):  # five came before the first admission, nobody since
        for each in held:
            answer = queue.choose(pod(1.1 + step / 10), each, rng=random.Random(1))
            if isinstance(answer, Choice):
                sent.append(each.request_id)
                break
        held = [each for each in held if each.request_id not in sent]

    assert sent == ["5", "4", "1", "2", "3"]


def test_an_endpoint_takes_no_more_than_it_may_run() -> None:
    queue = SloraQueue(max_running=2)

    assert isinstance(queue.choose(pod(1.0, {"a": 2}), info(1, 0.9), rng=random.Random(1)), Wait)
    assert isinstance(queue.choose(pod(1.1, {"a": 1}), info(1, 0.9), rng=random.Random(1)), Choice)


def test_a_client_that_left_blocks_no_request() -> None:
    queue = SloraQueue()
    queue.choose(pod(0.0, num_waiting=1), info(1, 0.0), rng=random.Random(1))

    assert isinstance(queue.choose(pod(60.0), info(2, 59.0), rng=random.Random(1)), Choice)


def overload(queue: SloraQueue) -> FleetResult:
    """Three times as many requests as one pod serves at two at a time."""
    work = workload(*(arrival(0.1 * n, "a", output_tokens=50) for n in range(150)))
    settings = FleetSettings(num_pods=1, max_hold_s=60.0, drain_s=120.0)
    return Fleet(settings, work, lambda: queue, seed=1).run()


def test_under_overload_newest_first_meets_more_and_early_abort_leaves_no_queue() -> None:
    slo = Slo(ttft_s=6.0, tpot_s=1.0)
    orders: tuple[Order, ...] = ("fcfs", "lcfs", "abort")
    runs = {order: overload(SloraQueue(order, max_running=2)) for order in orders}
    met = {order: measure(run, slo).attainment for order, run in runs.items()}

    assert met["fcfs"] < met["lcfs"]
    assert met["fcfs"] < met["abort"]
    assert {f.state for f in runs["fcfs"].flights} == {FlightState.FINISHED}
    finished = [f for f in runs["abort"].flights if f.state is FlightState.FINISHED]
    assert all((f.ttft_s or 0.0) < 6.0 for f in finished)
    assert len(finished) < 150


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
