"""What held requests are to the rest of the service: metrics, decisions, changes that free room."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from extproc.config.configfile import parse_config
from extproc.queue import Ticket
from extproc.service.clocks import Clocks
from extproc.service.routing import Routing
from extproc.types import Choice, Pick, Reason, Rejection, RequestInfo, Snapshot, Wait
from tests.builders import address, cards, endpoint, report, request
from tests.observe.scene import Scene
from tests.routing.scene import queued


def held(scene: Scene) -> Ticket:
    ticket = queued(scene.route())
    return ticket


def sample(scene: Scene, name: str, **labels: str) -> float | None:
    return scene.telemetry.registry.get_sample_value(f"extproc_{name}", labels)


def test_a_held_request_is_one_wait_and_in_the_end_one_decision() -> None:
    scene = Scene(num_waits=1)
    ticket = held(scene)
    too_early = scene.router.resume(ticket, now=0.5)
    scene.router.offer(now=1.0)
    pick = scene.router.resume(ticket, now=1.0)
    assert not isinstance(pick, Ticket)
    scene.recorder.decided(pick, None, now=1.0)

    assert too_early is ticket
    assert isinstance(pick, Pick)
    assert sample(scene, "waits_total", reason="not-yet") == 1
    assert sample(scene, "decision_seconds_count") == 1  # of the time that it took, not the hold
    assert [each.decision for _, each in scene.decisions.last(9)] == [pick]


class Shut:
    """A policy that holds every request."""

    def choose(
        self, snapshot: Snapshot, request: RequestInfo, *, rng: random.Random
    ) -> Choice | Wait:
        return Wait(99.0, "shut")


def shut() -> tuple[Routing, Ticket]:
    """A router over one endpoint, with a request that it holds."""
    clocks = Clocks(lambda: 1.0, lambda: 0.0, random.Random(0))
    config = parse_config("{discovery: {file: pods.yaml}, policy: {name: founding}}")
    routing = Routing(config, Shut(), router_id="r", clocks=clocks)
    routing.set_endpoints([endpoint(1)])
    routing.pool.record_report(address(1), report(), taken_at_s=0.0)
    routing.pool.record_models(address(1), cards("a"), now=0.0)
    ticket = queued(routing.router.route(request(None, model="a"), now=0.0))
    return routing, ticket


def put_to_sleep(routing: Routing) -> None:
    asleep = report(is_asleep=True)
    routing.pool.record_report(address(1), asleep, taken_at_s=1.0)


def change_policy(routing: Routing) -> None:
    routing.configure(parse_config("{discovery: {file: pods.yaml}, policy: {name: round_robin}}"))


@pytest.mark.parametrize(
    ("change", "reason"), [(put_to_sleep, Reason.ASLEEP), (change_policy, None)]
)
def test_held_requests_learn_of_a_change_at_once(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Routing], None], reason: Reason | None
) -> None:
    times: list[float] = []
    monkeypatch.setattr(Routing, "_offer_at", lambda _, at_s: times.append(at_s))
    routing, ticket = shut()
    times.clear()

    change(routing)
    routing.router.offer(now=1.0)
    result = routing.router.resume(ticket, now=1.0)

    assert times == [1.0]
    assert (result.reason if isinstance(result, Rejection) else None) == reason
    assert isinstance(result, Pick | Rejection)
