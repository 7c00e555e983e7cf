"""What the metrics say of the queue."""

from __future__ import annotations

from math import inf
from typing import Any

from extproc.observe.gauges import _MAX_PRIORITIES, add_queue_gauges
from extproc.observe.telemetry import Telemetry
from extproc.queue import End, HoldQueue, QueueSettings, Ticket
from extproc.tenancy import Claim
from extproc.types import Snapshot
from tests.builders import pick, request

NOW_S = 100.0


class Scene:
    """The metrics of a queue."""

    def __init__(self, **settings: Any) -> None:
        self.queue = HoldQueue(QueueSettings(**settings))
        self.telemetry = Telemetry(snapshot=lambda: Snapshot(()), version="1")
        add_queue_gauges(self.telemetry, self.queue, lambda: NOW_S)

    def hold(self, held_at_s: float = NOW_S, num_bytes: int = 0, **claim: Any) -> None:
        info = request(claim=Claim(**claim))
        self.queue.add(
            Ticket(info, lambda: None, inf, held_at_s=held_at_s, num_bytes=num_bytes), now=held_at_s
        )

    def values(self, name: str) -> dict[tuple[str, ...], float]:
        """Every sample of a metric, by its labels' values."""
        return {
            tuple(sample.labels.values()): sample.value
            for family in self.telemetry.registry.collect()
            for sample in family.samples
            if sample.name == f"extproc_{name}"
        }


def test_an_empty_queue_has_figures() -> None:
    scene = Scene(max_requests=7, max_bytes=9)

    assert scene.values("held_requests") == {("", "0"): 0}
    assert scene.values("held_requests_limit") == {(): 7}
    assert scene.values("held_bytes_limit") == {(): 9}
    assert scene.values("held_oldest_seconds") == {(): 0}
    assert scene.values("held_dispatched_per_second") == {(): 0}
    assert scene.values("holds_total") == {(str(end),): 0 for end in End}


def test_held_requests_are_counted_by_route_and_priority() -> None:
    scene = Scene()
    scene.hold(NOW_S - 4.0, num_bytes=5, route="chat", priority=5)
    scene.hold(NOW_S - 1.0, num_bytes=6, route="chat", priority=5)
    scene.hold(priority=-1)

    assert scene.values("held_requests") == {("", "0"): 0, ("chat", "5"): 2, ("", "-1"): 1}
    assert scene.values("held_bytes") == {(): 11}
    assert scene.values("held_oldest_seconds") == {(): 4}


def test_the_pace_is_that_of_the_queue() -> None:
    scene = Scene()
    for _ in range(3):
        scene.hold(NOW_S - 1.0)
    scene.queue.freed(NOW_S)
    scene.queue.offer(lambda ticket, now: pick(), now=NOW_S)

    assert scene.values("held_dispatched_per_second") == {(): 3}
    assert scene.values("holds_total")["picked",] == 3


def test_priorities_have_a_bounded_number_of_labels() -> None:
    scene = Scene()
    for priority in range(2 * _MAX_PRIORITIES):
        scene.hold(priority=priority)
    held = scene.values("held_requests")

    assert len(held) == _MAX_PRIORITIES + 1
    assert held["", "other"] == _MAX_PRIORITIES
    assert sum(held.values()) == 2 * _MAX_PRIORITIES
