"""A pod that is looked at says what one says that takes every step at once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from extproc.lab.engine.engine import Engine
from extproc.lab.engine.profiles import A100_8B
from extproc.lab.fleet.virtualpod import FleetPod
from extproc.lab.workload.requests import Arrival
from extproc.lab.workload.running import LabFlight

ADAPTERS = ("a", "b", "c")

_EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["submit", "submit", "look", "look", "abort", "slow down", "register"]),
        st.sampled_from([0.0, 0.001, 0.02, 0.1, 0.6]),  # seconds before it
        st.sampled_from([None, *ADAPTERS]),
        st.integers(1, 2000),  # prompt tokens
        st.integers(0, 60),  # output tokens
    ),
    max_size=30,
)


def _pod() -> FleetPod:
    engine = Engine(A100_8B, max_loras=2, max_cpu_loras=3)
    return FleetPod("10.0.0.1:8000", engine, base_model="base", adapters=ADAPTERS, now=0.0)


@given(_EVENTS)
def test_looking_shows_what_catching_up_shows(
    events: list[tuple[str, float, str | None, int, int]],
) -> None:
    looked_at, caught_up = pods = (_pod(), _pod())
    sent: list[tuple[LabFlight, LabFlight]] = []
    now = 0.0
    for number, (kind, wait_s, adapter, prompt, output) in enumerate(events):
        now += wait_s
        caught_up.catch_up(now)
        looked_at.poll(now)
        if kind == "submit":
            arrival = Arrival(now, adapter, prompt, output)
            sent.append((LabFlight(str(number), arrival, 0), LabFlight(str(number), arrival, 0)))
            for pod, flight in zip(pods, sent[-1], strict=True):
                pod.submit(flight, now)
        elif kind == "abort" and sent:
            for pod, flight in zip(pods, sent[prompt % len(sent)], strict=True):
                pod.abort(flight, now)
        for pod in pods:
            if kind == "slow down":
                pod.slow_down(1.0 + output / 60, now)
            elif kind == "register":
                pod.register(f"late-{number}", now)
        for one, other in sent:
            assert (one.state, one.first_token_s, one.ended_s, one.scheduled_s) == (
                *(other.state, other.first_token_s, other.ended_s, other.scheduled_s),
            )
        assert [flight.id for flight in looked_at.take_ended()] == [
            flight.id for flight in caught_up.take_ended()
        ]
        assert looked_at.report(now) == caught_up.report(now)
    for pod in pods:
        pod.catch_up(now)
    assert looked_at.engine.counters == caught_up.engine.counters
    assert looked_at.engine.stats == caught_up.engine.stats


def test_steps_without_results_are_left_for_later() -> None:
    pod = _pod()
    pod.submit(LabFlight("1", Arrival(0.0, "a", 100, 50), 0), 0.0)
    pod.catch_up(0.3)
    num_steps = pod.engine.counters.num_steps
    pod.poll(0.35)

    assert pod.engine.counters.num_steps == num_steps
    assert pod.report(0.35)[1] > 0.3

    pod.catch_up(0.35)
    assert pod.engine.counters.num_steps > num_steps


def test_steps_that_began_before_a_pod_became_slow_cost_what_they_did() -> None:
    """Nobody has looked at one of the pods since its request came."""
    flights = [LabFlight("1", Arrival(0.0, "a", 100, 50), 0) for _ in range(2)]
    unseen, caught_up = pods = (_pod(), _pod())
    for pod, flight in zip(pods, flights, strict=True):
        pod.submit(flight, 0.0)
    caught_up.catch_up(0.3)
    for pod in pods:
        pod.slow_down(2.0, 0.3)
        pod.catch_up(9.0)

    assert [flight.ended_s for flight in flights] == [flights[0].ended_s] * 2
    assert unseen.engine.counters == caught_up.engine.counters
