"""Of several calls about one request, one decides and is counted; the others let it go on."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.protocol import MARK_HEADER
from extproc.request import messages as m
from extproc.request.interfaces import StreamSettings
from extproc.request.messages import BodyMode
from extproc.types import Pick
from tests.builders import body, request_headers
from tests.request.fakerouter import PICK, Exchange, FakeRouter

DUPLEX = BodyMode.FULL_DUPLEX_STREAMED
MARK = "proven"


class Known:
    """Knows the requests with one mark."""

    def of(self, pick: Pick) -> str:
        return MARK

    def knows(self, headers: Mapping[str, str], subset: frozenset[str] | None) -> bool:
        return headers.get(MARK_HEADER) == MARK


def again(mark: str = MARK, router: FakeRouter | None = None, **settings: Any) -> Exchange:
    router = router or FakeRouter(decides=Known())
    stream = router.stream(StreamSettings(uses_response_phases=True, **settings))
    return Exchange(router, stream)


def headers(mode: BodyMode, mark: str = MARK, **fields: Any) -> m.RequestHeaders:
    return request_headers(
        headers={MARK_HEADER: mark}, body_mode=mode, sends_body_early=True, **fields
    )


RESPONSE_MODES = (BodyMode.NONE, BodyMode.STREAMED, DUPLEX)


@pytest.mark.parametrize(("mode", "response"), list(product(BodyMode, RESPONSE_MODES)))
def test_a_decided_request_goes_on_at_once_and_counts_for_nothing(
    mode: BodyMode, response: BodyMode
) -> None:
    exchange = again()
    commands = exchange.tell(headers(mode, response_body_mode=response))
    assert commands[0] == m.ContinueHeaders()
    if m.EndStream() not in commands:
        commands = exchange.tell(m.BodyChunk(b"not even JSON", True))
        is_echoed = mode is DUPLEX
        assert commands[0] == (
            m.EchoBody(b"not even JSON", True) if is_echoed else m.ContinueBody()
        )
    assert (m.EndStream() in commands) is (response is not DUPLEX)
    exchange.tell(m.StreamEnded())

    router = exchange.router
    assert (router.routed, router.finished, router.ends, router.decisions) == ([], [], [], [])
    assert (router.rejections, router.held_bytes) == ([], [])


@pytest.mark.parametrize("mode", [mode for mode in BodyMode if mode is not BodyMode.NONE])
def test_the_first_asking_decides_and_says_so_in_the_mark(mode: BodyMode) -> None:
    exchange = again()
    commands = exchange.tell(headers(mode, mark="made up"), m.BodyChunk(body(), True))

    [answer] = [each for each in commands if getattr(each, "pick", None) is not None]
    assert isinstance(answer, m.ContinueHeaders | m.ContinueBody)
    assert (answer.pick, answer.mark) == (PICK, MARK)
    assert len(exchange.router.routed) == 1


def test_a_decided_response_passes_in_full_duplex_whoever_decided() -> None:
    exchange = again()
    exchange.tell(headers(DUPLEX, response_body_mode=DUPLEX), m.BodyChunk(b"a"))

    assert exchange.tell(m.ResponseHeaders(200)) == [m.ContinueResponseHeaders()]
    assert exchange.tell(m.BodyChunk(b"b", True)) == [m.EchoBody(b"b", True)]
    assert exchange.tell(m.ResponseBody(b"x")) == [m.EchoResponseBody(b"x")]
    assert exchange.tell(m.ResponseTrailers()) == [m.ContinueResponseTrailers()]


def test_trailers_of_a_decided_request_go_on_and_end_the_call() -> None:
    exchange = again()
    exchange.tell(headers(DUPLEX), m.BodyChunk(b"a"))

    assert exchange.tell(m.RequestTrailers()) == [m.ContinueTrailers(), m.EndStream()]


def test_a_decided_request_without_a_body_ends_the_call_with_its_headers() -> None:
    [answer, end] = again().tell(headers(DUPLEX, end_of_stream=True))

    assert (answer, end) == (m.ContinueHeaders(), m.EndStream())


@given(st.lists(st.integers(0, 130_000), min_size=1, max_size=4), st.booleans())
def test_a_decided_body_is_echoed_byte_for_byte_as_it_comes(
    sizes: list[int], has_trailers: bool
) -> None:
    exchange = again()
    exchange.tell(headers(DUPLEX))
    commands: list[m.Command] = []
    for number, size in enumerate(sizes):
        is_last = number == len(sizes) - 1 and not has_trailers
        commands += exchange.tell(m.BodyChunk(size * b"r", is_last))
        assert exchange.stream.held_bytes() == 0
    if has_trailers:
        commands += exchange.tell(m.RequestTrailers())
    echoed = [each for each in commands if isinstance(each, m.EchoBody)]

    assert b"".join(each.data for each in echoed) == sum(sizes) * b"r"
    assert [each.end_of_stream for each in echoed].count(True) == (not has_trailers)
    assert commands[-1] == m.EndStream()
