"""What the endpoint picker protocol adds to a stream: hints, subsets, who served."""

from __future__ import annotations

import json
from typing import Any

import pytest

from extproc.core import messages as m
from extproc.core.messages import BodyMode
from extproc.core.types import Hints
from tests.builders import address, body, request_headers
from tests.core.dispatcher import PICK, Exchange, begin

DUPLEX = BodyMode.FULL_DUPLEX_STREAMED
OBJECTIVE, TTFT = "x-llm-d-inference-objective", "x-llm-d-slo-ttft-ms"
EMPTY: frozenset[str] = frozenset()


def served(by: str | None, **settings: Any) -> Exchange:
    """An exchange whose response was served by `by`."""
    exchange = begin(**settings)
    exchange.tell(request_headers(), m.RequestBody(body(), True))
    exchange.tell(m.ResponseHeaders(200, served_by=by))
    return exchange


# --- hints -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", list(BodyMode))
def test_hints_are_kept_on_the_request_in_every_body_mode(mode: BodyMode) -> None:
    exchange = begin(allow_mode_override=True)
    event = request_headers(headers={OBJECTIVE: "batch", TTFT: "200"}, body_mode=mode)
    exchange.tell(event, m.RequestBody(body(), True))

    [routed] = exchange.dispatcher.routed
    assert routed.hints == Hints("batch", slo_ttft_ms=200.0, header_names=(OBJECTIVE, TTFT))


def test_a_hint_that_cannot_be_used_is_refused_before_the_body_comes() -> None:
    exchange = begin()
    [reply, end] = exchange.tell(request_headers(headers={TTFT: "soon"}))

    assert isinstance(reply, m.Reply)
    assert end == m.End()
    error = json.loads(reply.body)["error"]
    assert (reply.status, error["code"], error["param"]) == (400, "invalid_header", TTFT)
    assert error["type"] == "invalid_request_error"
    assert exchange.dispatcher.routed == []


# --- subsets ---------------------------------------------------------------------------------


@pytest.mark.parametrize("subset", [None, EMPTY, frozenset({address(1)})])
def test_a_request_without_a_body_has_its_subset_too(subset: frozenset[str] | None) -> None:
    """A stored response is asked for by GET, and only a session finds it."""
    exchange = begin(session_header="x-session")
    event = request_headers(
        "GET",
        "/v1/responses/resp_1",
        headers={"x-session": "s"},
        end_of_stream=True,
        subset=subset,
    )

    assert exchange.tell(event) == [m.ContinueHeaders(PICK), m.End()]
    [routed] = exchange.dispatcher.routed
    assert routed.subset == subset


# --- who served ------------------------------------------------------------------------------


@pytest.mark.parametrize("phases", [True, False], ids=["response-phases", "access-log"])
def test_an_endpoint_that_served_in_another_s_place_is_told_once(phases: bool) -> None:
    exchange = begin(uses_response_phases=phases)
    exchange.tell(
        request_headers(body_mode=DUPLEX, response_body_mode=DUPLEX), m.RequestBody(body(), True)
    )
    exchange.tell(m.ResponseHeaders(200, served_by=address(2)))
    exchange.tell(m.ResponseBody(b"x", True), m.Ended())

    assert exchange.dispatcher.moved == [(PICK, address(2), 3.0)]


@pytest.mark.parametrize("by", [None, "", PICK.address])
def test_the_pick_s_own_endpoint_or_none_is_no_news(by: str | None) -> None:
    assert served(by, uses_response_phases=True).dispatcher.moved == []


def test_without_a_pick_nobody_is_told() -> None:
    """The data plane answered itself, whatever its metadata say."""
    exchange = begin(uses_response_phases=True)
    exchange.tell(request_headers(), m.ResponseHeaders(413, served_by=address(2)))

    assert exchange.dispatcher.moved == []


# --- data planes that do not tell their modes ------------------------------------------------


def test_full_duplex_is_assumed_both_ways_where_the_data_plane_does_not_tell() -> None:
    exchange = begin(assumed_body_mode=DUPLEX)
    exchange.tell(request_headers(body_mode=None, response_body_mode=None))

    assert exchange.tell(m.RequestBody(body(), True)) == [
        m.ContinueHeaders(PICK),
        m.EchoBody(body(), True),
    ]
    assert exchange.tell(m.ResponseHeaders(200)) == [m.ContinueResponseHeaders()]
    assert exchange.tell(m.ResponseBody(b"x", True)) == [m.EchoResponseBody(b"x", True)]


def test_no_other_mode_is_assumed_of_responses() -> None:
    exchange = begin(assumed_body_mode=BodyMode.STREAMED, uses_response_phases=True)
    exchange.tell(m.ResponseHeaders(401))

    assert exchange.tell(m.ResponseBody(b"x", True)) == [m.ContinueResponseBody()]


def test_a_local_reply_is_echoed_where_full_duplex_is_assumed() -> None:
    exchange = begin(assumed_body_mode=DUPLEX)
    exchange.tell(m.ResponseHeaders(401))

    assert exchange.tell(m.ResponseBody(b"x", True)) == [m.EchoResponseBody(b"x", True)]
