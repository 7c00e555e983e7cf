"""What steers an engine reaches no pod: it is cut out, or the request is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from extproc.errors import RequestError
from extproc.request import messages as m
from extproc.request.jsonmodel import JsonReader
from extproc.request.messages import BodyMode
from extproc.request.multipart import FormReader
from extproc.request.steering import FIELDS, HEADERS
from extproc.types import Reason
from tests.builders import request_headers
from tests.request.fakerouter import PICK, begin
from tests.request.test_jsonmodel import cut
from tests.request.test_rewritten_bodies import by, members

REMOVES = frozenset(FIELDS)
SENT = b'{"model":"a","kv_transfer_params":{"remote_host":"10.0.0.1"},"x":1}'
LEFT = b'{"model":"a","x":1}'
LENGTH = {"content-length": str(len(SENT))}
VALUES = st.recursive(
    st.none() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2)
    | st.dictionaries(st.sampled_from([*FIELDS, "model", "x"]), inner, max_size=2),
    max_leaves=4,
)
KEYS = st.sampled_from([*FIELDS, "model", "x", "messages", ""])


def spelled(key: str, escapes: bool) -> str:
    """A key as JSON has it, with its first letter as an escape or not."""
    return f'"\\u{ord(key[0]):04x}{key[1:]}"' if escapes and key else json.dumps(key)


def read(body: bytes, cuts: list[int]) -> JsonReader:
    reader = JsonReader(removes=REMOVES)
    for chunk in cut(body, cuts):
        at = 0
        while at < len(chunk):
            at = reader.feed(chunk, at)
    return reader


@given(
    st.lists(st.tuples(KEYS, VALUES, st.booleans()), max_size=6),
    st.sampled_from(["", " ", "\n\t "]),
    st.lists(st.integers(0, 200), max_size=4),
    st.booleans(),
)
@example([("priority", 1, False), ("priority", 2, True)], "", [], False)
@example([("priority", 1, False), ("x", 2, False), ("priority", 3, False)], " ", [], True)
def test_what_is_left_is_all_but_those_members_in_order(
    pairs: list[tuple[str, Any, bool]], space: str, cuts: list[int], renames: bool
) -> None:
    texts = [
        f"{spelled(key, escapes)}{space}:{space}{json.dumps(value)}"
        for key, value, escapes in pairs
    ]
    body = f"{space}{{{space}{f'{space},{space}'.join(texts)}{space}}}{space}".encode()
    reader = read(body, cuts)
    left = [(key, value) for key, value in members(body) if key not in REMOVES]

    assert (reader.cut != "") is any(key in REMOVES for key, _, _ in pairs)
    if not renames:
        assert members(reader.without_cuts(body) if reader.cut else body) == left
        return
    new = by(JsonReader(lambda _model: True, removes=REMOVES), body, "b", cuts)
    missing = [] if any(key == "model" for key, _ in left) else [("model", "b")]
    wanted = [(key, "b" if key == "model" else value) for key, value in left]
    assert new is None or members(new) == missing + wanted


def test_a_value_that_only_looks_like_a_member_stays() -> None:
    body = b'{"model":"a","x":{"priority":1},"y":"kv_transfer_params","z":["\\"priority\\":1"]}'
    assert read(body, []).cut == ""
    assert read(body, [1, 20]).cut == ""


@pytest.mark.parametrize("mode", [BodyMode.BUFFERED, BodyMode.BUFFERED_PARTIAL])
@pytest.mark.parametrize("headers", [LENGTH, {}])
def test_a_whole_body_goes_on_without_it_and_with_its_length(
    mode: BodyMode, headers: dict[str, str]
) -> None:
    exchange = begin()
    exchange.tell(request_headers(body_mode=mode, headers=headers))

    length = len(LEFT) if headers else None
    assert exchange.tell(m.BodyChunk(SENT, True)) == [
        m.ContinueBody(PICK, LEFT, length),
        m.EndStream(),
    ]


def test_a_full_duplex_body_goes_on_without_it() -> None:
    exchange = begin()
    mode = BodyMode.FULL_DUPLEX_STREAMED
    exchange.tell(request_headers(body_mode=mode, headers=LENGTH), m.BodyChunk(SENT[:20]))

    assert exchange.tell(m.BodyChunk(SENT[20:], True)) == [
        m.ContinueHeaders(PICK, len(LEFT)),
        m.EchoBody(LEFT, True),
        m.EndStream(),
    ]


def test_a_held_body_goes_on_without_it_and_is_counted_while_it_is_kept() -> None:
    exchange = begin()
    exchange.router.hold_s = 30.0
    exchange.tell(request_headers())
    exchange.tell(m.BodyChunk(SENT, True))
    assert exchange.stream.held_bytes() >= len(SENT)
    [ticket] = exchange.router.tickets
    ticket.result = PICK

    assert exchange.tell(m.Wakeup())[0] == m.ContinueBody(PICK, LEFT, None)


def test_a_large_body_goes_on_without_it() -> None:
    padding = b'"y":"' + 300_000 * b"y" + b'",'
    exchange = begin()
    exchange.tell(request_headers())
    commands = exchange.tell(m.BodyChunk(SENT.replace(b'"x"', padding + b'"x"'), True))
    while not commands or isinstance(commands[0], m.WakeAt):
        commands = exchange.tell(m.Wakeup())

    assert commands[0] == m.ContinueBody(PICK, LEFT.replace(b'"x"', padding + b'"x"'), None)


@pytest.mark.parametrize(
    ("mode", "is_whole"), [(BodyMode.STREAMED, True), (BodyMode.BUFFERED_PARTIAL, False)]
)
def test_where_the_body_cannot_be_changed_it_is_refused(mode: BodyMode, is_whole: bool) -> None:
    exchange = begin()
    early = mode is BodyMode.STREAMED
    exchange.tell(request_headers(body_mode=mode, sends_body_early=early))
    reply, _ = exchange.tell(m.BodyChunk(SENT, is_whole))

    assert isinstance(reply, m.Reply)
    error = json.loads(reply.body)["error"]
    assert (reply.status, error["code"], error["param"]) == (
        400,
        Reason.INVALID_BODY,
        "kv_transfer_params",
    )


def test_what_is_passed_through_stays() -> None:
    exchange = begin(removed_fields=REMOVES - {"kv_transfer_params"})
    exchange.tell(request_headers())
    assert exchange.tell(m.BodyChunk(SENT, True)) == [m.ContinueBody(PICK), m.EndStream()]


def test_a_form_that_has_it_is_refused() -> None:
    part = b'--b\r\nContent-Disposition: form-data; name="%s"\r\n\r\n1\r\n'
    body = part % b"model" + part % b"priority" + b"--b--"
    form = "multipart/form-data; boundary=b"
    with pytest.raises(RequestError) as caught:
        FormReader(form, removes=REMOVES).feed(body)
    assert caught.value.rejection.param == "priority"

    FormReader(form).feed(body)


@pytest.mark.parametrize("passes", [True, False])
def test_headers_that_steer_are_removed_unless_they_are_passed_through(passes: bool) -> None:
    settings: dict[str, Any] = {"removed_headers": frozenset()} if passes else {}
    exchange = begin(**settings)
    exchange.tell(request_headers(headers=dict.fromkeys(HEADERS, "10.0.0.1:80")))
    exchange.tell(m.BodyChunk(LEFT, True))

    [request] = exchange.router.routed
    assert set(request.hints.header_names) == (set() if passes else HEADERS)
