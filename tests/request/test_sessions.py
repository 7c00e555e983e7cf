"""What names a session: headers, cookies and fields of bodies, in the operator's order."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.request import messages as m
from extproc.request.jsonsmall import SMALL_BYTES
from extproc.request.messages import BodyMode
from extproc.request.sessions import MAX_SESSION_BYTES, NO_SESSION, SOURCE, SessionSources
from extproc.types import Reason, RequestInfo
from tests.builders import body, request_headers
from tests.request.fakerouter import PICK, Exchange, begin
from tests.request.test_stream import error_of

ALL = ("body:prompt_cache_key", "header:x-session", "cookie:sid", "body:user")
SOURCES = SessionSources(*ALL)
HAVING = {
    "body:prompt_cache_key": ({}, {"prompt_cache_key": "k"}),
    "header:x-session": ({"x-session": "s"}, {}),
    "cookie:sid": ({"cookie": "a=b; sid=c"}, {}),
    "body:user": ({}, {"user": "u"}),
}
LONG = "x" * SMALL_BYTES
STREAMED: dict[str, Any] = {"body_mode": BodyMode.STREAMED, "sends_body_early": True}
FULL_DUPLEX: dict[str, Any] = {"body_mode": BodyMode.FULL_DUPLEX_STREAMED}


def asked(
    sources: SessionSources = SOURCES,
    headers: dict[str, str] | None = None,
    data: bytes = b'{"model":"a"}',
    num_bytes: int = 1 << 30,
    path: str = "/v1/chat/completions",
    **mode: Any,
) -> RequestInfo:
    """What routing is asked about a request whose body comes in chunks of so many bytes."""
    exchange = begin(sessions=sources)
    exchange.tell(request_headers(path=path, headers=headers or {}, **mode))
    for at in range(0, len(data), num_bytes):
        exchange.tell(m.BodyChunk(data[at : at + num_bytes], at + num_bytes >= len(data)))
    while not exchange.router.routed:
        exchange.tell(m.Wakeup())
    return exchange.router.routed[0]


def source_of(
    data: bytes = b'{"model":"a"}', headers: dict[str, str] | None = None, **how: Any
) -> str:
    return asked(headers=headers, data=data, **how).session_source


@pytest.mark.parametrize("how", [{}, STREAMED, FULL_DUPLEX])
@pytest.mark.parametrize("prompt", ["short", LONG])
@pytest.mark.parametrize("order", [ALL, ALL[::-1]])
def test_the_first_source_in_the_operators_order_that_a_request_has_names_its_session(
    order: tuple[str, ...], prompt: str, how: dict[str, Any]
) -> None:
    for num in range(len(order)):
        headers, members = dict[str, str](), dict[str, str]()
        for source in order[num:]:
            headers |= HAVING[source][0]
            members |= HAVING[source][1]
        request = asked(SessionSources(*order), headers, body(prompt=prompt, **members), **how)

        assert request.session_source == order[num]
        assert len(request.session or "") == 32


@pytest.mark.parametrize("prompt", ["short", LONG])
def test_without_any_source_there_is_no_session(prompt: str) -> None:
    request = asked(headers={"x-request-id": "r"}, data=body(prompt=prompt))

    assert (request.session, request.session_source) == NO_SESSION
    assert source_of(headers={"cookie": "x=1"}) == source_of(headers={"x-session": ""}) == ""


@pytest.mark.parametrize(
    "value",
    [7, None, True, "", [], ["u"], {"user": "u"}, "u" * MAX_SESSION_BYTES, "u" * 300_000],
)
@pytest.mark.parametrize("pads", ["", LONG])
def test_a_field_that_is_no_string_or_empty_or_too_long_names_no_session(
    value: Any, pads: str
) -> None:
    data = json.dumps({"pads": pads, "user": value, "model": "a"}).encode()

    assert source_of(data) == ""
    assert source_of(data, {"cookie": "sid=c"}) == "cookie:sid"


@pytest.mark.parametrize("num_bytes", [1, 7, 1000])
@pytest.mark.parametrize("text", ["u", 'q"\\', "\u00e9", "\ud800", "u" * (MAX_SESSION_BYTES - 2)])
def test_a_field_names_the_same_session_however_its_body_is_cut(text: str, num_bytes: int) -> None:
    data = json.dumps({"user": text, "model": "a"}, ensure_ascii=text == "\ud800").encode()
    whole = asked(data=data)
    cut = asked(data=data[:-1] + b" " * SMALL_BYTES + b"}")
    parts = asked(data=data, num_bytes=num_bytes, **STREAMED)

    assert whole.session is not None
    assert whole.session == cut.session == parts.session


@pytest.mark.parametrize("pads", ["", LONG])
def test_of_a_field_that_comes_twice_the_last_one_counts_and_only_the_top_level_does(
    pads: str,
) -> None:
    def session(*members: str) -> str | None:
        data = "{" + ",".join([f'"pads":"{pads}"', *members, '"model":"a"']) + "}"
        return asked(data=data.encode()).session

    one = session('"user":"u"')
    assert one is not None
    assert session('"user":"v"', '"user":"u"', '"metadata":{"user":"w"}') == one
    assert session('"us\\u0065r":"u"') == one
    assert session('"user":"u"', '"user":7') is session('"m":{"user":"u"}') is None


@pytest.mark.parametrize("how", [{}, {"num_bytes": 1000, **STREAMED}])
def test_every_field_is_read_wherever_many_prompts_may_be(how: dict[str, Any]) -> None:
    request = asked(
        data=body(prompt=["p", "q"], user="u", n=2),
        path="/v1/completions",
        **how,
    )

    assert (request.num_sequences, request.session_source) == (4, "body:user")


@pytest.mark.parametrize(
    ("cookie", "session"),
    [
        ("sid=c", "c"),
        ("a=b;sid=c", "c"),
        ("a=b,\tsid=c ", "c"),  # two header lines, as the codec joins them
        ("sid=c; sid=d", "c"),
        ("sid=c=d", "c=d"),
        ('sid="c"', '"c"'),
        ("sid=", None),
        ("sid=;sid=c", None),
        ("sid", None),
        ("xsid=c", None),
        ("x sid=c", None),
        ("SID=c", None),
        ("=;;,=sid", None),
        (";" * 60_000, None),
        (f"sid={'c' * (MAX_SESSION_BYTES + 1)}", None),
        (f"sid={'c' * MAX_SESSION_BYTES}", "c" * MAX_SESSION_BYTES),
    ],
)
def test_a_cookie_is_found_by_its_name_in_whatever_clients_send(
    cookie: str, session: str | None
) -> None:
    sources = SessionSources("cookie:sid", "header:of")
    same = sources.find({"of": session or ""}, {})

    assert sources.find({"cookie": cookie}, {})[0] == same[0]


@given(st.text(max_size=60), st.dictionaries(st.sampled_from(("user", "x")), st.binary()))
def test_whatever_a_client_sends_names_one_session_or_none(
    text: str, fields: dict[str, bytes]
) -> None:
    text = text.encode("latin-1", "replace").decode("latin-1")
    session, source = SOURCES.find({"cookie": text, "x-session": text}, fields)

    assert (session is None) == (source == "")
    assert source in ("", *ALL)


def test_headers_that_are_not_asked_for_are_not_read() -> None:
    assert SessionSources("body:user").headers == frozenset()
    assert SessionSources("header:s", "cookie:a", "cookie:b").headers == {"s", "cookie"}


def test_a_source_that_is_listed_twice_counts_once() -> None:
    sources = SessionSources("body:user", "body:user")

    assert asked(sources, data=body(user="u")).session_source == "body:user"


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("header:x-session", True),
        ("header:session_id", True),
        ("cookie:__Host-sid", True),
        ("body:prompt_cache_key", True),
        (f"body:{'f' * 32}", True),
        (f"body:{'f' * 33}", False),
        ("body:metadata.user_id", False),
        ("body:2", False),
        ("header:X-Session", False),
        ("header:", False),
        ("cookie:a;b", False),
        ("x-session", False),
        ("query:s", False),
    ],
)
def test_what_an_operator_may_write(text: str, is_one: bool) -> None:
    assert (SOURCE.fullmatch(text) is not None) is is_one


# --- stored responses ------------------------------------------------------------------------


def of_response(data: bytes, num_bytes: int = 1 << 30, **how: Any) -> Exchange:
    settings = {name: how.pop(name) for name in ("early_decision_bytes",) if name in how}
    exchange = begin(sessions=SOURCES, **settings)
    exchange.tell(request_headers(path="/v1/responses", **how))
    for at in range(0, len(data), num_bytes):
        exchange.tell(m.BodyChunk(data[at : at + num_bytes], at + num_bytes >= len(data)))
    return exchange


@pytest.mark.parametrize("how", [{}, STREAMED, FULL_DUPLEX])
def test_a_field_that_names_the_session_allows_a_stored_response(how: dict[str, Any]) -> None:
    data = body(previous_response_id="r", user="u")

    assert of_response(data, **how).router.routed[0].session_source == "body:user"
    assert not of_response(body(previous_response_id="r", user=7), **how).router.routed


def test_a_session_that_is_named_behind_what_decided_has_no_say() -> None:
    begins = b'{"model":"a","input":"' + b"x" * 100 + b'",'
    early: dict[str, Any] = {"early_decision_bytes": 100, **STREAMED}
    late = of_response(begins + b'"user":"u"}', len(begins), **early)
    [request] = late.router.routed
    assert (request.session, request.is_whole) == (None, False)

    stored = begin(sessions=SOURCES, early_decision_bytes=100)
    stored.tell(request_headers(path="/v1/responses", **STREAMED))
    stored.tell(m.BodyChunk(begins, False))
    rest = m.BodyChunk(b'"user":"u","previous_response_id":"r"}', True)

    assert error_of(stored.tell(rest))[1]["code"] == Reason.STORED_RESPONSE


def test_a_session_that_is_named_before_what_decided_counts_for_the_rest() -> None:
    begins = b'{"user":"u","model":"a","input":"' + b"x" * 100 + b'",'
    early: dict[str, Any] = {"early_decision_bytes": 100, **STREAMED}
    exchange = of_response(begins + b'"previous_response_id":"r"}', len(begins), **early)

    assert exchange.router.routed[0].session_source == "body:user"
    assert exchange.stream.pick == PICK


def test_a_reference_before_the_model_is_judged_once_the_model_decides() -> None:
    exchange = begin(sessions=SOURCES, early_decision_bytes=20)
    exchange.tell(request_headers(path="/v1/responses", **STREAMED))
    exchange.tell(m.BodyChunk(b'{"previous_response_id":"r",', False))
    exchange.tell(m.BodyChunk(b'"user":"u","model":"a"}', True))

    assert exchange.router.routed[0].session_source == "body:user"
