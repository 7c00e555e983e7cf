"""gRPC over HTTP/2: messages over any split, statuses, timeouts, what ends a call."""

from __future__ import annotations

import gc
import weakref
from urllib.parse import unquote

import hpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.wire import Abuse, Limits, frames, grpc
from extproc.wire.budget import Budget
from extproc.wire.limits import ErrorCode
from extproc.wire.rpc import Code
from tests.wire.peer import BROKEN, HASTY, WATCH, Peer, message, request


@given(
    st.lists(st.binary(max_size=400), max_size=6),
    st.lists(st.integers(0, 60), max_size=30),
    st.booleans(),
)
def test_messages_survive_any_split_of_frames(
    bodies: list[bytes], cuts: list[int], is_one_read: bool
) -> None:
    peer = Peer()
    peer.open()
    content = b"".join(message(body) for body in bodies)
    pieces, position = [], 0
    for cut in cuts:
        pieces.append(content[position : position + cut])
        position += cut
    pieces.append(content[position:])
    parts = [peer.data(1, piece, end=i == len(pieces) - 1) for i, piece in enumerate(pieces)]
    if is_one_read:
        peer.feed(*parts)
    else:
        for part in parts:
            peer.feed(part)

    assert peer.session.messages == bodies
    assert peer.responses[1].data == content
    assert peer.responses[1].status == 0
    assert peer.budget.used_bytes == 0


def test_empty_message_is_a_message() -> None:
    peer = Peer()
    peer.open()
    peer.feed(peer.data(1, message(b""), end=True))

    assert peer.session.messages == [b""]


def test_response_headers_come_with_the_first_message_not_before() -> None:
    peer = Peer()
    assert peer.feed(peer.headers(1)) == []
    peer.feed(peer.data(1, message(b"x")))

    assert peer.responses[1].headers == [[(":status", "200"), ("content-type", "application/grpc")]]


def test_end_without_a_message_is_trailers_only() -> None:
    peer = Peer()
    peer.feed(peer.headers(1, end=True))

    expected = [(":status", "200"), ("content-type", "application/grpc"), ("grpc-status", "0")]
    assert peer.responses[1].headers == [expected]
    assert peer.responses[1].is_ended


def test_trailers_carry_code_and_details() -> None:
    peer = Peer()
    peer.open(1, pseudo_path=WATCH)
    peer.session.call.send(b"x")
    peer.session.call.end(Code.FAILED_PRECONDITION, "50 % of caf\xe9")
    peer.session.call.end()
    peer.take()

    assert peer.responses[1].headers[1] == [
        ("grpc-status", "9"),
        ("grpc-message", "50 %25 of caf%C3%A9"),
    ]


@given(st.text())
def test_details_are_percent_encoded_reversibly(details: str) -> None:
    encoded = grpc.percent_encode(details)

    assert all(0x20 <= byte <= 0x7E for byte in encoded)
    assert len(encoded) <= grpc.MAX_DETAILS_BYTES
    if len(details) < 200:
        clean = details.encode("utf-8", "replace").decode()
        assert unquote(encoded.decode()) == clean


