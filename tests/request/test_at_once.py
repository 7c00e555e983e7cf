"""A body that is read at once has the answers, picks and counts of one that a reader reads."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import event as note
from hypothesis import given
from hypothesis import strategies as st

from extproc.learned.prefixes import MARKS_BYTES
from extproc.request import incoming
from extproc.request.body import BodyReader
from extproc.request.codec import Codec
from extproc.request.incoming import Incoming
from extproc.request.interfaces import StreamSettings
from extproc.request.jsonsmall import SMALL_BYTES
from extproc.request.processor import MAX_SILENCE_S
from extproc.request.sessions import NO_SOURCES, SessionSources
from extproc.types import Pick, Rejection, Wait
from extproc.wire.rpc import Session
from tests.builders import body
from tests.request.ext_proc import (
    BUFFERED,
    FULL_DUPLEX,
    STREAMED,
    message_of_request_headers,
    raw,
    request_body,
    request_headers,
    request_trailers,
    response_headers,
)
from tests.request.fakerouter import IN_HEADER, PICK, FakeRouter
from tests.request.json_documents import documents
from tests.request.scene import Service
from tests.strategies import rejections

GOLDEN = Path(__file__).parent.parent / "golden" / "envoy-1.40-messages.json"
RECORDED = [each.encode("latin-1") for each in json.loads(GOLDEN.read_text())["requests"]]
PATH = "/v1/chat/completions"
SOURCES = SessionSources("body:user", "header:x-session", "body:session_id")
SUBSET = {"envoy.lb.subset_hint": {"x-gateway-destination-endpoint-subset": "10.0.0.1"}}
Step = Callable[[Service, Session], None]


def message(data: bytes) -> Step:
    return lambda _, session: session.receive(data)


def half_close(_: Service, session: Session) -> None:
    session.half_close()


def overload(_: Service, session: Session) -> None:
    session.give_up()  # type: ignore[attr-defined] # of sessions that may hold something


def wait(service: Service, _: Session) -> None:
    service.now += 1.0


def fire(service: Service, _: Session) -> None:
    timers, service.timers = service.timers, []
    for each in timers:
        if not each.is_cancelled:
            each.callback()


def told(
    steps: Sequence[Step],
    *,
    is_at_once: bool,
    result: Pick | Rejection | Wait = PICK,
    hold_s: float | None = None,
    uses_cached_bytes: bool = True,
    targets: Mapping[str, str] | None = None,
    **configured: Any,
) -> tuple[object, int]:
    """All that a session says and does until it is cut off, or over; and the readers it made."""
    router = FakeRouter(result, hold_s=hold_s, uses_cached_bytes=uses_cached_bytes)
    router.targets = targets or {}
    settings = StreamSettings(**configured)
    codec = Codec(session_headers=settings.sessions.headers)
    service = Service(router, settings, codec)
    call, session = service.open()
    done: list[object] = []
    read = Incoming.model_at_once if is_at_once else lambda *_: None
    with (
        patch.object(Incoming, "model_at_once", read),
        patch.object(incoming, "BodyReader", wraps=BodyReader) as made_reader,
    ):
        for step in steps:
            if call.ended is not None:  # a transport has no more for it
                break
            step(service, session)
            done.append((list(call.sent), call.ended, call.held, len(service.timers)))
    service.now += 3 * MAX_SILENCE_S
    service.processor.tick()
    session.closed()
    fire(service, session)
    counts = (service.processor.num_open, service.processor.num_broken)
    tickets = [(each.request, each.give_up_s) for each in router.tickets]
    seen = (router.routed, router.decisions, router.rejections, router.rejected_headers)
    ends = (router.finished, router.ends, router.num_left, len(router.tickets_left))
    decided = [each for each in seen[1] if not hasattr(each, "wake")]
    return (done, call.ended, counts, tickets, seen[0], decided, *seen[2:], *ends), (
        made_reader.call_count
    )


HEADERS = st.fixed_dictionaries(
    {},
    optional={
        "content-type": st.just("application/json"),
        "content-length": st.sampled_from(("20", "2000", "x", "9" * 30)),
        "x-request-id": st.sampled_from(("r-1", "r" * 400)),
        "x-session": st.sampled_from(("", "s", "\u00e9")),
        "accept": st.just("*/*"),
    },
)
ODD_HEADERS = st.sampled_from(
    (
        {"content-encoding": "gzip"},
        {"x-gateway-inference-objective": "o"},
        {"x-gateway-model-name-rewrite": "b"},
        {"x-data-parallel-rank": "1"},
    )
)
usual_heads = st.builds(lambda headers: request_headers(PATH, headers=headers), HEADERS)
odd_heads = st.builds(
    request_headers,
    st.sampled_from(
        (PATH, "/v1/completions", "/v1/responses", "/v1/models", "/v1/audio/transcriptions", "/x")
    ),
    method=st.sampled_from(("POST", "GET")),
    headers=st.builds(lambda one, other: one | other, HEADERS, ODD_HEADERS | st.just({})),
    end_of_stream=st.booleans(),
    body_mode=st.sampled_from((BUFFERED, STREAMED, FULL_DUPLEX, None)),
    response_body_mode=st.sampled_from((None, BUFFERED, FULL_DUPLEX)),
    metadata=st.sampled_from((None, SUBSET)),
)
PARTS = st.fixed_dictionaries(
    {},
    optional={
        "model": st.sampled_from(("a", "a", "", "\n", "x" * 257, "\u00e9", None, 7)),
        "messages": st.lists(st.text(max_size=5), max_size=2),
        "previous_response_id": st.none() | st.text(max_size=2),
        "lora_path": st.just("b"),
        "cache_salt": st.just("s"),
        "user": st.sampled_from(("u", "", "u" * 5000, 7, None, ["u"], "\ud800")),
        "session_id": st.just("s"),
        "tools": st.just(["t"]),
        "priority": st.just(-1),
        "kv_transfer_params": st.just({"remote_host": "10.0.0.1"}),
        "prompt": st.text(max_size=5) | st.just("p" * MARKS_BYTES[1]) | st.just(["p", "q"]),
        "n": st.sampled_from((3, None, "3")),
        "best_of": st.just(2),
        "max_tokens": st.just(5),
    },
)
bodies = st.builds(
    request_body,
    st.builds(lambda text: text.encode("utf-8", "surrogatepass"), documents())
    | PARTS.map(lambda each: json.dumps(each).encode())
    | st.just(body()),
    st.booleans(),
    st.sampled_from((None, None, None, SUBSET)),
)
others: st.SearchStrategy[Step] = st.sampled_from(
    (
        *(half_close, overload, wait, fire),
        *(message(request_trailers()), message(response_headers({":status": "401"}))),
        *(message(b"garbage\xff"), *(message(each) for each in RECORDED)),
    )
)
heads, whole_bodies = (usual_heads | odd_heads).map(message), bodies.map(message)


@st.composite
def steps(draw: st.DrawFn) -> list[Step]:
    """Mostly a usual request, with anything in between, and cut off anywhere."""
    made = [draw(heads), draw(whole_bodies)]
    for step in draw(st.lists(others | whole_bodies, max_size=3)):
        made.insert(draw(st.integers(0, len(made))), step)
    return made[: draw(st.integers(0, len(made) + 3))]


configurations = st.fixed_dictionaries(
    {
        "max_body_bytes": st.sampled_from((2000, 100_000, 30)),
        "sessions": st.sampled_from((NO_SOURCES, IN_HEADER, SOURCES)),
        "uses_cached_bytes": st.booleans(),
        "hold_s": st.sampled_from((None, None, 2.0)),
        "targets": st.sampled_from((None, None, {"a": "b"})),
    }
)
USUAL = [message(request_headers(PATH)), message(request_body(body(prompt="p" * 5000)))]


@given(steps(), configurations, st.just(PICK) | rejections())
def test_both_ways_say_and_do_the_same(
    made: list[Step], configured: dict[str, Any], result: Pick | Rejection
) -> None:
    """Whatever comes, and wherever the RPC is half-closed or cut off."""
    ours, num_readers = told(made, is_at_once=True, result=result, **configured)
    theirs, _ = told(made, is_at_once=False, result=result, **configured)

    note("at once" if not num_readers else "by a reader")
    assert ours == theirs


def asked(*arguments: Any, **named: Any) -> list[Step]:
    """A request whose headers are these, cut off after its body."""
    return [message(request_headers(*arguments, **named)), USUAL[1]]


@pytest.mark.parametrize(
    ("made", "configured"),
    [
        (USUAL, {}),
        (USUAL, {"targets": {"a": "b"}}),
        (USUAL, {"max_body_bytes": 1000}),
        ([USUAL[0], wait, USUAL[1]], {}),
        ([USUAL[0], wait, message(request_body(body(prompt="x" * SMALL_BYTES)))], {}),
        ([USUAL[0], message(request_body(b'{"model": ""}'))], {}),
        ([USUAL[0], message(request_body(b'{"model": x}'))], {}),
        ([USUAL[0], message(request_body(b"[]"))], {}),
        ([USUAL[0], message(request_body(body(messages=["p", "q"])))], {}),
        ([USUAL[0], message(request_body(body(messages=["p", "q"], n=2)))], {}),
        ([USUAL[0], message(request_body(body(documents=["p", "q"])))], {}),
        (asked("/v1/completions"), {}),
        ([USUAL[0], message(request_body(body(priority=-1)))], {}),
        ([USUAL[0], message(request_body(body(kv_transfer_params={"remote_host": "x"})))], {}),
        ([USUAL[0], half_close], {}),
        ([*USUAL, message(request_trailers())], {"hold_s": 2.0}),
        (
            [USUAL[0], message(request_body(body(), False)), message(request_trailers())],
            {"hold_s": 2.0},
        ),
        ([USUAL[0], overload], {}),
        ([*USUAL, wait, fire], {"hold_s": 2.0}),
        ([*USUAL, overload], {"hold_s": 2.0}),
        ([USUAL[0], message(request_body(body(), metadata=SUBSET))], {}),
        (asked(PATH, end_of_stream=True), {}),
        (asked(PATH, metadata=SUBSET), {}),
        (asked(PATH, headers={"content-length": "9" * 30}), {}),
        (asked(PATH, headers={"content-length": "99999999"}), {}),
        (asked(PATH, headers={"content-length": "x" * 30}), {}),
        (asked(PATH, response_body_mode=FULL_DUPLEX), {}),
        (asked("/v1/audio/transcriptions", headers={"content-type": "multipart/form-data"}), {}),
        (asked("/x"), {}),
        (asked(PATH, method="GET"), {}),
        ([message(message_of_request_headers([raw(":path", PATH)])), USUAL[1]], {}),
        ([message(message_of_request_headers([raw(":method", "POST")])), USUAL[1]], {}),
    ],
)
def test_both_ways_say_the_same_of(made: list[Step], configured: dict[str, Any]) -> None:
    ours, theirs = (told(made, is_at_once=each, **configured)[0] for each in (True, False))

    assert ours == theirs


@pytest.mark.parametrize("num", range(0, len(RECORDED), 2))
def test_what_envoy_sends_is_answered_alike(num: int) -> None:
    made = [message(each) for each in RECORDED[num:]]

    assert told(made, is_at_once=True)[0] == told(made, is_at_once=False)[0]


@pytest.mark.parametrize(
    ("made", "configured", "num_readers"),
    [
        (USUAL, {}, 0),
        (USUAL, {"hold_s": 1.0}, 0),
        (USUAL, {"uses_response_phases": True}, 0),
        (USUAL[:1], {}, 0),
        ([USUAL[0], message(request_body(body(prompt="x" * SMALL_BYTES)))], {}, 1),
        ([USUAL[0], message(request_body(body(previous_response_id="r")))], {}, 1),
        ([message(request_headers(PATH, body_mode=STREAMED, early=True)), *USUAL[1:]], {}, 1),
        (USUAL, {"takes_adapter": True}, 1),
        (USUAL, {"targets": {"a": "b"}}, 1),
    ],
)
def test_only_another_body_than_the_usual_one_takes_a_reader(
    made: list[Step], configured: dict[str, Any], num_readers: int
) -> None:
    assert told(made, is_at_once=True, **configured)[1] == num_readers
