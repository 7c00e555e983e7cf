"""The health service, driven through the transport contract."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import pytest
from grpc_health.v1 import health_pb2

from extproc.envoy.health import EXT_PROC, LIVENESS, MAX_WATCHES, READINESS, HealthService
from extproc.wire.rpc import Code, Session
from tests.wire.fake_call import FakeCall, begin

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


def statuses(call: FakeCall) -> list[int]:
    return [health_pb2.HealthCheckResponse.FromString(each).status for each in call.sent]


def ask(service: HealthService, method: str, name: str) -> tuple[FakeCall, Session]:
    call, session = begin(service.methods(), method)
    session.receive(health_pb2.HealthCheckRequest(service=name).SerializeToString())
    return call, session


@pytest.mark.parametrize("name", ["", READINESS, EXT_PROC])
def test_readiness_names_follow_readiness(name: str) -> None:
    service = HealthService()
    answers = []
    for is_ready in (False, True, False):
        service.set_ready(is_ready)
        call, session = ask(service, "Check", name)
        session.half_close()
        session.closed()
        assert call.code is Code.OK
        answers += statuses(call)

    assert answers == [NOT_SERVING, SERVING, NOT_SERVING]


def test_liveness_does_not_follow_readiness() -> None:
    service = HealthService()
    service.set_ready(False)

    assert statuses(ask(service, "Check", LIVENESS)[0]) == [SERVING]


def test_check_of_an_unknown_name_is_not_found() -> None:
    call, _ = ask(HealthService(), "Check", "nobody")

    assert (call.sent, call.code) == ([], Code.NOT_FOUND)


def test_list_names_every_status() -> None:
    service = HealthService()
    call, session = begin(service.methods(), "List")
    session.receive(b"")
    listed = health_pb2.HealthListResponse.FromString(call.sent[0]).statuses

    assert call.code is Code.OK
    assert {name: each.status for name, each in listed.items()} == {
        "": NOT_SERVING,
        LIVENESS: SERVING,
        READINESS: NOT_SERVING,
        EXT_PROC: NOT_SERVING,
        "inference-extension": NOT_SERVING,
    }


def test_watch_sends_changes_only() -> None:
    service = HealthService()
    call, session = ask(service, "Watch", READINESS)
    session.half_close()
    service.set_ready(False)
    service.set_ready(True)
    service.set_ready(True)
    service.set_ready(False)

    assert statuses(call) == [NOT_SERVING, SERVING, NOT_SERVING]
    assert call.ended is None


def test_watch_of_an_unknown_name_stays_open() -> None:
    service = HealthService()
    call, _ = ask(service, "Watch", "nobody")
    service.set_ready(True)

    assert statuses(call) == [SERVICE_UNKNOWN]
    assert call.ended is None


def test_a_closed_watch_gets_nothing_more() -> None:
    service = HealthService()
    call, session = ask(service, "Watch", READINESS)
    session.closed()
    service.set_ready(True)

    assert statuses(call) == [NOT_SERVING]


@pytest.mark.parametrize("method", ["Check", "List", "Watch"])
def test_garbage_is_an_invalid_argument(method: str) -> None:
    call, session = begin(HealthService().methods(), method)
    session.receive(b"\xff\xff")
    session.closed()

    assert (call.sent, call.code) == ([], Code.INVALID_ARGUMENT)


@pytest.mark.parametrize("method", ["Check", "Watch"])
def test_a_call_without_a_request_is_ended(method: str) -> None:
    call, session = begin(HealthService().methods(), method)
    session.half_close()
    session.closed()

    assert call.code is Code.INVALID_ARGUMENT


def test_a_second_request_on_one_watch_is_refused() -> None:
    service = HealthService()
    call, session = ask(service, "Watch", READINESS)
    session.receive(health_pb2.HealthCheckRequest(service="").SerializeToString())
    session.closed()

    assert call.code is Code.INVALID_ARGUMENT
    assert statuses(call) == [NOT_SERVING]


def test_only_watch_is_long_lived() -> None:
    lived = {each.path: each.is_long_lived for each in HealthService().methods()}

    assert lived == {
        "/grpc.health.v1.Health/Check": False,
        "/grpc.health.v1.Health/List": False,
        "/grpc.health.v1.Health/Watch": True,
    }


def test_watches_beyond_the_limit_are_refused_until_one_leaves() -> None:
    service = HealthService()
    sessions = [ask(service, "Watch", READINESS)[1] for _ in range(MAX_WATCHES)]
    refused, session = ask(service, "Watch", READINESS)
    session.closed()
    sessions[0].closed()
    accepted, _ = ask(service, "Watch", READINESS)
    checked, _ = ask(service, "Check", READINESS)

    assert (refused.sent, refused.code) == ([], Code.RESOURCE_EXHAUSTED)
    assert statuses(accepted) == [NOT_SERVING]
    assert statuses(checked) == [NOT_SERVING]


def test_of_a_long_name_nothing_is_kept() -> None:
    service = HealthService()
    name = "a" * 1_000_000
    before = tracemalloc_of(lambda: ask(service, "Watch", name))

    assert before < 10_000


def tracemalloc_of(call: Callable[[], object]) -> int:
    """Bytes that are still held when a call is over and its answer kept."""
    tracemalloc.start()
    try:
        answer = call()
        held_bytes, _ = tracemalloc.get_traced_memory()
        del answer
    finally:
        tracemalloc.stop()
    return held_bytes
