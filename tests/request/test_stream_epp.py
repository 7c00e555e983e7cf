"""What the endpoint picker protocol adds to a stream: hints, subsets, who served."""

from __future__ import annotations

import json
from typing import Any

import pytest

from extproc.request import messages as m
from extproc.request.controlheaders import FAIRNESS_ID, TRUSTABLE, names_of
from extproc.request.messages import BodyMode
from extproc.request.sessions import NO_SOURCES, SessionSources
from extproc.types import Hints
from tests.builders import address, body, request_headers
from tests.request.fakerouter import IN_HEADER, PICK, Exchange, begin

DUPLEX = BodyMode.FULL_DUPLEX_STREAMED
OBJECTIVE, TTFT = "x-llm-d-inference-objective", "x-llm-d-slo-ttft-ms"
EMPTY: frozenset[str] = frozenset()
ALL = names_of(TRUSTABLE)


def served(by: str | None, **settings: Any) -> Exchange:
    """An exchange whose response was served by `by`."""
    exchange = begin(**settings)
    exchange.tell(request_headers(), m.BodyChunk(body(), True))
    exchange.tell(m.ResponseHeaders(200, served_by=by))
    return exchange


# --- hints -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", list(BodyMode))
def test_hints_are_kept_on_the_request_in_every_body_mode(mode: BodyMode) -> None:
    exchange = begin(allow_mode_override=True, trusted_headers=ALL)
    event = request_headers(headers={OBJECTIVE: "batch", TTFT: "200"}, body_mode=mode)
    exchange.tell(event, m.BodyChunk(body(), True))

    [routed] = exchange.router.routed
    assert routed.hints == Hints("batch", slo_ttft_ms=200.0, header_names=(OBJECTIVE, TTFT))


def test_a_hint_that_cannot_be_used_is_refused_before_the_body_comes() -> None:
    exchange = begin(trusted_headers=ALL)
    [reply, end] = exchange.tell(request_headers(headers={TTFT: "soon"}))

    assert isinstance(reply, m.Reply)
    assert end == m.EndStream()
    error = json.loads(reply.body)["error"]
    assert (reply.status, error["code"], error["param"]) == (400, "invalid_header", TTFT)
    assert error["type"] == "invalid_request_error"
    assert exchange.router.routed == []


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_two_tenants_in_one_request_are_refused_to_read_a_list_too(method: str) -> None:
    """Lists, too, show what is private to a tenant."""
    new, old = FAIRNESS_ID
    path = "/v1/models" if method == "GET" else "/v1/completions"
    headers = {new: "victim", old: "own"}
    exchange = begin(trusted_headers=ALL)
    event = request_headers(method, path, headers=headers, end_of_stream=method == "GET")
    [reply, _] = exchange.tell(event)

    assert isinstance(reply, m.Reply)
    assert (reply.status, json.loads(reply.body)["error"]["code"]) == (400, "invalid_header")


def test_a_hint_that_is_not_trusted_is_kept_from_the_endpoint_and_says_nothing() -> None:
    exchange = begin()
    exchange.tell(request_headers(headers={TTFT: "soon"}), m.BodyChunk(body(), True))

    [routed] = exchange.router.routed
    assert routed.hints == Hints(header_names=(TTFT,))


# --- subsets ---------------------------------------------------------------------------------


@pytest.mark.parametrize("subset", [None, EMPTY, frozenset({address(1)})])
def test_a_request_without_a_body_has_its_subset_too(subset: frozenset[str] | None) -> None:
    """A stored response is asked for by GET, and only a session finds it."""
    exchange = begin(sessions=IN_HEADER)
    event = request_headers(
        "GET",
        "/v1/responses/resp_1",
        headers={"x-session": "s"},
        end_of_stream=True,
        subset=subset,
    )

    assert exchange.tell(event) == [m.ContinueHeaders(PICK), m.EndStream()]
    [routed] = exchange.router.routed
    assert routed.subset == subset


