"""One request's life in every body mode: what each event is answered with."""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import patch

import pytest

from extproc.bounds import MAX_PATH_CHARS, MAX_REQUEST_ID_CHARS
from extproc.errors import ProtocolError
from extproc.learned.evidence import Evidence
from extproc.paths import DEFAULT_INFERENCE_PATHS, FORM_PATHS
from extproc.rejections import NO_MEMORY, model_not_found, no_endpoints, saturated
from extproc.request import body as body_module
from extproc.request import bodyslices, jsonmodel
from extproc.request import messages as m
from extproc.request.jsonsmall import SMALL_BYTES
from extproc.request.messages import BodyMode
from extproc.request.sessions import MAX_SESSION_BYTES
from extproc.request.transitions import CallState
from extproc.types import Outcome, Reason, Rejection, Wait
from tests.builders import adapter_card, base_card, body, request_headers
from tests.request.fakerouter import IN_HEADER, PICK, Exchange, begin

BODY = body()
DIGEST_OF_S = "bbf7769fea5c8d41a9068bd6edbb2c13"
STREAMED: dict[str, Any] = {"body_mode": BodyMode.STREAMED, "sends_body_early": True}
DUPLEX: dict[str, Any] = {"body_mode": BodyMode.FULL_DUPLEX_STREAMED}
SECRET = "sk-very-secret"
WEBSOCKET, H2C = {"upgrade": "WebSocket"}, {"upgrade": "h2c"}


def error_of(commands: list[m.Command]) -> tuple[int, dict[str, str]]:
    """The status and the error of what must be a reply and the end."""
    reply, end = commands
    assert isinstance(reply, m.Reply)
    assert end == m.EndStream()
    error: dict[str, str] = json.loads(reply.body)["error"]
    assert error["code"] == reply.details
    return reply.status, error


# --- a client that waits before its body -------------------------------------------------------


@pytest.mark.parametrize("mode", [BodyMode.FULL_DUPLEX_STREAMED, BodyMode.BUFFERED])
@pytest.mark.parametrize("written", ["100-continue", "100-Continue"])
def test_a_client_that_waits_for_a_100_for_ever_is_told_to_send_without(
    mode: BodyMode, written: str
) -> None:
    exchange = begin(max_continue_wait_s=5.0)
    first = exchange.tell(request_headers(body_mode=mode, headers={"expect": written}))
    assert first[-1] == m.WakeAt(exchange.now + 5.0)

    status, error = error_of(exchange.tell(m.Wakeup()))
    assert (status, error["code"]) == (417, "expectation_failed")
    assert "Expect" in error["message"]


def test_a_client_that_sends_its_body_without_the_100_is_routed() -> None:
    exchange = begin()
    exchange.tell(request_headers(**DUPLEX, headers={"expect": "100-continue"}))
    exchange.tell(m.BodyChunk(BODY[:5], False))

    assert exchange.tell(m.Wakeup()) == []
    assert exchange.tell(m.BodyChunk(BODY[5:], True))[0] == m.ContinueHeaders(PICK)


# --- how the body may come ------------------------------------------------------------------


def test_a_buffered_body_is_asked_for_and_routed_by_its_one_message() -> None:
    exchange = begin()

    assert exchange.tell(request_headers()) == [m.ContinueHeaders()]
    assert exchange.tell(m.BodyChunk(BODY, True)) == [m.ContinueBody(PICK), m.EndStream()]


def test_a_buffered_body_with_trailers_is_complete_without_end_of_stream() -> None:
    exchange = begin()
    exchange.tell(request_headers())

    assert exchange.tell(m.BodyChunk(BODY, False)) == [m.ContinueBody(PICK), m.EndStream()]


def test_without_protocol_config_the_assumed_body_mode_holds() -> None:
    buffered = begin()
    duplex = begin(assumed_body_mode=BodyMode.FULL_DUPLEX_STREAMED)
    event = request_headers(body_mode=None)

    assert buffered.tell(event) == [m.ContinueHeaders()]
    assert duplex.tell(event) == []


@pytest.mark.parametrize("end_of_stream", [True, False])
def test_a_buffered_part_is_routed_if_the_model_stands_in_it(end_of_stream: bool) -> None:
    exchange = begin()
    partial = request_headers(body_mode=BodyMode.BUFFERED_PARTIAL)

    assert exchange.tell(partial) == [m.ContinueHeaders()]
    part = BODY if end_of_stream else BODY[:-5]
    assert exchange.tell(m.BodyChunk(part, end_of_stream)) == [m.ContinueBody(PICK), m.EndStream()]


@pytest.mark.parametrize(
    ("mode", "end_of_stream", "is_whole"),
    [
        (BodyMode.BUFFERED, True, True),
        (BodyMode.BUFFERED, False, True),
        (BodyMode.BUFFERED_PARTIAL, True, True),
        (BodyMode.BUFFERED_PARTIAL, False, False),
        (BodyMode.STREAMED, True, True),
        (BodyMode.STREAMED, False, False),
        (BodyMode.FULL_DUPLEX_STREAMED, True, True),
    ],
)
def test_a_policy_is_told_whether_all_of_a_body_was_seen(
    mode: BodyMode, end_of_stream: bool, is_whole: bool
) -> None:
    exchange = begin(early_decision_bytes=1)
    headers = request_headers(body_mode=mode, sends_body_early=mode is BodyMode.STREAMED)
    exchange.tell(headers, m.BodyChunk(BODY if is_whole else BODY[:-5], end_of_stream))

    assert [each.is_whole for each in exchange.router.routed] == [is_whole]


def test_a_buffered_part_that_ends_before_the_model_is_too_large() -> None:
    exchange = begin()
    exchange.tell(request_headers(body_mode=BodyMode.BUFFERED_PARTIAL))

    status, error = error_of(exchange.tell(m.BodyChunk(b'{"prompt": "long')))

    assert (status, error["code"]) == (413, Reason.BODY_TOO_LARGE)
    assert exchange.router.routed == []


def test_an_early_streamed_body_holds_the_headers_answer_until_it_is_complete() -> None:
    exchange = begin()
    first, rest = BODY[:7], BODY[7:]

    assert exchange.tell(request_headers(**STREAMED), m.BodyChunk(first)) == []
    assert exchange.tell(m.BodyChunk(rest, True)) == [
        m.ContinueHeaders(PICK),
        m.ContinueBody(),
        m.ContinueBody(),
        m.EndStream(),
    ]


