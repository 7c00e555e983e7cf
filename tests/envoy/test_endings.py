"""What follows from how picks end."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from extproc.envoy.endings import UNSURE_S
from extproc.learned.evidence import Evidence, StreamEnd
from extproc.types import Outcome, Pick
from tests.builders import address, completion, endpoint, pick, report, request
from tests.observe.scene import Scene
from tests.routing.scene import routed


def picked(scene: Scene) -> Pick:
    result = routed(scene.route())
    return result


def counted(scene: Scene, outcome: Outcome) -> float | None:
    registry = scene.telemetry.registry
    return registry.get_sample_value("extproc_completions_total", {"outcome": outcome})


def test_a_pick_of_a_held_request_is_shown_without_a_time_to_decide() -> None:
    scene = Scene()
    scene.recorder.decided(picked(scene), None, now=0.0)
    ((_, shown),) = scene.decisions.last(1)

    assert shown.seconds == 0.0


def test_an_endpoint_that_returns_404_is_polled_for_its_models() -> None:
    scene = Scene()
    for status in (200, 404):
        assert scene.endings.complete(completion(picked(scene).id, status=status))

    assert scene.doubtful == [address(1)]


@pytest.mark.parametrize(
    ("changes", "doubtful"),
    [
        ({"address": address(2)}, [address(2)]),
        ({"address": ""}, [address(1)]),
        ({"is_from_endpoint": False}, []),
        ({"status": 400}, []),
    ],
)
def test_an_endpoints_own_404_puts_its_list_of_models_in_doubt(
    changes: dict[str, Any], doubtful: list[str]
) -> None:
    scene = Scene()
    scene.endings.complete(completion(picked(scene).id, **{"status": 404, **changes}))

    assert scene.doubtful == doubtful


def test_a_404_to_a_request_that_named_no_model_says_nothing_of_models() -> None:
    scene = Scene()
    scene.pool.flights.start(pick("r-9", 1, info=request(None, model="")), now=0.0)
    assert scene.endings.complete(completion("r-9", status=404))

    assert scene.doubtful == []


def test_an_endpoint_that_fails_a_request_is_doubted() -> None:
    scene = Scene()
    for verdict in Evidence:
        scene.endings.complete(completion(picked(scene).id, verdict=verdict, status=500))
    failed = {"verdict": Evidence.FAILED, "status": 500}
    scene.endings.complete(completion(picked(scene).id, **failed, address=""))

    assert scene.failed == 5 * [address(1)]


def test_a_status_that_a_client_can_provoke_does_not_make_the_router_ask() -> None:
    scene = Scene()
    scene.endings.complete(completion(picked(scene).id, verdict=Evidence.FAILED, status=400))

    assert scene.failed == []


ENDS = (Outcome.COMPLETED, Outcome.FAILED, Outcome.CANCELLED)


@pytest.mark.parametrize("outcome", ENDS)
def test_an_end_that_a_stream_saw_is_recorded_by_it_once(outcome: Outcome) -> None:
    scene = Scene()
    pick = picked(scene)

    assert scene.endings.finish(pick, StreamEnd(outcome), now=1.0)
    assert not scene.endings.finish(pick, StreamEnd(outcome), now=1.0)
    assert len(scene.pool.flights) == 0


@pytest.mark.parametrize(
    ("outcome", "verdict", "asked"),
    [
        (Outcome.COMPLETED, Evidence.SERVED, ([], [])),
        (Outcome.COMPLETED, Evidence.FAILED, ([], [])),  # a client can provoke it
        (Outcome.COMPLETED, Evidence.NOT_FOUND, ([address(1)], [])),
        (Outcome.FAILED, Evidence.FULL, ([], [])),
        (Outcome.FAILED, Evidence.NONE, ([], [])),  # not sent there at all
        (Outcome.FAILED, Evidence.FAILED, ([], [address(1)])),
        (Outcome.FAILED, Evidence.BROKEN, ([], [address(1)])),
        (Outcome.CANCELLED, Evidence.UNANSWERED, ([], [address(1)])),
        (Outcome.UNKNOWN, Evidence.NONE, ([], [address(1)])),
    ],
)
def test_a_pod_is_asked_what_an_end_means(
    outcome: Outcome, verdict: Evidence, asked: tuple[list[str], list[str]]
) -> None:
    scene = Scene()
    scene.endings.finish(picked(scene), StreamEnd(outcome, verdict), now=1.0)

    assert (scene.doubtful, scene.failed) == asked


def broken_off(scene: Scene) -> None:
    """A response begins, and its end does not come."""
    assert not scene.endings.finish(picked(scene), StreamEnd(Outcome.UNKNOWN), now=10.0)
    scene.endings.tick(now=10.5)
    assert [counted(scene, each) for each in Outcome] == [0] * len(Outcome)


def test_a_response_that_broke_off_has_failed_if_its_pod_is_gone() -> None:
    scene = Scene()
    broken_off(scene)
    scene.pool.record_unreachable(address(1))
    scene.endings.tick(now=11.0)

    assert counted(scene, Outcome.FAILED) == 1


def test_a_response_that_broke_off_ended_unknown_if_its_pod_answers() -> None:
    """Its client has left, or the pod has broken off and lives."""
    scene = Scene()
    scene.pool.record_unreachable(address(1))
    broken_off_at_a_pod_that_was_lost = not scene.endings.finish(
        picked(scene), StreamEnd(Outcome.UNKNOWN), now=10.0
    )
    scene.pool.record_report(address(1), report(), taken_at_s=10.6, asked_at_s=10.55)
    scene.endings.tick(now=11.0)

    assert broken_off_at_a_pod_that_was_lost
    assert (counted(scene, Outcome.UNKNOWN), counted(scene, Outcome.FAILED)) == (1, 0)


@pytest.mark.parametrize("is_in_pool", [True, False])
def test_a_response_that_broke_off_ended_unknown_if_nothing_more_is_heard(is_in_pool: bool) -> None:
    scene = Scene()
    broken_off(scene)
    if not is_in_pool:
        scene.pool.set_endpoints([endpoint(2)])
    scene.endings.tick(now=10.0 + UNSURE_S)

    assert (counted(scene, Outcome.UNKNOWN), counted(scene, Outcome.FAILED)) == (1, 0)


def test_who_served_in_another_s_place_is_recorded() -> None:
    scene = Scene()
    scene.endings.served(picked(scene), "10.9.9.9:8000", now=1.0)

    assert scene.accounting.servers.num["unknown"] == 1


def test_an_ejection_and_its_end_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    scene = Scene()
    scene.pool.set_endpoints([endpoint(1), endpoint(2)])
    unreachable = {"outcome": Outcome.FAILED, "status": 503, "verdict": Evidence.UNREACHABLE}
    for changes in (unreachable, {}):
        scene.endings.complete(completion(picked(scene).id, **changes))
    scene.pool.record_report(address(1), report(), taken_at_s=1.0)
    for _ in range(2):
        scene.endings.tick(now=1.0)

    assert [record.message for record in caplog.records] == [
        f"pod {address(1)} ejected for 5 s: unreachable",
        f"pod {address(1)} may serve again",
    ]


def test_an_ejection_that_ends_for_lack_of_room_is_logged_as_such(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    scene = Scene()
    scene.pool.set_endpoints([endpoint(1), endpoint(2)])
    unreachable = {"outcome": Outcome.FAILED, "status": 503, "verdict": Evidence.UNREACHABLE}
    scene.endings.complete(completion(picked(scene).id, **unreachable))
    scene.pool.set_endpoints([endpoint(1)])
    scene.endings.tick(now=1.0)

    why = "the limit of ejections leaves no room for it"
    assert caplog.messages[1:] == [f"pod {address(1)} may serve again: {why}"]


def test_picks_without_a_reported_end_count_as_expired() -> None:
    scene = Scene()
    picked(scene)
    scene.pool.record_report(address(1), report(), taken_at_s=60.0)
    lost = scene.accounting.reconcile(address(1), now=60.0)
    scene.recorder.given_up([each.pick for each in lost])
    picked(scene)
    scene.endings.tick(now=9999.0)

    assert counted(scene, Outcome.EXPIRED) == 2.0
    assert len(scene.pool.flights) == 0