@pytest.mark.parametrize("mode", [mode for mode in BodyMode if mode is not BodyMode.NONE])
@pytest.mark.parametrize("told", [None, EMPTY, frozenset({address(1)})])
def test_a_subset_that_comes_with_the_body_counts(
    mode: BodyMode, told: frozenset[str] | None
) -> None:
    exchange = begin()
    event = request_headers(body_mode=mode, sends_body_early=True, subset=told)
    exchange.tell(event, m.BodyChunk(body(), True, frozenset({address(2)})))

    [routed] = exchange.router.routed
    assert routed.subset == frozenset({address(2)})


@pytest.mark.parametrize("size", [7, 300_000], ids=["small", "read-in-passes"])
def test_of_several_subsets_the_last_counts_and_none_takes_nothing_back(size: int) -> None:
    exchange = begin()
    data = body(prompt=size * "p")
    exchange.tell(request_headers(body_mode=DUPLEX, subset=frozenset({address(1)})))
    exchange.tell(m.BodyChunk(data[:-5], subset=frozenset({address(2)})))
    exchange.tell(m.BodyChunk(data[-5:-1], subset=EMPTY), m.BodyChunk(data[-1:], True))
    while not exchange.router.routed:
        exchange.tell(m.Wakeup())

    [routed] = exchange.router.routed
    assert routed.subset == EMPTY


def test_a_subset_that_comes_after_the_decision_changes_nothing() -> None:
    exchange = begin(early_decision_bytes=1)
    event = request_headers(body_mode=BodyMode.STREAMED, sends_body_early=True)
    exchange.tell(event, m.BodyChunk(b'{"model": "a", '))
    exchange.tell(m.BodyChunk(b'"n": 1}', True, EMPTY))

    [routed] = exchange.router.routed
    assert routed.subset is None


# --- who served ------------------------------------------------------------------------------


@pytest.mark.parametrize("phases", [True, False], ids=["response-phases", "access-log"])
def test_an_endpoint_that_served_in_another_s_place_is_told_once(phases: bool) -> None:
    exchange = begin(uses_response_phases=phases)
    exchange.tell(
        request_headers(body_mode=DUPLEX, response_body_mode=DUPLEX), m.BodyChunk(body(), True)
    )
    exchange.tell(m.ResponseHeaders(200, served_by=address(2)))
    exchange.tell(m.ResponseBody(b"x", True), m.StreamEnded())

    assert exchange.router.moved == [(PICK, address(2), 3.0)]


@pytest.mark.parametrize("by", [None, "", PICK.address])
def test_the_pick_s_own_endpoint_or_none_is_no_news(by: str | None) -> None:
    assert served(by, uses_response_phases=True).router.moved == []


def test_without_a_pick_nobody_is_told() -> None:
    """The data plane answered itself, whatever its metadata say."""
    exchange = begin(uses_response_phases=True)
    exchange.tell(request_headers(), m.ResponseHeaders(413, served_by=address(2)))

    assert exchange.router.moved == []


# --- data planes that do not tell the request line --------------------------------------------


def untold(*names: str, **fields: Any) -> m.RequestHeaders:
    """Headers of a completion request without `names`."""
    event = request_headers(body_mode=DUPLEX, **fields)
    kept = {name: value for name, value in event.headers.items() if name not in names}
    return m.RequestHeaders(kept, event.end_of_stream, event.body_mode)


@pytest.mark.parametrize("names", [(":path",), (":method",), (":path", ":method")])
def test_an_inference_request_is_known_by_its_body(names: tuple[str, ...]) -> None:
    exchange = begin()
    commands = exchange.tell(untold(*names), m.BodyChunk(body("a"), True))

    assert commands[0] == m.ContinueHeaders(PICK)
    [routed] = exchange.router.routed
    assert (routed.model, routed.path) == ("a", "" if ":path" in names else "/v1/completions")


