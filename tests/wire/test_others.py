"""Clients of a proxy share its connection: what one of them causes ends nobody else's stream.

Each case is more than a limit of one stream, or more frames than a flood, of the kinds that a proxy
passes on or sends for its clients. The proxy does nothing wrong in any of them.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from extproc.wire import Abuse, Limits, frames
from extproc.wire.control import SETTINGS_COST
from extproc.wire.limits import ErrorCode
from tests.wire.peer import REQUEST, WATCH, Peer, literals, message, raw, request

LIMITS = Limits(
    max_streams_per_connection=30,
    max_message_bytes=10_000,
    max_queued_bytes=200_000,
    max_header_list_bytes=1_000,
    max_control_frames=SETTINGS_COST + 20,
)
FIRST, LAST = 3, 2_001
"""Streams of the one who causes it; 1 and the next are of others."""


def clients_that_leave_at_once(peer: Peer) -> None:
    for i in range(FIRST, LAST, 2):
        peer.feed(peer.headers(i), frames.rst_stream(i, 8))


def bodies_that_go_on_after_the_answer(peer: Peer) -> None:
    for i in range(FIRST, LAST, 2):
        part = peer.data(i, message(b"x"))
        peer.feed(peer.headers(i, request(pseudo_path="/none")), part * 30)


def bodies_that_go_on_long_after_the_answer(peer: Peer) -> None:
    ids = range(FIRST, LAST + 2 * 1_024, 2)
    peer.feed(*(peer.headers(i, request(pseudo_path="/none")) for i in ids))
    peer.feed(*(peer.data(i, message(b"x")) for i in ids))


def resets_long_after_the_answer(peer: Peer) -> None:
    """More streams than are remembered are answered before the first reset comes."""
    ids = range(FIRST, LAST + 2 * 1_024, 2)
    peer.feed(*(peer.headers(i, request(pseudo_path="/none")) for i in ids))
    peer.feed(*(frames.rst_stream(i, 0) for i in ids))


def large_headers(peer: Peer) -> None:
    for i in range(FIRST, LAST, 2):
        peer.feed(raw(frames.HEADERS, 4, i, literals([*REQUEST, ("a", "x" * 1_000)])))
    assert peer.counters.abuse[Abuse.HEADER_LIST] == len(range(FIRST, LAST, 2))


def large_header_blocks(peer: Peer) -> None:
    rest = raw(frames.CONTINUATION, 4, FIRST, bytes(10_000))
    peer.feed(raw(frames.HEADERS, 0, FIRST, bytes(10_000)), rest)
    peer.feed(raw(frames.HEADERS, 0, FIRST + 2, bytes(10_000)))
    peer.feed(raw(frames.CONTINUATION, 0, FIRST + 2, bytes(10_000)))
    peer.feed(raw(frames.CONTINUATION, 4, FIRST + 2, bytes(10_000)))
    assert peer.responses[FIRST].status == peer.responses[FIRST + 2].status == 8
    assert peer.counters.abuse[Abuse.HEADER_BLOCK] == 2


def long_messages(peer: Peer) -> None:
    for i in range(FIRST, LAST, 2):
        peer.feed(peer.headers(i), peer.data(i, message(b"x" * 10_001)), peer.data(i, b"x" * 9_000))
    assert peer.counters.abuse[Abuse.MESSAGE_TOO_LARGE] == len(range(FIRST, LAST, 2))


def answers_that_are_not_read(peer: Peer) -> None:
    for i in range(FIRST, FIRST + 50, 2):
        peer.open(i, pseudo_path=WATCH).call.send(b"x" * 100_000)
        peer.take()
    assert peer.counters.abuse[Abuse.SLOW_READER] > 20


def too_many_at_once(peer: Peer) -> None:
    for i in range(FIRST, LAST, 2):
        peer.feed(peer.headers(i))
    assert peer.reset_with(LAST - 2) == ErrorCode.REFUSED_STREAM
    peer.feed(*(frames.rst_stream(i, 8) for i in range(FIRST, 61, 2)))


def messages_that_stall(peer: Peer) -> None:
    for i in range(FIRST, FIRST + 50, 2):
        peer.feed(peer.headers(i), peer.data(i, message(b"xxx")[:6]))
    peer.tick(61.0)
    assert peer.counters.abuse[Abuse.STALLED_MESSAGE] == 25


@pytest.mark.parametrize(
    "cause",
    [
        clients_that_leave_at_once,
        bodies_that_go_on_after_the_answer,
        bodies_that_go_on_long_after_the_answer,
        resets_long_after_the_answer,
        large_headers,
        large_header_blocks,
        long_messages,
        answers_that_are_not_read,
        too_many_at_once,
        messages_that_stall,
    ],
)
def test_others_on_the_connection_go_on(cause: Callable[[Peer], None]) -> None:
    peer = Peer(limits=LIMITS)
    peer.open(1)
    cause(peer)
    next_id = peer.connection.streams.last_id + 2
    peer.feed(frames.window_update(0, 10_000_000))
    peer.feed(peer.data(1, message(b"a"), end=True))
    peer.feed(peer.headers(next_id), peer.data(next_id, message(b"b"), end=True))

    assert not peer.connection.is_failed
    assert [peer.responses[i].data for i in (1, next_id)] == [message(b"a"), message(b"b")]
    assert [peer.responses[i].status for i in (1, next_id)] == [0, 0]


def test_what_a_client_that_leaves_had_is_freed() -> None:
    peer = Peer()
    for i in range(1, 1_001, 2):
        peer.feed(peer.headers(i), peer.data(i, message(b"x" * 100)[:50]))
        peer.feed(frames.rst_stream(i, 8))

    assert peer.connection.streams.open == {}
    assert peer.budget.used_bytes == 0
    assert all(session.num_closed == 1 for session in peer.sessions)
