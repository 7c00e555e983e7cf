"""An adapter whose pods have it under the name of a version, which the pick says."""

from __future__ import annotations

import json

import pytest

from extproc.core import messages as m
from extproc.core.messages import BodyMode
from extproc.core.ports import StreamSettings
from extproc.core.stream import Stream
from extproc.core.types import Outcome, Pick, RequestInfo
from tests.builders import body, pick, request_headers
from tests.core.dispatcher import Exchange, FakeDispatcher

BODY, SECOND = body("sql"), body("sql@2")


def picked(served: str) -> Pick:
    written = "" if served == "sql" else "sql"
    return pick(info=RequestInfo(served, served, written=written))


def begin(result: Pick, *versioned: str) -> Exchange:
    dispatcher = FakeDispatcher(result, versions=versioned)
    return Exchange(dispatcher, Stream(dispatcher, StreamSettings(), lambda: None))


def test_the_body_goes_on_with_the_version_that_the_pick_has() -> None:
    exchange = begin(picked("sql@2"), "sql")
    exchange.tell(request_headers())
    assert exchange.tell(m.RequestBody(BODY, True)) == [
        m.ContinueBody(picked("sql@2"), SECOND, None),
        m.End(),
    ]


def test_it_stays_as_it_is_where_the_pod_has_the_plain_name() -> None:
    exchange = begin(picked("sql"), "sql")
    exchange.tell(request_headers())
    assert exchange.tell(m.RequestBody(BODY, True)) == [m.ContinueBody(picked("sql")), m.End()]


def test_a_held_request_gets_the_version_that_serves_when_it_goes_on() -> None:
    exchange = begin(picked("sql@1"), "sql")
    exchange.dispatcher.hold_s = 30.0
    exchange.tell(request_headers(), m.RequestBody(BODY, True))
    [ticket] = exchange.dispatcher.tickets
    ticket.result = picked("sql@2")
    assert exchange.tell(m.Wakeup())[0] == m.ContinueBody(ticket.result, SECOND, None)


@pytest.mark.parametrize("mode", [BodyMode.BUFFERED, BodyMode.FULL_DUPLEX_STREAMED])
def test_a_version_that_is_declared_while_its_request_is_held_is_a_503(mode: BodyMode) -> None:
    exchange = begin(picked("sql@2"))
    reply, _ = exchange.tell(request_headers(body_mode=mode), m.RequestBody(BODY, True))[-2:]
    assert isinstance(reply, m.Reply)
    assert (reply.status, json.loads(reply.body)["error"]["code"]) == (503, "no_endpoints")
    [(_, outcome, _)] = exchange.dispatcher.finished
    assert outcome is Outcome.FAILED