def test_a_long_streamed_body_is_routed_by_its_prefix() -> None:
    """A body longer than the data plane buffers would otherwise never be complete."""
    exchange = begin(early_decision_bytes=20)
    exchange.tell(request_headers(**STREAMED))

    assert exchange.tell(m.BodyChunk(b'{"prompt": "' + 20 * b"p")) == []
    late = exchange.tell(m.BodyChunk(20 * b"p" + b'", "model": "a", '))
    assert late == [m.ContinueHeaders(PICK), m.ContinueBody(), m.ContinueBody()]
    assert exchange.tell(m.BodyChunk(b'"n": 1')) == [m.ContinueBody()]
    assert exchange.tell(m.BodyChunk(b"}", True)) == [m.ContinueBody(), m.EndStream()]


@pytest.mark.parametrize("uses_response_phases", [True, False])
@pytest.mark.parametrize(
    ("rest", "code"),
    [
        (b'"model": "b"}', Reason.INVALID_BODY),
        (b'"x": [1], oops}', Reason.INVALID_JSON),
        (200 * b" ", Reason.BODY_TOO_LARGE),
    ],
)
def test_a_streamed_body_whose_rest_is_wrong_is_refused_and_its_pick_let_go_once(
    rest: bytes, code: Reason, uses_response_phases: bool
) -> None:
    """The endpoint never gets the whole body: a chunk goes on only after it has been read."""
    exchange = begin(
        early_decision_bytes=1, max_body_bytes=200, uses_response_phases=uses_response_phases
    )
    exchange.tell(request_headers(**STREAMED), m.BodyChunk(b'{"model": "a", '))
    _status, error = error_of(exchange.tell(m.BodyChunk(rest, True)))
    exchange.tell(m.StreamEnded())

    assert error["code"] == code
    assert [(pick, outcome) for pick, outcome, _ in exchange.router.finished] == [
        (PICK, Outcome.FAILED)
    ]


def test_a_streamed_body_that_names_its_model_again_goes_on() -> None:
    exchange = begin(early_decision_bytes=1)
    exchange.tell(request_headers(**STREAMED), m.BodyChunk(b'{"model": "a", '))

    assert exchange.tell(m.BodyChunk(b'"model": "a"')) == [m.ContinueBody()]
    assert exchange.tell(m.BodyChunk(b"}", True)) == [m.ContinueBody(), m.EndStream()]


def wake(exchange: Exchange) -> list[m.Command]:
    """Fire the timer as long as there is more to read; what the stream says then."""
    for _ in range(1000):
        *before, last = exchange.tell(m.Wakeup())
        if not (isinstance(last, m.WakeAt) and last.at_s == exchange.now):
            return [*before, last]
    raise AssertionError("it reads on and on")


LARGE = b'{"model": "a", "x": [' + 100_000 * b"[]," + b"0]}"
"""Several passes."""


def test_a_large_body_is_read_in_passes_and_others_have_their_turn_between_them() -> None:
    exchange = begin()
    exchange.tell(request_headers())

    assert exchange.tell(m.BodyChunk(LARGE, True)) == [m.WakeAt(exchange.now)]
    assert exchange.stream.state is CallState.READING
    assert not exchange.stream.is_answered
    assert wake(exchange) == [m.ContinueBody(PICK), m.EndStream()]


def test_a_buffered_part_of_many_passes_is_read_to_its_end() -> None:
    exchange = begin()
    exchange.tell(request_headers(body_mode=BodyMode.BUFFERED_PARTIAL), m.BodyChunk(LARGE[:-5]))

    assert wake(exchange) == [m.ContinueBody(PICK), m.EndStream()]


@pytest.mark.parametrize("has_trailers", [True, False])
@pytest.mark.parametrize(
    ("mode", "answers"),
    [
        (BodyMode.STREAMED, [m.ContinueHeaders(PICK), m.ContinueBody(), m.ContinueBody()]),
        (BodyMode.FULL_DUPLEX_STREAMED, None),
    ],
)
def test_what_comes_while_a_body_is_read_is_answered_with_it(
    mode: BodyMode, answers: list[m.Command] | None, has_trailers: bool
) -> None:
    exchange = begin()
    exchange.tell(request_headers(body_mode=mode, sends_body_early=True), m.BodyChunk(LARGE))
    assert exchange.tell(m.BodyChunk(b" ", not has_trailers)) == []
    assert exchange.tell(*([m.RequestTrailers()] if has_trailers else [])) == []

    commands = wake(exchange)
    assert commands[-1] == m.EndStream()
    assert (m.ContinueTrailers() in commands) is has_trailers
    if answers:
        assert commands[:3] == answers
    else:
        echo = [c for c in commands if isinstance(c, m.EchoBody)]
        assert b"".join(c.data for c in echo) == LARGE + b" "
        assert echo[-1].end_of_stream is not has_trailers


def test_more_than_one_message_of_a_buffered_body_breaks_the_protocol() -> None:
    exchange = begin()
    exchange.tell(request_headers(), m.BodyChunk(LARGE))

    with pytest.raises(ProtocolError):
        exchange.tell(m.BodyChunk(b" "))


@pytest.mark.parametrize("has_trailers", [True, False])
def test_the_rest_of_a_streamed_body_is_read_in_passes_too(has_trailers: bool) -> None:
    exchange = begin(early_decision_bytes=1)
    exchange.tell(request_headers(**STREAMED), m.BodyChunk(LARGE[:20]))
    assert exchange.tell(m.BodyChunk(LARGE[20:-1])) == [m.WakeAt(exchange.now)]
    assert exchange.tell(m.BodyChunk(LARGE[-1:], not has_trailers)) == []
    assert exchange.tell(*([m.RequestTrailers()] if has_trailers else [])) == []

    answers: list[m.Command] = []
    while exchange.stream.state is not CallState.DONE:
        answers += exchange.tell(m.Wakeup())
    trailers = [m.ContinueTrailers()] if has_trailers else []
    assert [c for c in answers if not isinstance(c, m.WakeAt)] == [
        m.ContinueBody(),
        m.ContinueBody(),
        *trailers,
        m.EndStream(),
    ]


def test_a_timer_of_before_means_nothing_once_all_is_read() -> None:
    exchange = begin(early_decision_bytes=1)
    exchange.tell(request_headers(**STREAMED), m.BodyChunk(LARGE[:20]))

    assert exchange.tell(m.Wakeup()) == []