def test_a_form_whose_path_is_not_told_is_read_as_a_form() -> None:
    exchange = begin()
    form = (
        b'--x\r\ncontent-disposition: form-data; name="model"\r\n\r\nwhisper\r\n'
        b'--x\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\nab\r\n--x--\r\n'
    )
    headers = {"content-type": "multipart/form-data; boundary=x"}
    exchange.tell(untold(":path", headers=headers), m.BodyChunk(form, True))

    [routed] = exchange.router.routed
    assert routed.model == "whisper"


def test_without_a_method_and_a_body_it_is_read_as_a_get() -> None:
    exchange = begin()
    [reply, _] = exchange.tell(untold(":method", path="/v1/models", end_of_stream=True))

    assert isinstance(reply, m.Reply)
    assert (reply.status, json.loads(reply.body)["object"]) == (200, "list")


def test_with_neither_method_nor_path_nor_body_it_is_refused() -> None:
    [reply, _] = begin().tell(untold(":path", ":method", end_of_stream=True))

    assert isinstance(reply, m.Reply)
    assert (reply.status, reply.headers) == (405, {"allow": "POST"})


@pytest.mark.parametrize("path", ["", "/", "*"])
def test_a_path_that_is_told_has_to_be_listed(path: str) -> None:
    [reply, _] = begin().tell(request_headers(path=path))

    assert isinstance(reply, m.Reply)
    assert reply.status == 404


@pytest.mark.parametrize("sessions", [NO_SOURCES, IN_HEADER])
def test_an_earlier_response_needs_a_session_where_the_path_is_not_told(
    sessions: SessionSources,
) -> None:
    """It may be `/v1/responses`, where the request would be lost on any other endpoint."""
    exchange = begin(sessions=sessions)
    exchange.tell(untold(":path", headers={"x-session": "s"}))
    [first, *_] = exchange.tell(m.BodyChunk(body(previous_response_id="r"), True))

    is_routed = first == m.ContinueHeaders(PICK)
    assert is_routed is (sessions is IN_HEADER)


# --- data planes that do not tell their modes ------------------------------------------------


def test_full_duplex_is_assumed_both_ways_where_the_data_plane_does_not_tell() -> None:
    exchange = begin(assumed_body_mode=DUPLEX)
    exchange.tell(request_headers(body_mode=None, response_body_mode=None))

    assert exchange.tell(m.BodyChunk(body(), True)) == [
        m.ContinueHeaders(PICK),
        m.EchoBody(body(), True),
    ]
    assert exchange.tell(m.ResponseHeaders(200)) == [m.ContinueResponseHeaders()]
    assert exchange.tell(m.ResponseBody(b"x", True)) == [m.EchoResponseBody(b"x", True)]


@pytest.mark.parametrize(("mode", "is_wanted"), [(None, True), (DUPLEX, False)])
def test_an_answer_is_wanted_half_closed_by_who_tells_no_mode(
    mode: BodyMode | None, is_wanted: bool
) -> None:
    exchange = begin(assumed_body_mode=DUPLEX)
    assert not exchange.stream.is_wanted_half_closed
    exchange.tell(request_headers(body_mode=mode))

    assert exchange.stream.is_wanted_half_closed is is_wanted


def test_no_other_mode_is_assumed_of_responses() -> None:
    exchange = begin(assumed_body_mode=BodyMode.STREAMED, uses_response_phases=True)
    exchange.tell(m.ResponseHeaders(401))

    assert exchange.tell(m.ResponseBody(b"x", True)) == [m.ContinueResponseBody()]


def test_a_local_reply_is_echoed_where_full_duplex_is_assumed() -> None:
    exchange = begin(assumed_body_mode=DUPLEX)
    exchange.tell(m.ResponseHeaders(401))

    assert exchange.tell(m.ResponseBody(b"x", True)) == [m.EchoResponseBody(b"x", True)]