def test_long_details_are_cut_between_escapes() -> None:
    encoded = grpc.percent_encode("\n" * 1000)

    assert encoded == b"%0A" * (grpc.MAX_DETAILS_BYTES // 3)


@pytest.mark.parametrize("length", [0, 1, 126, 127, 128, 254, 255, 256, 20_000])
def test_literals_of_any_length_are_read_back(length: int) -> None:
    value = b"x" * length
    ((name, got),) = hpack.Decoder().decode(grpc.literal(b"name", value), raw=True)
    assert (name, got) == (b"name", value)


def test_unknown_method_is_unimplemented() -> None:
    peer = Peer()
    peer.feed(peer.headers(1, request(pseudo_path="/no.Such/Method")))
    peer.feed(peer.data(1, message(b"x"), end=True))

    assert peer.responses[1].status == 12
    assert "/no.Such/Method" in peer.responses[1].last["grpc-message"]
    assert peer.reset_with() == ErrorCode.NO_ERROR
    assert peer.counters.streams_answered == 1


def test_message_above_the_limit_is_resource_exhausted_before_it_comes() -> None:
    peer = Peer(limits=Limits(max_message_bytes=1000))
    peer.open()
    peer.feed(peer.data(1, message(b"x" * 1000)))
    peer.feed(peer.data(1, message(b"x" * 1001)[:5]))
    peer.feed(peer.data(1, b"x" * 1001, end=True))

    assert peer.responses[1].status == 8
    assert peer.session.messages == [b"x" * 1000]
    assert peer.session.num_closed == 1
    assert peer.counters.abuse[Abuse.MESSAGE_TOO_LARGE] == 1


def test_limit_holds_for_a_message_in_one_frame() -> None:
    peer = Peer(limits=Limits(max_message_bytes=1000))
    peer.open()
    peer.feed(peer.data(1, message(b"x" * 1001)))

    assert peer.responses[1].status == 8
    assert peer.session.messages == []


@pytest.mark.parametrize("size", [1, 3, 5])
def test_limit_holds_for_a_prefix_in_pieces(size: int) -> None:
    peer = Peer(limits=Limits(max_message_bytes=1000))
    peer.open()
    content = message(b"x" * 2000)
    for i in range(0, 12, size):
        peer.feed(peer.data(1, content[i : i + size]))

    assert peer.responses[1].status == 8
    assert peer.budget.used_bytes == 0


@pytest.mark.parametrize(
    ("flag", "encoding", "status", "details"),
    [
        (1, "gzip", 12, "grpc-encoding gzip is not supported"),
        (1, None, 13, "compressed message without grpc-encoding"),
        (2, None, 13, "compressed flag is 2"),
    ],
)
@pytest.mark.parametrize("after", [b"", message(b"y")])
def test_compressed_message_is_refused_by_name(
    flag: int, encoding: str | None, status: int, details: str, after: bytes
) -> None:
    peer = Peer()
    peer.open(1, grpc_encoding=encoding)
    peer.feed(peer.data(1, message(b"x", flag) + after))

    assert peer.session.messages == []
    assert peer.responses[1].status == status
    assert peer.responses[1].last["grpc-message"] == details
    assert peer.responses[1].last.get("grpc-accept-encoding") == ("identity" if encoding else None)


@pytest.mark.parametrize("sizes", [[6], [6, 1], [6, 0], [3, 2, 1]])
def test_request_that_ends_inside_a_message_is_internal(sizes: list[int]) -> None:
    peer = Peer()
    peer.open()
    content = message(b"xyz")
    for number, size in enumerate(sizes, 1):
        peer.feed(peer.data(1, content[:size], end=number == len(sizes)))
        content = content[size:]

    assert peer.responses[1].status == 13
    assert not peer.session.is_half_closed
    assert peer.session.num_closed == 1


@pytest.mark.parametrize("size", [10, grpc.JOINED_BYTES, grpc.JOINED_BYTES + 1])
def test_what_is_held_of_a_message_is_what_has_come(size: int) -> None:
    peer = Peer(budget=Budget())
    peer.open(1, pseudo_path=WATCH)
    body, content = bytes(range(256)) * (size // 256) + b"x" * (size % 256), b""
    content, taken = message(body), 0
    for part in (1, 3, 2, 1, 2):
        peer.feed(peer.data(1, content[taken : taken + part]))
        taken += part
        partial = peer.connection.streams.open[1].partial
        assert partial is not None
        assert len(partial) == taken == peer.budget.used_bytes
    for at in range(taken, len(content), 16_000):
        peer.feed(peer.data(1, content[at : at + 16_000]))

    assert peer.session.messages == [body]
    assert peer.budget.used_bytes == 0


def test_session_that_raises_ends_its_own_stream_only() -> None:
    peer = Peer()
    peer.feed(
        peer.headers(1),
        peer.headers(3),
        peer.data(1, message(b"raise")),
        peer.data(3, message(b"fine"), end=True),
    )

    assert peer.responses[1].status == 13
    assert peer.responses[1].last["grpc-message"] == "internal error"
    assert peer.responses[3].status == 0
    assert [(str(error), path) for error, path in peer.errors] == [("as asked", "/test.Echo/Echo")]
    assert peer.counters.session_errors == 1


def test_session_that_raises_over_a_split_message_ends_its_own_stream_only() -> None:
    peer = Peer()
    peer.open()
    peer.feed(peer.data(1, message(b"raise")[:7]), peer.data(1, message(b"raise")[7:]))

    assert peer.responses[1].status == 13


def test_session_that_raises_at_the_end_is_internal() -> None:
    peer = Peer()
    peer.open(1, pseudo_path=WATCH)

    def fail() -> None:
        raise RuntimeError("at the end")

    peer.session.half_close = fail  # type: ignore[method-assign]
    peer.session.closed = fail  # type: ignore[method-assign]
    peer.feed(peer.data(1, b"", end=True))

    assert peer.responses[1].status == 13
    assert peer.counters.session_errors == 2


def test_method_that_cannot_open_is_internal() -> None:
    peer = Peer()
    peer.feed(peer.headers(1, request(pseudo_path=BROKEN)), peer.data(1, message(b"x"), end=True))

    assert peer.responses[1].status == 13
    assert peer.errors[0][1] == BROKEN


def test_call_may_end_while_it_opens() -> None:
    peer = Peer()
    peer.feed(peer.headers(1, request(pseudo_path=HASTY)), peer.data(1, message(b"x")))

    assert peer.responses[1].data == message(b"at once")
    assert peer.responses[1].status == 0
    assert peer.session.messages == []
    assert peer.session.num_closed == 1


def test_call_that_cannot_open_and_is_complete_is_not_reset() -> None:
    peer = Peer()
    peer.feed(peer.headers(1, request(pseudo_path=BROKEN), end=True))

    assert peer.responses[1].status == 13
    assert peer.responses[1].reset_code is None


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (b"1H", 3600.0),
        (b"2M", 120.0),
        (b"3S", 3.0),
        (b"5m", 0.005),
        (b"7u", 7e-6),
        (b"99999999n", 0.099999999),
        (b"", None),
        (b"1", None),
        (b"S", None),
        (b"-1S", None),
        (b"123456789S", None),
        (b"1s", None),
        (b"1.5S", None),
    ],
)
def test_timeouts_are_read(text: bytes, seconds: float | None) -> None:
    got = grpc.parse_timeout_s(text)

    assert got == (pytest.approx(seconds) if seconds is not None else None)