def test_a_large_chunk_that_comes_while_held_is_read_before_the_answer() -> None:
    exchange = begin(Wait(until_s=1e9), early_decision_bytes=1)
    exchange.tell(request_headers(**STREAMED), m.BodyChunk(LARGE[:20]))
    assert exchange.tell(m.BodyChunk(LARGE[20:], True)) == []
    exchange.router.result = PICK

    assert wake(exchange) == [
        m.ContinueHeaders(PICK),
        m.ContinueBody(),
        m.ContinueBody(),
        m.EndStream(),
    ]


def test_what_a_body_holds_is_let_go_when_it_is_refused_or_answered_elsewhere() -> None:
    refused = begin(max_body_bytes=len(LARGE))
    refused.tell(request_headers(**DUPLEX), m.BodyChunk(LARGE), m.BodyChunk(b" "))
    elsewhere = begin()
    elsewhere.tell(request_headers(**DUPLEX), m.BodyChunk(LARGE), m.ResponseHeaders(413))

    assert refused.stream._incoming.reader.held_bytes == 0
    assert elsewhere.stream._incoming.reader.held_bytes == 0


def test_trailers_complete_a_streamed_body() -> None:
    """A whole body is answered at once: the data plane keeps the trailers until then."""
    exchange = begin()
    exchange.tell(request_headers(**STREAMED))

    assert exchange.tell(m.BodyChunk(BODY)) == [m.ContinueHeaders(PICK), m.ContinueBody()]
    assert exchange.tell(m.RequestTrailers()) == [m.ContinueTrailers(), m.EndStream()]


def test_trailers_after_an_early_decision_end_the_request() -> None:
    exchange = begin(early_decision_bytes=1)
    exchange.tell(request_headers(**STREAMED), m.BodyChunk(BODY))

    assert exchange.tell(m.RequestTrailers()) == [m.ContinueTrailers(), m.EndStream()]


def test_a_streamed_body_that_waits_for_the_headers_answer_is_asked_for_buffered() -> None:
    exchange = begin(allow_mode_override=True)
    late = request_headers(body_mode=BodyMode.STREAMED)

    assert exchange.tell(late) == [m.ContinueHeaders(ask_for_body=True)]
    assert exchange.tell(m.BodyChunk(BODY, True)) == [m.ContinueBody(PICK), m.EndStream()]


def test_asking_for_the_body_does_not_give_up_the_response_phases() -> None:
    exchange = begin(allow_mode_override=True, uses_response_phases=True)
    late = request_headers(body_mode=BodyMode.STREAMED)

    assert exchange.tell(late) == [m.ContinueHeaders(ask_for_body=True, keeps_response=True)]


@pytest.mark.parametrize("mode", [BodyMode.STREAMED, BodyMode.NONE])
def test_a_body_that_cannot_come_in_time_is_an_error_that_names_the_setting(mode: BodyMode) -> None:
    status, error = error_of(begin().tell(request_headers(body_mode=mode)))

    assert (status, error["code"]) == (500, Reason.BODY_NOT_SENT)
    assert "send_body_without_waiting_for_header_response" in error["message"]
    assert "allow_mode_override" in error["message"]


