"""Another model for the pod, in each body mode and while a request is held, and back again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from extproc.request import messages as m
from extproc.request.body import CHUNK_OVERHEAD_BYTES, MAX_ECHO_BYTES
from extproc.request.controlheaders import names_of
from extproc.request.interfaces import StreamSettings
from extproc.request.lostrewrites import FORGET_S, LostRewrites
from extproc.request.messages import BodyMode
from extproc.request.sessions import SessionSources
from extproc.types import Pick, Reason, Rejection, RequestInfo, Wait
from tests.builders import body, pick, request_headers
from tests.request.fakerouter import PICK, Exchange, FakeRouter

BODY, CHANGED = body("alias"), body("a")
LENGTH = {"content-length": str(len(BODY))}
DUPLEX = BodyMode.FULL_DUPLEX_STREAMED
REWRITE = {"x-llm-d-model-name-rewrite": "a"}
ROUTED = pick(info=RequestInfo("a", written="alias"))


TARGETS = {"alias": "a", "": "all"}


def begin(
    result: Pick | Rejection | Wait = PICK, *, targets: Mapping[str, str] = TARGETS, **settings: Any
) -> Exchange:
    """A stream for which pods know `alias` as `a`, and a body without a model as `all`."""
    router = FakeRouter(result, targets=targets)
    return Exchange(router, router.stream(StreamSettings(**settings)))


def code_of(commands: list[m.Command]) -> tuple[int, str]:
    reply, end = commands
    assert isinstance(reply, m.Reply)
    assert end == m.EndStream()
    return reply.status, json.loads(reply.body)["error"]["code"]


# --- requests --------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [BodyMode.BUFFERED, BodyMode.BUFFERED_PARTIAL])
@pytest.mark.parametrize("headers", [LENGTH, {}])
def test_a_body_in_one_message_is_replaced_with_its_length_if_it_had_one(
    mode: BodyMode, headers: dict[str, str]
) -> None:
    exchange = begin()
    exchange.tell(request_headers(body_mode=mode, headers=headers))

    length = len(CHANGED) if headers else None
    assert exchange.tell(m.BodyChunk(BODY, True)) == [
        m.ContinueBody(PICK, CHANGED, length),
        m.EndStream(),
    ]


@pytest.mark.parametrize("num_waits", [0, 1])
@pytest.mark.parametrize("result", [PICK, Rejection(503, Reason.NO_ENDPOINTS, "")])
def test_a_drawn_target_is_known_by_its_number_and_a_refusal_counts_for_it(
    result: Pick | Rejection, num_waits: int
) -> None:
    router = FakeRouter(result, targets=TARGETS, drawn=7, num_waits=num_waits)
    exchange = Exchange(router, router.stream())
    exchange.tell(request_headers(), m.BodyChunk(BODY, True), m.Wakeup())

    assert [each.drawn_target for each in router.routed] == [7]
    assert router.refused == ([7] if isinstance(result, Rejection) else [])


def test_a_full_duplex_body_is_sent_on_with_another_model_and_length() -> None:
    exchange = begin()
    exchange.tell(request_headers(body_mode=DUPLEX, headers=LENGTH), m.BodyChunk(BODY[:12]))

    assert exchange.tell(m.BodyChunk(BODY[12:], True)) == [
        m.ContinueHeaders(PICK, len(CHANGED)),
        m.EchoBody(CHANGED, True),
        m.EndStream(),
    ]


def test_a_long_full_duplex_body_with_trailers_is_cut_as_before() -> None:
    exchange = begin()
    long = BODY[:-1] + b',"x":"' + 70_000 * b"x" + b'"}'
    exchange.tell(request_headers(body_mode=DUPLEX), m.BodyChunk(long))
    first, *echo, last = exchange.tell(m.RequestTrailers())[:-1]

    assert (first, last) == (m.ContinueHeaders(PICK), m.ContinueTrailers())
    sent = [each for each in echo if isinstance(each, m.EchoBody)]
    assert b"".join(each.data for each in sent) == long.replace(b'"alias"', b'"a"')
    assert max(len(each.data) for each in sent) == MAX_ECHO_BYTES


def test_the_router_is_told_both_names() -> None:
    exchange = begin()
    exchange.tell(request_headers(), m.BodyChunk(BODY, True))

    [asked] = exchange.router.routed
    assert (asked.model, asked.written, asked.client_model) == ("a", "alias", "alias")


def test_a_model_without_another_name_goes_on_as_it_is() -> None:
    exchange = begin()
    exchange.tell(request_headers(headers=LENGTH))

    assert exchange.tell(m.BodyChunk(body("b"), True)) == [m.ContinueBody(PICK), m.EndStream()]
    [asked] = exchange.router.routed
    assert (asked.model, asked.written, asked.client_model) == ("b", "", "b")


def test_a_full_duplex_body_without_another_name_is_echoed() -> None:
    exchange = begin()
    exchange.tell(request_headers(body_mode=DUPLEX, headers=LENGTH))

    assert exchange.tell(m.BodyChunk(body("b"), True)) == [
        m.ContinueHeaders(PICK),
        m.EchoBody(body("b"), True),
        m.EndStream(),
    ]


def test_a_body_without_a_model_gets_one_where_a_rule_has_one_for_it() -> None:
    exchange = begin()
    exchange.tell(request_headers(), m.BodyChunk(b'{"prompt":"p"}', True))
    [asked] = exchange.router.routed

    assert (asked.model, asked.client_model) == ("all", "all")


@pytest.mark.parametrize("data", [b'{"prompt":"p"}', b'{"model":null}', b'{"model":""}'])
def test_a_body_without_a_model_is_refused_where_nobody_has_one_for_it(data: bytes) -> None:
    exchange = begin(targets={"alias": "a"})
    exchange.tell(request_headers())

    assert code_of(exchange.tell(m.BodyChunk(data, True))) == (400, Reason.MISSING_MODEL)


def test_another_fault_of_a_body_is_told_as_it_is() -> None:
    exchange = begin()
    exchange.tell(request_headers())

    assert code_of(exchange.tell(m.BodyChunk(b'{"model":1}', True)))[1] == Reason.INVALID_BODY


@pytest.mark.parametrize(
    "event",
    [
        request_headers(body_mode=BodyMode.STREAMED, sends_body_early=True),
        request_headers(body_mode=BodyMode.BUFFERED_PARTIAL),
    ],
)
def test_a_body_that_is_not_ours_to_change_is_refused_if_it_needs_another_model(
    event: m.RequestHeaders,
) -> None:
    def told(model: str) -> list[m.Command]:
        exchange = begin(early_decision_bytes=1)
        exchange.tell(event)
        return exchange.tell(m.BodyChunk(body(model)[:-2]))

    assert code_of(told("alias")) == (500, Reason.NOT_REWRITABLE)
    assert not isinstance(told("b")[0], m.Reply)


def test_a_model_that_only_the_data_plane_has_read_cannot_be_changed() -> None:
    event = request_headers(body_mode=BodyMode.NONE, model="alias")

    assert code_of(begin().tell(event)) == (500, Reason.NOT_REWRITABLE)


def test_a_body_that_was_asked_for_is_rewritten() -> None:
    exchange = begin(allow_mode_override=True)
    event = request_headers(body_mode=BodyMode.STREAMED)

    assert exchange.tell(event) == [m.ContinueHeaders(ask_for_body=True)]
    assert exchange.tell(m.BodyChunk(BODY, True))[0] == m.ContinueBody(PICK, CHANGED)


@pytest.mark.parametrize("is_trusted", [True, False])
def test_a_header_names_the_model_only_where_it_is_trusted(is_trusted: bool) -> None:
    trusted = names_of(["model_rewrite"] if is_trusted else [])
    exchange = begin(targets={}, trusted_headers=trusted)
    exchange.tell(request_headers(headers=REWRITE))
    answer = exchange.tell(m.BodyChunk(BODY, True))[0]

    assert answer == m.ContinueBody(PICK, CHANGED if is_trusted else None)
    assert exchange.router.asked_targets == ([("alias", "a")] if is_trusted else [])


def test_a_stored_response_is_never_rewritten() -> None:
    exchange = begin(sessions=SessionSources("header:s"))
    path = "/v1/responses/resp_1"
    exchange.tell(request_headers("GET", path, headers={"s": "x"}, end_of_stream=True))

    assert exchange.router.asked_targets == []
    assert [asked.model for asked in exchange.router.routed] == [""]


# --- held requests ---------------------------------------------------------------------------


def test_a_held_request_keeps_its_target_and_its_body() -> None:
    exchange = begin()
    exchange.router.hold_s = 30.0
    exchange.tell(request_headers(headers=LENGTH), m.BodyChunk(BODY, True))
    [ticket] = exchange.router.tickets

    kept_bytes = len(BODY) + CHUNK_OVERHEAD_BYTES
    assert exchange.router.held_bytes == [kept_bytes]
    assert exchange.stream.held_bytes() == kept_bytes
    ticket.result = ROUTED
    assert exchange.tell(m.Wakeup()) == [
        m.ContinueBody(ROUTED, CHANGED, len(CHANGED)),
        m.EndStream(),
    ]
    assert len(exchange.router.asked_targets) == 1


def test_a_request_that_is_asked_for_in_vain_keeps_its_target() -> None:
    exchange = begin()
    exchange.router.num_waits = 2
    exchange.tell(request_headers(), m.BodyChunk(BODY, True), m.Wakeup(), m.Wakeup())

    assert [asked.model for asked in exchange.router.routed] == ["a"]
    assert exchange.router.num_looks == 3
    assert len(exchange.router.asked_targets) == 1


def test_a_held_request_that_stays_as_it_is_keeps_no_body() -> None:
    exchange = begin()
    exchange.router.hold_s = 30.0
    exchange.tell(request_headers(), m.BodyChunk(body("b"), True))

    assert exchange.router.held_bytes == [0]


# --- responses -------------------------------------------------------------------------------


def responding(mode: BodyMode, content_type: str = "application/json", **settings: Any) -> Exchange:
    """A rewritten request that has been routed, and whose response begins."""
    exchange = begin(ROUTED, restore_model=True, **settings)
    exchange.tell(request_headers(response_body_mode=mode))
    assert exchange.tell(m.BodyChunk(BODY, True)) == [m.ContinueBody(ROUTED, CHANGED)]
    begins = m.ResponseHeaders(200, content_type=content_type)
    changes = content_type != "text/plain"
    assert exchange.tell(begins) == [m.ContinueResponseHeaders(drops_length=changes)]
    return exchange


def test_a_full_duplex_response_names_what_the_client_wrote() -> None:
    exchange = responding(DUPLEX)

    assert exchange.tell(m.ResponseBody(b'{"model":"')) == [m.EchoResponseBody(b'{"model":')]
    assert exchange.tell(m.ResponseBody(b'a"')) == [m.EchoResponseBody(b'"alias"')]
    assert exchange.tell(m.ResponseBody(b"}", True)) == [m.EchoResponseBody(b"}", True)]


def test_what_is_kept_goes_on_at_the_end_and_before_trailers() -> None:
    cut = responding(DUPLEX)
    trailed = responding(DUPLEX)
    for exchange in (cut, trailed):
        exchange.tell(m.ResponseBody(b'{"model":'))
        assert exchange.tell(m.ResponseBody(b'"a')) == []

    assert cut.tell(m.ResponseBody(b"", True)) == [m.EchoResponseBody(b'"a', True)]
    assert trailed.tell(m.ResponseTrailers()) == [
        m.EchoResponseBody(b'"a'),
        m.ContinueResponseTrailers(),
    ]


def test_a_streamed_response_is_changed_message_by_message() -> None:
    exchange = responding(BodyMode.STREAMED, "text/event-stream")
    events = b'data: {"model":"a"}\n\n'

    assert exchange.tell(m.ResponseBody(events[:16])) == [
        m.ContinueResponseBody(b'data: {"model":')
    ]
    assert exchange.tell(m.ResponseBody(events[16:])) == [m.ContinueResponseBody(b'"alias"}\n\n')]
    assert exchange.tell(m.ResponseTrailers()) == [m.ContinueResponseTrailers()]


def test_a_buffered_response_is_changed_as_a_whole() -> None:
    exchange = responding(BodyMode.BUFFERED)

    assert exchange.tell(m.ResponseBody(b'{"model":"a"}')) == [
        m.ContinueResponseBody(b'{"model":"alias"}')
    ]


def test_a_response_of_another_type_stays_as_it_is() -> None:
    exchange = responding(DUPLEX, "text/plain")

    assert exchange.tell(m.ResponseBody(b'"a"', True)) == [m.EchoResponseBody(b'"a"', True)]


def test_a_response_stays_as_it_is_where_nothing_is_to_be_restored() -> None:
    begins = m.ResponseHeaders(200, content_type="application/json")
    for settings, result, event in (
        ({"restore_model": False}, ROUTED, begins),
        ({"restore_model": True}, PICK, begins),
        ({"restore_model": True}, ROUTED, m.ResponseHeaders(204, True)),
    ):
        exchange = begin(result, targets=TARGETS, uses_response_phases=True, **settings)
        exchange.tell(request_headers(response_body_mode=DUPLEX), m.BodyChunk(BODY, True))

        assert exchange.tell(event) == [m.ContinueResponseHeaders()]


def test_the_rpc_ends_at_once_where_no_response_comes() -> None:
    exchange = begin(ROUTED, restore_model=True)
    exchange.tell(request_headers(response_body_mode=BodyMode.NONE))

    assert exchange.tell(m.BodyChunk(BODY, True))[-1] == m.EndStream()


# --- rewrites that did not reach the pod -----------------------------------------------------

REFUSED = b'{"error":{"message":"The model `alias` does not exist.","code":404}}'
BY_AI_GATEWAY = {"x-ai-eg-model": "alias"}


def answered(
    status: int,
    *parts: bytes,
    mode: BodyMode = DUPLEX,
    content_type: str = "application/json",
    headers: Mapping[str, str] = LENGTH,
    result: Pick = ROUTED,
) -> LostRewrites:
    """What is told of a rewrite after an answer in parts."""
    exchange = begin(result, restore_model=True, uses_response_phases=True)
    exchange.tell(request_headers(headers=dict(headers), response_body_mode=mode))
    exchange.tell(m.BodyChunk(BODY, True))
    exchange.tell(m.ResponseHeaders(status, not parts, content_type=content_type))
    exchange.tell(*(m.ResponseBody(part, part is parts[-1]) for part in parts))
    return exchange.router.lost_rewrites


@pytest.mark.parametrize(
    ("status", "parts", "content_type"),
    [
        (404, [REFUSED], "application/json"),
        (404, [], ""),
        (200, [b'{"id":"x","mod', b'el":"alias","choices":[]}'], "application/json"),
        (200, [b'data: {"model":"alias"}\n\n', b"data: [DONE]\n\n"], "text/event-stream"),
    ],
)
def test_a_rewrite_that_a_filter_has_undone_is_told_once_for_a_request(
    status: int, parts: list[bytes], content_type: str
) -> None:
    lost = answered(status, *parts, content_type=content_type)

    assert lost.counts.total() == 1
    (line,) = lost.take_news()
    assert line.startswith("the gateway has undone a rewrite: a pod read 'alias' where")
    assert "'a'" in line


def test_the_gateway_is_named_where_its_headers_tell_it() -> None:
    lost = answered(404, REFUSED, headers=BY_AI_GATEWAY)

    assert lost.warnings(now=0.0)[0].startswith("Envoy AI Gateway has undone a rewrite")


def test_a_gateway_is_still_known_after_a_hold() -> None:
    exchange = begin(Wait(1.0), restore_model=True)
    exchange.router.num_waits = 1
    headers = request_headers(headers=dict(BY_AI_GATEWAY), response_body_mode=DUPLEX)
    exchange.tell(headers, m.BodyChunk(BODY, True))
    exchange.router.result = ROUTED
    exchange.tell(m.Wakeup(), m.ResponseHeaders(404), m.ResponseBody(REFUSED, True))

    assert "Envoy AI Gateway" in exchange.router.lost_rewrites.take_news()[0]


@pytest.mark.parametrize(
    ("status", "parts"),
    [
        (200, [b'{"model":"a"}']),
        (200, [b'{"model":"another"}']),
        (200, [b"[]"]),
        (404, [b"Not Found"]),
        (404, [b'{"error":{"message":"The model `a` does not exist."}}']),
        (400, [b'{"error":{"message":"too long for alias"}}']),
        (503, []),
    ],
)
def test_other_answers_tell_of_no_lost_rewrite(status: int, parts: list[bytes]) -> None:
    assert answered(status, *parts).counts.total() == 0


def test_without_a_rewrite_none_is_lost() -> None:
    assert answered(404, REFUSED, result=PICK).counts.total() == 0


def test_the_warning_ends_after_a_while_and_the_next_one_is_news_again() -> None:
    lost = LostRewrites()
    assert lost.warnings(now=0.0) == []
    for now in (0.0, 1.0):
        lost.note("the gateway", "alias", "a", now=now)
    assert len(lost.take_news()) == 1
    assert lost.take_news() == []
    assert lost.warnings(now=FORGET_S + 1.0)
    assert lost.warnings(now=FORGET_S + 2.0) == []

    lost.note("the gateway", "alias", "a", now=FORGET_S + 2.0)
    assert len(lost.take_news()) == 1