def test_malformed_timeout_is_internal() -> None:
    peer = Peer()
    peer.feed(peer.headers(1, request(grpc_timeout="soon"), end=True))

    assert peer.responses[1].status == 13
    assert peer.responses[1].last["grpc-message"] == "malformed grpc-timeout"


def test_deadline_cancels_the_call() -> None:
    peer = Peer()
    peer.open(1, pseudo_path=WATCH, grpc_timeout="2S")
    peer.open(3, pseudo_path=WATCH, grpc_timeout="9S")
    peer.tick(1.9)
    assert peer.reset_with() is None
    peer.tick(0.2)

    assert peer.reset_with() == ErrorCode.CANCEL
    assert [session.num_closed for session in peer.sessions] == [1, 0]
    peer.feed(frames.rst_stream(3, 8))
    assert peer.connection.streams.deadlines_s == {}


def test_message_announced_and_never_sent_ends_the_call() -> None:
    peer = Peer(limits=Limits(keepalive_s=1e9))
    peer.open()
    peer.feed(peer.data(1, message(b"x" * 100)[:50]))
    peer.tick(59.0)
    assert 1 not in peer.responses
    peer.tick(2.0)

    assert peer.responses[1].status == 4
    assert peer.counters.abuse[Abuse.STALLED_MESSAGE] == 1
    assert peer.budget.used_bytes == 0


def test_late_response_wakes_the_owner_once() -> None:
    peer = Peer()
    for stream_id in (1, 3):
        peer.open(stream_id, pseudo_path=WATCH)
    assert peer.num_wakes == 0
    for session in peer.sessions:
        session.call.send(b"late")
        session.call.end()
    assert peer.num_wakes == 1
    peer.take()
    peer.open(5, pseudo_path=WATCH)
    peer.session.call.send(b"late")

    assert peer.num_wakes == 2
    assert [session.num_closed for session in peer.sessions] == [1, 1, 0]


def test_one_session_may_end_another_when_it_closes() -> None:
    peer = Peer()
    for stream_id in (1, 3):
        peer.open(stream_id, pseudo_path=WATCH)
    first, second = peer.sessions

    def closed() -> None:
        first.num_closed += 1
        second.call.send(b"your turn")
        second.call.end()

    first.closed = closed  # type: ignore[method-assign]
    peer.feed(frames.rst_stream(1, 8))

    assert peer.responses[3].data == message(b"your turn")
    assert (first.num_closed, second.num_closed) == (1, 1)


def test_messages_behind_the_end_of_a_queued_call_are_not_delivered() -> None:
    peer = Peer()
    peer.open(1, pseudo_path=WATCH)
    peer.session.call.send(b"x" * 100_000)
    peer.session.call.end()
    peer.feed(peer.data(1, message(b"more")), peer.data(1, b"", end=True))
    assert peer.session.messages == []
    peer.feed(frames.window_update(0, 100_000), frames.window_update(1, 100_000))

    assert peer.responses[1].status == 0
    assert peer.responses[1].reset_code is None


def test_finished_calls_leave_no_garbage() -> None:
    """Reference counts alone free a session and its stream: no pauses of the collector."""
    peer = Peer()
    gc.collect()
    gc.disable()
    try:
        peer.feed(peer.headers(1), peer.data(1, message(b"x"), end=True))
        gone = weakref.ref(peer.sessions.pop())

        assert gone() is None
    finally:
        gc.enable()