def test_a_duplex_body_is_routed_when_complete_and_echoed_in_chunks_that_envoy_takes() -> None:
    exchange = begin()
    long = body(prompt=150_000 * "p")

    assert exchange.tell(request_headers(**DUPLEX), m.BodyChunk(long[:99_999])) == []
    headers, *echo, end = exchange.tell(m.BodyChunk(long[99_999:], True))

    assert (headers, end) == (m.ContinueHeaders(PICK), m.EndStream())
    chunks = [chunk for chunk in echo if isinstance(chunk, m.EchoBody)]
    assert len(chunks) == len(echo)
    assert b"".join(chunk.data for chunk in chunks) == long
    assert max(len(chunk.data) for chunk in chunks) <= 62_000
    assert [chunk.end_of_stream for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def test_a_duplex_body_with_trailers_leaves_the_end_of_stream_to_them() -> None:
    exchange = begin()
    exchange.tell(request_headers(**DUPLEX), m.BodyChunk(BODY))

    assert exchange.tell(m.RequestTrailers()) == [
        m.ContinueHeaders(PICK),
        m.EchoBody(BODY),
        m.ContinueTrailers(),
        m.EndStream(),
    ]


def test_trailers_without_any_duplex_body_echo_nothing() -> None:
    exchange = begin(sessions=IN_HEADER)
    exchange.tell(
        request_headers("DELETE", "/v1/responses/r1", headers={"x-session": "s"}, **DUPLEX)
    )

    assert exchange.tell(m.RequestTrailers()) == [
        m.ContinueHeaders(PICK),
        m.ContinueTrailers(),
        m.EndStream(),
    ]


@pytest.mark.parametrize("mode", [BodyMode.NONE, None])
def test_a_model_that_the_data_plane_read_is_routed_at_the_headers(mode: BodyMode | None) -> None:
    exchange = begin(assumed_body_mode=BodyMode.NONE)

    commands = exchange.tell(request_headers(body_mode=mode, model="a"))

    assert commands == [m.ContinueHeaders(PICK), m.EndStream()]
    assert exchange.router.routed[0].model == "a"


def test_a_data_plane_that_found_no_model_is_answered_for_the_client() -> None:
    status, error = error_of(begin().tell(request_headers(body_mode=BodyMode.NONE, model="")))

    assert (status, error["code"]) == (400, Reason.MISSING_MODEL)


def test_the_body_wins_over_the_model_that_the_data_plane_read() -> None:
    exchange = begin()
    exchange.tell(request_headers(model="other"), m.BodyChunk(BODY, True))

    assert exchange.router.routed[0].model == "a"


def test_a_form_is_routed_by_its_field() -> None:
    exchange = begin()
    form = b'--b\r\ncontent-disposition: form-data; name="model"\r\n\r\nwhisper\r\n--b--\r\n'
    headers = {"content-type": "multipart/form-data; boundary=b"}
    exchange.tell(request_headers(path="/v1/audio/transcriptions", headers=headers))

    assert exchange.tell(m.BodyChunk(form, True)) == [m.ContinueBody(PICK), m.EndStream()]
    assert exchange.router.routed[0].model == "whisper"


@pytest.mark.parametrize("value", ["s", "s" * (MAX_SESSION_BYTES - 1), "\xff"])
def test_a_session_is_known_by_a_digest_that_is_as_long_for_any_value(value: str) -> None:
    exchange = begin(sessions=IN_HEADER)
    exchange.tell(request_headers(headers={"x-session": value}), m.BodyChunk(BODY, True))
    exchange_of_other = begin(sessions=IN_HEADER)
    other = request_headers(headers={"x-session": f"{value}x"})
    exchange_of_other.tell(other, m.BodyChunk(BODY, True))
    sessions = [each.router.routed[0].session for each in (exchange, exchange_of_other)]

    assert [len(each or "") for each in sessions] == [32, 32]
    assert len(set(sessions)) == 2


def test_what_a_client_can_make_long_is_cut_before_it_is_remembered() -> None:
    exchange = begin(sessions=IN_HEADER)
    headers = {"x-request-id": "i" * 60_000, "x-session": "s"}
    event = request_headers("DELETE", f"/v1/responses/{'r' * 60_000}", headers=headers, **DUPLEX)
    exchange.tell(event, m.BodyChunk(b"", True))
    [asked] = exchange.router.routed

    assert (len(asked.path), len(asked.request_id)) == (MAX_PATH_CHARS, MAX_REQUEST_ID_CHARS)


def test_an_unknown_model_of_any_length_is_named_shortly() -> None:
    exchange = begin()
    [reply, _] = exchange.tell(request_headers("GET", f"/v1/models/{'x' * 60_000}"))
    [rejection] = exchange.router.rejections

    assert isinstance(reply, m.Reply)
    assert (reply.status, len(rejection.model)) == (404, 256)
    assert len(reply.body) < 1000


@pytest.mark.parametrize("model", ["m" * 257, "a\x00"])
def test_a_model_that_the_data_plane_has_read_is_checked_like_any(model: str) -> None:
    exchange = begin()
    [reply, _] = exchange.tell(request_headers(body_mode=BodyMode.NONE, model=model))

    assert isinstance(reply, m.Reply)
    assert reply.status == 400
    assert not exchange.router.routed


def test_routing_is_told_all_that_is_known_of_a_request() -> None:
    exchange = begin(sessions=IN_HEADER)
    headers = {"x-request-id": "id-1", "x-session": "s"}
    subset = frozenset({"10.0.0.1:8000"})
    event = request_headers(path="/v1/completions?x=1", headers=headers, subset=subset)
    exchange.tell(event, m.BodyChunk(BODY, True))

    [asked] = exchange.router.routed
    assert (asked.model, asked.adapter, asked.path) == ("a", None, "/v1/completions")
    assert (asked.body_bytes, asked.request_id) == (len(BODY), "id-1")
    assert (asked.session, asked.subset) == (DIGEST_OF_S, subset)


# --- what is refused ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("event", "status", "code"),
    [
        (request_headers("GET", "/v1/completions"), 405, Reason.METHOD_NOT_ALLOWED),
        (request_headers("POST", "/v1/load_lora_adapter"), 404, Reason.UNKNOWN_PATH),
        (request_headers(headers={"content-encoding": "gzip"}), 415, Reason.ENCODED_BODY),
        (request_headers(headers={"content-length": "101"}), 413, Reason.BODY_TOO_LARGE),
        (request_headers(headers={"content-length": 5000 * "9"}), 413, Reason.BODY_TOO_LARGE),
        (request_headers(end_of_stream=True), 400, Reason.INVALID_JSON),
        (request_headers("GET", "/v1/responses/r1"), 400, Reason.STORED_RESPONSE),
        (request_headers("GET", "/v1/responses", headers=WEBSOCKET), 426, Reason.NO_WEBSOCKETS),
        (request_headers("GET", "/v1/responses?x=1", headers=WEBSOCKET), 426, Reason.NO_WEBSOCKETS),
        (
            request_headers("GET", "/v1/completions", headers=WEBSOCKET),
            405,
            Reason.METHOD_NOT_ALLOWED,
        ),
        (request_headers("GET", "/v1/realtime", headers=WEBSOCKET), 404, Reason.UNKNOWN_PATH),
        (request_headers("GET", "/v1/responses", headers=H2C), 405, Reason.METHOD_NOT_ALLOWED),
    ],
)
def test_what_the_headers_tell_is_refused_before_the_body(
    event: m.RequestHeaders, status: int, code: Reason
) -> None:
    exchange = begin(max_body_bytes=100)

    answered, error = error_of(exchange.tell(event))

    assert (answered, error["code"]) == (status, code)
    assert exchange.router.routed == []


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/completions", "POST"),
        ("POST", "/v1/models", "GET, HEAD"),
        ("POST", "/v1/responses/r1", "GET, HEAD, DELETE"),
    ],
)
def test_a_method_that_is_not_taken_is_told_those_that_are(
    method: str, path: str, allowed: str
) -> None:
    """RFC 9110 wants `Allow` in every 405."""
    [reply, _] = begin().tell(request_headers(method, path))

    assert isinstance(reply, m.Reply)
    assert (reply.status, reply.headers) == (405, {"allow": allowed})


@pytest.mark.parametrize(
    "headers",
    [{"content-encoding": "Identity"}, {"content-length": "100"}, {"content-length": "-1"}],
)
def test_headers_that_are_no_reason_to_refuse(headers: dict[str, str]) -> None:
    exchange = begin(max_body_bytes=100)

    assert exchange.tell(request_headers(headers=headers)) == [m.ContinueHeaders()]


@pytest.mark.parametrize("fields", [{}, STREAMED, DUPLEX])
def test_a_body_over_the_limit_is_too_large_and_one_of_the_limit_is_not(
    fields: dict[str, Any],
) -> None:
    event = request_headers(**{"body_mode": BodyMode.BUFFERED, **fields})
    fits = begin(max_body_bytes=len(BODY))
    over = begin(max_body_bytes=len(BODY) - 1)
    fits.tell(event, m.BodyChunk(BODY, True))
    over.tell(event)

    status, error = error_of(over.tell(m.BodyChunk(BODY, True)))

    assert (status, error["code"]) == (413, Reason.BODY_TOO_LARGE)
    assert fits.stream.pick is PICK


def test_chunks_count_together_against_the_limit() -> None:
    exchange = begin(max_body_bytes=10)
    exchange.tell(request_headers(**DUPLEX), m.BodyChunk(10 * b" "))

    assert error_of(exchange.tell(m.BodyChunk(b" ")))[0] == 413


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", Reason.INVALID_JSON),
        (b"{", Reason.INVALID_JSON),
        (b"[]", Reason.INVALID_BODY),
        (b'{"model": 1}', Reason.INVALID_BODY),
        (b'{"prompt": "p"}', Reason.MISSING_MODEL),
    ],
)
def test_a_body_that_names_no_model_is_a_bad_request(data: bytes, code: Reason) -> None:
    exchange = begin()
    exchange.tell(request_headers())

    status, error = error_of(exchange.tell(m.BodyChunk(data, True)))

    assert (status, error["code"]) == (400, code)
    assert exchange.router.routed == []


