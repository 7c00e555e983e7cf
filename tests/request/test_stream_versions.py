"""An adapter whose pods have it under the name of a version, which the pick says."""

from __future__ import annotations

import pytest

from extproc.request import messages as m
from extproc.request.interfaces import StreamSettings
from extproc.request.messages import BodyMode
from extproc.types import Pick, RequestInfo
from tests.builders import body, pick, request_headers
from tests.request.fakerouter import Exchange, FakeRouter

BODY, SECOND = body("sql"), body("sql@2")


def picked(served: str) -> Pick:
    written = "" if served == "sql" else "sql"
    return pick(info=RequestInfo(served, served, written=written))


def begin(result: Pick, *declared: str) -> Exchange:
    router = FakeRouter(result, declared=declared)
    return Exchange(router, router.stream(StreamSettings(), lambda: None))


def test_the_body_goes_on_with_the_version_that_the_pick_has() -> None:
    exchange = begin(picked("sql@2"), "sql")
    exchange.tell(request_headers())
    assert exchange.tell(m.BodyChunk(BODY, True)) == [
        m.ContinueBody(picked("sql@2"), SECOND, None),
        m.EndStream(),
    ]


def test_it_stays_as_it_is_where_the_pod_has_the_plain_name() -> None:
    exchange = begin(picked("sql"), "sql")
    exchange.tell(request_headers())
    assert exchange.tell(m.BodyChunk(BODY, True)) == [m.ContinueBody(picked("sql")), m.EndStream()]


def test_a_held_request_gets_the_version_that_serves_when_it_goes_on() -> None:
    exchange = begin(picked("sql@1"), "sql")
    exchange.router.hold_s = 30.0
    exchange.tell(request_headers(), m.BodyChunk(BODY, True))
    [ticket] = exchange.router.tickets
    ticket.result = picked("sql@2")
    assert exchange.tell(m.Wakeup())[0] == m.ContinueBody(ticket.result, SECOND, None)


BUFFERED, STREAMED = BodyMode.BUFFERED, BodyMode.STREAMED


@pytest.mark.parametrize(
    ("mode", "is_whole", "declared", "fixed"),
    [
        (BUFFERED, True, ["sql"], ""),
        (BodyMode.FULL_DUPLEX_STREAMED, True, ["sql"], ""),
        (BodyMode.BUFFERED_PARTIAL, True, ["sql"], ""),
        (BodyMode.BUFFERED_PARTIAL, False, ["sql"], "gateway"),
        (STREAMED, True, ["sql"], "gateway"),
        (STREAMED, True, ["other"], "gateway"),
        (BUFFERED, True, ["other"], "held"),
        (BUFFERED, True, [], "held"),
    ],
)
def test_the_router_is_told_whether_the_body_can_go_on_with_another_name(
    mode: BodyMode, is_whole: bool, declared: list[str], fixed: str
) -> None:
    exchange = begin(picked("sql"), *declared)
    headers = request_headers(body_mode=mode, sends_body_early=True)
    exchange.tell(headers, m.BodyChunk(BODY, is_whole))
    [asked] = exchange.router.routed
    assert (asked.model, asked.fixed) == ("sql", fixed)