def test_trailers_where_a_buffered_body_should_be_mean_an_empty_body() -> None:
    exchange = begin()
    exchange.tell(request_headers())

    assert error_of(exchange.tell(m.RequestTrailers()))[0] == 400


def test_a_form_path_takes_forms_only() -> None:
    exchange = begin()
    exchange.tell(request_headers(path="/v1/audio/translations"))

    assert error_of(exchange.tell(m.BodyChunk(BODY, True)))[0] == 415


@pytest.mark.parametrize(
    ("rejection", "status", "retry_after", "dropped"),
    [
        (model_not_found("a"), 404, None, None),
        (saturated("a", 7), 429, "7", "rejected-saturated"),
        (NO_MEMORY, 429, "1", "rejected-saturated"),
        (no_endpoints("a"), 503, "1", "rejected-no-endpoints"),
    ],
)
@pytest.mark.parametrize("fields", [{}, STREAMED, DUPLEX])
def test_a_request_that_is_not_routed_gets_the_reason_and_when_to_retry(
    rejection: Rejection,
    status: int,
    retry_after: str | None,
    dropped: str | None,
    fields: dict[str, Any],
) -> None:
    exchange = begin(rejection)
    exchange.tell(request_headers(**{"body_mode": BodyMode.BUFFERED, **fields}))

    reply, _end = exchange.tell(m.BodyChunk(BODY, True))

    assert isinstance(reply, m.Reply)
    assert (reply.status, reply.headers.get("retry-after")) == (status, retry_after)
    assert reply.headers.get("x-llm-d-request-dropped-reason") == dropped
    assert exchange.stream.pick is None


@pytest.mark.parametrize("data", [b'{"prompt": "hunter2",', b'{"prompt": "hunter2"}', b"hunter2"])
def test_no_error_quotes_a_prompt_or_a_header(data: bytes) -> None:
    exchange = begin()
    exchange.tell(request_headers(headers={"authorization": SECRET, "x-request-id": SECRET}))

    reply, _end = exchange.tell(m.BodyChunk(data, True))

    assert isinstance(reply, m.Reply)
    assert b"hunter2" not in reply.body
    assert SECRET.encode() not in reply.body


# --- models and stored responses ------------------------------------------------------------


def models_exchange() -> Exchange:
    return begin(cards=[adapter_card("a"), base_card()])


@pytest.mark.parametrize("end_of_stream", [True, False])
def test_the_list_of_models_is_answered_here(end_of_stream: bool) -> None:
    event = request_headers("GET", "/v1/models", end_of_stream=end_of_stream)

    reply, end = models_exchange().tell(event)

    assert end == m.EndStream()
    assert isinstance(reply, m.Reply)
    assert reply.status == 200
    data = json.loads(reply.body)["data"]
    assert [(card["id"], card["parent"]) for card in data] == [("base", None), ("a", "base")]


def test_one_model_is_answered_here() -> None:
    reply, _end = models_exchange().tell(request_headers("GET", "/v1/models/a"))

    assert isinstance(reply, m.Reply)
    assert (reply.status, json.loads(reply.body)["id"]) == (200, "a")


def test_where_no_endpoint_can_answer_for_the_list_it_is_an_error() -> None:
    exchange = begin(no_endpoints())
    [reply, _] = exchange.tell(request_headers("GET", "/v1/models"))

    assert isinstance(reply, m.Reply)
    assert (reply.status, reply.headers["retry-after"]) == (503, "1")
    assert exchange.router.rejections == [no_endpoints()]


@pytest.mark.parametrize("path", ["/health", "/ping"])
def test_a_probe_is_answered_by_whether_a_request_could_be_served(path: str) -> None:
    well, ill = begin(), begin(no_endpoints())
    event = request_headers("GET", path, subset=frozenset({"10.0.0.1:1"}))

    assert well.tell(event) == [m.Reply(200, b"{}"), m.EndStream()]
    assert well.router.subsets == [frozenset({"10.0.0.1:1"})]
    reply, _ = ill.tell(event)
    assert isinstance(reply, m.Reply)
    assert (reply.status, reply.headers["retry-after"]) == (503, "1")
    assert ill.router.rejections == [], "no request was refused"


def test_the_version_is_ours_and_says_so() -> None:
    [reply, _] = begin(version="1.2.3").tell(request_headers("GET", "/version"))

    assert isinstance(reply, m.Reply)
    assert json.loads(reply.body) == {"version": "1.2.3+extproc"}


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/a"])
def test_models_are_asked_for_with_the_subset(path: str) -> None:
    exchange = models_exchange()
    exchange.tell(request_headers("GET", path, subset=frozenset({"10.0.0.1:1"})))

    assert exchange.router.subsets == [frozenset({"10.0.0.1:1"})]


def test_a_model_that_nobody_lists_is_not_found() -> None:
    status, error = error_of(models_exchange().tell(request_headers("GET", "/v1/models/x")))

    assert (status, error["code"]) == (404, Reason.MODEL_NOT_FOUND)


@pytest.mark.parametrize(
    ("method", "path", "fields"),
    [
        ("GET", "/v1/responses/r1", {"end_of_stream": True}),
        ("DELETE", "/v1/responses/r1", {"body_mode": BodyMode.NONE}),
        ("DELETE", "/v1/responses/r1", {"body_mode": None}),
    ],
)
def test_a_stored_response_without_a_body_goes_by_its_session_at_the_headers(
    method: str, path: str, fields: dict[str, Any]
) -> None:
    exchange = begin(sessions=IN_HEADER, assumed_body_mode=BodyMode.NONE)
    event = request_headers(method, path, headers={"x-session": "s"}, **fields)

    assert exchange.tell(event) == [m.ContinueHeaders(PICK), m.EndStream()]
    [asked] = exchange.router.routed
    assert (asked.model, asked.session) == ("", DIGEST_OF_S)


def test_a_stored_response_with_a_body_is_routed_whatever_the_body_says() -> None:
    exchange = begin(sessions=IN_HEADER)
    event = request_headers("POST", "/v1/responses/r1/cancel", headers={"x-session": "s"})

    assert exchange.tell(event) == [m.ContinueHeaders()]
    assert exchange.tell(m.BodyChunk(b"{}", True)) == [m.ContinueBody(PICK), m.EndStream()]
    assert exchange.router.routed[0].model == ""


@pytest.mark.parametrize("headers", [{}, {"x-session": ""}])
def test_a_stored_response_without_a_session_is_refused(headers: dict[str, str]) -> None:
    exchange = begin(sessions=IN_HEADER)
    event = request_headers("GET", "/v1/responses/r1", headers=headers, end_of_stream=True)

    assert error_of(exchange.tell(event))[1]["code"] == Reason.STORED_RESPONSE


@pytest.mark.parametrize(
    ("path", "is_refused"), [("/v1/responses", True), ("/v1/chat/completions", False)]
)
def test_a_previous_response_without_a_session_is_refused_where_it_means_one(
    path: str, is_refused: bool
) -> None:
    exchange = begin()
    exchange.tell(request_headers(path=path), m.BodyChunk(body(previous_response_id="r1"), True))

    codes = [rejection.reason for rejection in exchange.router.rejections]
    assert codes == ([Reason.STORED_RESPONSE] if is_refused else [])


def test_a_previous_response_is_routed_if_there_is_a_session() -> None:
    exchange = begin(sessions=IN_HEADER)
    exchange.tell(request_headers(path="/v1/responses", headers={"x-session": "s"}))
    data = body(previous_response_id="r1")

    assert exchange.tell(m.BodyChunk(data, True)) == [m.ContinueBody(PICK), m.EndStream()]


# --- response phases ------------------------------------------------------------------------


def answered(**fields: Any) -> Exchange:
    """A routed request whose stream stays open for the response."""
    exchange = begin(uses_response_phases=True)
    exchange.tell(request_headers(**fields), m.BodyChunk(BODY, True))
    return exchange


def test_with_response_phases_the_stream_stays_open_and_every_phase_is_answered() -> None:
    exchange = begin(uses_response_phases=True)

    assert exchange.tell(request_headers()) == [m.ContinueHeaders()]
    assert exchange.tell(m.BodyChunk(BODY, True)) == [m.ContinueBody(PICK)]
    assert exchange.tell(m.ResponseHeaders(200)) == [m.ContinueResponseHeaders()]
    assert exchange.tell(m.ResponseBody(b"x")) == [m.ContinueResponseBody()]
    assert exchange.tell(m.ResponseTrailers()) == [m.ContinueResponseTrailers()]
    assert exchange.tell(m.StreamEnded()) == []


def test_a_full_duplex_response_keeps_the_stream_open_whoever_ends_the_pick() -> None:
    """Envoy 1.40 loses the response's body, status 200, if the RPC ends while we hold a chunk."""
    exchange = begin()
    exchange.tell(request_headers(response_body_mode=BodyMode.FULL_DUPLEX_STREAMED))

    assert exchange.tell(m.BodyChunk(BODY, True)) == [m.ContinueBody(PICK)]
    assert exchange.tell(m.ResponseHeaders(200)) == [m.ContinueResponseHeaders()]
    assert exchange.tell(m.ResponseBody(b"x", True)) == [m.EchoResponseBody(b"x", True)]
    assert exchange.tell(m.StreamEnded()) == []
    assert exchange.router.finished == []


def test_a_full_duplex_response_body_is_echoed_in_chunks_that_envoy_takes() -> None:
    exchange = answered(response_body_mode=BodyMode.FULL_DUPLEX_STREAMED)
    exchange.tell(m.ResponseHeaders(200))

    assert exchange.tell(m.ResponseBody(100_000 * b"r", True)) == [
        m.EchoResponseBody(62_000 * b"r"),
        m.EchoResponseBody(38_000 * b"r", True),
    ]
    assert exchange.tell(m.ResponseBody(b"", True)) == [m.EchoResponseBody(b"", True)]


@pytest.mark.parametrize(
    ("response", "outcome"),
    [
        ([], Outcome.CANCELLED),
        ([m.ResponseHeaders(0)], Outcome.CANCELLED),
        ([m.ResponseHeaders(200)], Outcome.UNKNOWN),
        ([m.ResponseHeaders(404)], Outcome.UNKNOWN),
        ([m.ResponseHeaders(200, True)], Outcome.COMPLETED),
        ([m.ResponseHeaders(200), m.ResponseBody(b"")], Outcome.UNKNOWN),
        ([m.ResponseHeaders(200), m.ResponseBody(b"x"), m.ResponseBody(b"y")], Outcome.UNKNOWN),
        ([m.ResponseHeaders(200), m.ResponseBody(b"x", True)], Outcome.COMPLETED),
        ([m.ResponseHeaders(404), m.ResponseBody(b"x", True)], Outcome.COMPLETED),
        ([m.ResponseHeaders(200), m.ResponseBody(b""), m.ResponseTrailers()], Outcome.COMPLETED),
        ([m.ResponseHeaders(500)], Outcome.FAILED),
        ([m.ResponseHeaders(500), m.ResponseBody(b"x", True)], Outcome.FAILED),
    ],
)
def test_the_end_of_the_stream_finishes_the_pick_once(
    response: list[m.Event], outcome: Outcome
) -> None:
    exchange = answered()
    exchange.tell(*response)
    exchange.tell(m.StreamEnded(), m.StreamEnded())

    assert exchange.router.finished == [(PICK, outcome, exchange.now - 1.0)]


@pytest.mark.parametrize(
    ("response", "verdict"),
    [
        ([], (Evidence.UNANSWERED, 0)),
        ([m.ResponseHeaders(200)], (Evidence.NONE, 0)),
        ([m.ResponseHeaders(200), m.ResponseBody(b"xyz")], (Evidence.NONE, 3)),
        (
            [m.ResponseHeaders(200), m.ResponseBody(b"xyz"), m.ResponseBody(b"z", True)],
            (Evidence.SERVED, 4),
        ),
        ([m.ResponseHeaders(302, True)], (Evidence.FAILED, 0)),
        ([m.ResponseHeaders(400, True)], (Evidence.FAILED, 0)),
        ([m.ResponseHeaders(404)], (Evidence.NOT_FOUND, 0)),
        ([m.ResponseHeaders(429)], (Evidence.FULL, 0)),
        ([m.ResponseHeaders(503, content_type="application/json")], (Evidence.FULL, 0)),
        ([m.ResponseHeaders(503, content_type="text/plain")], (Evidence.BROKEN, 0)),
        ([m.ResponseHeaders(500, content_type="application/json")], (Evidence.FAILED, 0)),
        ([m.ResponseHeaders(502)], (Evidence.BROKEN, 0)),
        ([m.ResponseHeaders(504)], (Evidence.BROKEN, 0)),
    ],
)
def test_the_end_of_a_response_says_what_its_endpoint_did(
    response: list[m.Event], verdict: tuple[Evidence, int]
) -> None:
    """A response that is not seen to its end speaks neither for nor against it: its client may
    have left. Envoy's own replies are plain text."""
    exchange = answered()
    exchange.tell(*response, m.StreamEnded())

    assert exchange.router.verdicts == [verdict]


def test_without_response_phases_a_pick_is_never_finished_here() -> None:
    exchange = begin()
    exchange.tell(request_headers(), m.BodyChunk(BODY, True), m.StreamEnded())

    assert exchange.router.finished == []


def test_a_stream_that_ends_before_the_pick_finishes_nothing() -> None:
    exchange = begin(uses_response_phases=True)
    exchange.tell(request_headers(), m.StreamEnded())

    assert exchange.router.finished == []
    assert exchange.stream.state is CallState.DONE


def test_a_response_may_begin_while_the_request_is_still_sent() -> None:
    exchange = begin(uses_response_phases=True, early_decision_bytes=1)
    exchange.tell(request_headers(**STREAMED), m.BodyChunk(BODY))

    assert exchange.tell(m.ResponseHeaders(200)) == [m.ContinueResponseHeaders()]
    assert exchange.tell(m.BodyChunk(b" ")) == [m.ContinueBody()]
    assert exchange.tell(m.RequestTrailers()) == [m.ContinueTrailers()]
    assert exchange.stream.state is CallState.RESPONSE


@pytest.mark.parametrize("uses_response_phases", [True, False])
@pytest.mark.parametrize("before", [[], [request_headers()], [request_headers(**STREAMED)]])
def test_what_the_data_plane_answers_itself_passes_unchanged(
    before: list[m.Event], uses_response_phases: bool
) -> None:
    """Envoy shows its own 413 and another filter's 401 to the response phases."""
    exchange = begin(uses_response_phases=uses_response_phases)
    exchange.tell(*before)

    assert exchange.tell(m.ResponseHeaders(413)) == [m.ContinueResponseHeaders()]
    assert exchange.tell(m.ResponseBody(b"large", True)) == [m.ContinueResponseBody()]
    assert exchange.tell(m.ResponseTrailers()) == [m.ContinueResponseTrailers()]
    assert exchange.stream.is_answered
    exchange.tell(m.StreamEnded())
    assert exchange.router.routed == []
    assert exchange.router.finished == []


@pytest.mark.parametrize("is_asked_first", [True, False])
def test_what_the_data_plane_answers_itself_is_echoed_in_full_duplex(is_asked_first: bool) -> None:
    exchange = begin()
    mode = BodyMode.FULL_DUPLEX_STREAMED
    if is_asked_first:
        exchange.tell(request_headers(response_body_mode=mode))
    headers = m.ResponseHeaders(401) if is_asked_first else m.ResponseHeaders(401, body_mode=mode)
    exchange.tell(headers)

    assert exchange.tell(m.ResponseBody(b"no", True)) == [m.EchoResponseBody(b"no", True)]


@pytest.mark.parametrize("uses_response_phases", [True, False])
def test_an_answer_that_could_not_be_given_fails_the_pick_once(uses_response_phases: bool) -> None:
    exchange = begin(uses_response_phases=uses_response_phases)
    exchange.tell(request_headers(), m.BodyChunk(BODY, True))

    exchange.stream.abandon(now=9.0)
    exchange.stream.abandon(now=10.0)
    exchange.tell(m.StreamEnded())

    assert exchange.router.finished == [(PICK, Outcome.FAILED, 9.0)]


def test_abandoning_before_a_pick_finishes_nothing() -> None:
    exchange = begin()
    exchange.stream.abandon(now=1.0)

    assert exchange.router.finished == []
    assert exchange.stream.is_answered


def test_a_stream_is_answered_once_the_request_is_decided() -> None:
    exchange = begin(uses_response_phases=True)
    seen = [exchange.stream.is_answered]
    for event in (request_headers(), m.BodyChunk(BODY, True)):
        exchange.tell(event)
        seen.append(exchange.stream.is_answered)

    assert seen == [False, False, True]


# --- when memory is short -------------------------------------------------------------------


@pytest.mark.parametrize("mode", [STREAMED, DUPLEX])
def test_what_is_kept_of_a_body_is_told_until_it_is_let_go(mode: dict[str, Any]) -> None:
    exchange = begin(early_decision_bytes=1_000_000)
    exchange.tell(request_headers(**mode))
    assert exchange.stream.held_bytes() == 0
    exchange.tell(m.BodyChunk(BODY[:9]))
    first = exchange.stream.held_bytes()
    exchange.tell(m.BodyChunk(BODY[9:-1]))
    assert len(BODY) - 1 <= exchange.stream.held_bytes() <= len(BODY) + 200
    assert 9 <= first < exchange.stream.held_bytes()
    exchange.tell(m.BodyChunk(BODY[-1:], True))

    assert exchange.stream.state is CallState.DONE
    assert exchange.stream.held_bytes() == 0


@pytest.mark.parametrize("mode", [STREAMED, DUPLEX, {}])
def test_a_part_that_is_larger_than_any_body_may_be_gets_413(mode: dict[str, Any]) -> None:
    exchange = begin()
    exchange.tell(request_headers(**mode))
    commands = exchange.tell(m.Overloaded(is_too_large=True))
    status, error = error_of(commands)

    assert (status, error["code"]) == (413, "body_too_large")
    assert [reason.reason for reason in exchange.router.rejections] == [Reason.BODY_TOO_LARGE]


@pytest.mark.parametrize("mode", [STREAMED, DUPLEX, {}])
def test_without_memory_an_unfinished_request_gets_429_and_keeps_nothing(
    mode: dict[str, Any],
) -> None:
    exchange = begin()
    exchange.tell(request_headers(**mode))
    if mode:
        exchange.tell(m.BodyChunk(BODY[:9]))
    commands = exchange.tell(m.Overloaded())
    status, error = error_of(commands)
    assert isinstance(commands[0], m.Reply)

    assert (status, error["code"]) == (429, "memory")
    assert commands[0].headers["retry-after"] == "1"
    assert exchange.stream.held_bytes() == 0
    assert [reason.reason for reason in exchange.router.rejections] == [Reason.MEMORY]
    assert exchange.tell(m.BodyChunk(BODY[9:], True)) == []


@pytest.mark.parametrize(("mode", "is_whole"), [({}, True), (STREAMED, False), (DUPLEX, False)])
def test_a_body_that_is_being_read_is_whole_only_if_no_more_can_come(
    mode: dict[str, Any], is_whole: bool
) -> None:
    """What counts as whole is given up last, and waits for nobody's room."""
    exchange = begin(early_decision_bytes=1)
    with (
        patch.dict(vars(jsonmodel), {"SMALL_BYTES": 0}),
        patch.dict(vars(bodyslices), {"SLICE_BYTES": 7, "WORK_PER_PASS": 1}),
        patch.dict(vars(body_module), {"SMALL_BYTES": 0}),
    ):
        exchange.tell(request_headers(**mode), m.BodyChunk(BODY[:-1]))
    assert exchange.stream.state is CallState.READING

    assert exchange.stream.is_whole == is_whole


def test_without_memory_for_the_rest_of_a_routed_body_its_pick_is_let_go_once() -> None:
    exchange = begin(early_decision_bytes=1)
    exchange.tell(request_headers(**STREAMED), m.BodyChunk(BODY + b" "))
    assert exchange.stream.state is CallState.REST
    commands = exchange.tell(m.Overloaded())

    assert error_of(commands)[0] == 429
    assert [outcome for _, outcome, _ in exchange.router.finished] == [Outcome.FAILED]


def test_a_refused_request_keeps_no_bytes_although_its_stream_lives() -> None:
    exchange = begin(max_body_bytes=100)
    exchange.tell(request_headers(**DUPLEX), m.BodyChunk(b"x" * 90))
    parts = exchange.stream._incoming.reader._kept  # what a slow reader would keep alive
    exchange.tell(m.BodyChunk(b"x" * 90))

    assert exchange.stream.state is CallState.DONE
    assert parts == []


def test_a_stream_says_who_has_to_act_next() -> None:
    """First the data plane, until all has come; then nothing more of the body is to be kept."""
    exchange = begin(Wait(until_s=0.0))
    seen = [(exchange.stream.awaits_message, exchange.stream.is_whole)]
    for event in (request_headers(), m.BodyChunk(BODY, True)):
        exchange.tell(event)
        seen.append((exchange.stream.awaits_message, exchange.stream.is_whole))

    assert seen == [(True, False), (True, False), (False, True)]


# --- beginnings of prompts -------------------------------------------------------------------

MODES: list[dict[str, Any]] = [
    {"body_mode": BodyMode.BUFFERED},
    {"body_mode": BodyMode.BUFFERED_PARTIAL},
    STREAMED,
    DUPLEX,
]


def hashes_of(
    *, mode: dict[str, Any], wanted: bool = True, path: str = "/v1/completions", **fields: Any
) -> tuple[int, ...]:
    """Those of a request with this body."""
    exchange = begin()
    exchange.router.uses_cached_bytes = wanted
    exchange.tell(request_headers(path=path, **mode), m.BodyChunk(body(**fields), True))
    [asked] = exchange.router.routed
    return asked.prefix_hashes


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_the_turns_of_a_conversation_have_the_hashes_of_their_beginnings(
    mode: dict[str, Any],
) -> None:
    turns = [{"role": "user", "content": "x" * 1500}, {"role": "assistant", "content": "y" * 2500}]
    tools = [{"type": "function"}]

    first = hashes_of(mode=mode, messages=turns[:1], tools=tools)
    second = hashes_of(mode=mode, tools=tools, max_tokens=9, messages=turns)

    assert len(first) == 1
    assert second[:1] == first
    assert len(second) == 4  # of 4,100 bytes
    assert hashes_of(mode=mode, messages=turns[:1]) != first
    assert hashes_of(mode=mode, messages=turns[:1], tools=tools, model="b") != first
    assert hashes_of(mode=mode, messages=turns[:1], tools=tools, cache_salt="c") != first


@pytest.mark.parametrize("name", ["system", "instructions", "messages", "prompt", "input"])
def test_whatever_a_prompt_is_made_of_counts(name: str) -> None:
    one: dict[str, Any] = {name: "x" * 1500}
    other: dict[str, Any] = {name: "y" * 1500}

    assert len(hashes_of(mode=DUPLEX, **one)) == 1
    assert hashes_of(mode=DUPLEX, **one) != hashes_of(mode=DUPLEX, **other)


def test_hashes_are_not_computed_where_nobody_asks() -> None:
    assert hashes_of(mode=DUPLEX, wanted=False, prompt="x" * 1500) == ()


@pytest.mark.parametrize("path", sorted({*DEFAULT_INFERENCE_PATHS} - FORM_PATHS))
def test_only_prompts_that_an_engine_generates_from_have_hashes(path: str) -> None:
    """Counted or embedded, a prompt leaves nothing in the KV cache that generates."""
    hashes = hashes_of(mode=DUPLEX, path=path, messages="x" * 1500)

    generating = {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"}
    assert bool(hashes) == (path in generating)


def test_a_body_that_is_not_small_has_no_hashes() -> None:
    assert len(hashes_of(mode=DUPLEX, prompt="x" * 200_000)) == 26
    assert hashes_of(mode=DUPLEX, prompt="x" * SMALL_BYTES) == ()


@pytest.mark.parametrize(("num_braces", "num_hashes"), [(0, 2), (7, 2), (8, 0)])
def test_a_streamed_body_has_hashes_wherever_it_is_cut(num_braces: int, num_hashes: int) -> None:
    """A brace at the end of a chunk may be that of the body; after eight others nobody looks."""
    exchange = begin()
    exchange.router.uses_cached_bytes = True
    whole = body(messages=[{"content": "x" * 2100}] + [{"n": 1}] * num_braces)
    chunks = [f"{each}}}".encode() for each in whole.decode().split("}")[:-1]]
    assert b"".join(chunks) == whole

    exchange.tell(request_headers(**STREAMED), *(m.BodyChunk(each, False) for each in chunks))

    [asked] = exchange.router.routed
    assert len(asked.prefix_hashes) == num_hashes


def test_a_held_request_keeps_nothing_of_its_prompt() -> None:
    exchange = begin()
    exchange.router.num_waits = 1
    exchange.tell(request_headers(), m.BodyChunk(body(prompt="x" * 5000), True))

    assert exchange.stream.state is CallState.WAITING
    assert exchange.stream._incoming.reader.take_prompt() == ()
