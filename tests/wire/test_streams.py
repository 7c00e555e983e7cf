"""9113 5.1, 6.1 to 6.4, 8.1: states of a stream, and the frames that move them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hyperframe import frame as hf

from extproc.wire import frames
from extproc.wire.limits import ErrorCode
from extproc.wire.rpc import Code
from extproc.wire.streamstates import REMEMBERED, TABLE, FrameScope, StreamState
from tests.wire.peer import (
    HASTY,
    REQUEST,
    WATCH,
    Peer,
    first_block,
    literals,
    message,
    raw,
    request,
)

U32 = bytes(3) + b"\x01"
FRAMES = {
    frames.HEADERS: (5, literals(REQUEST)),
    frames.DATA: (0, message(b"x")),
    frames.RST_STREAM: (0, U32),
    frames.WINDOW_UPDATE: (0, U32),
}


def _idle(peer: Peer) -> None: ...


def _open(peer: Peer) -> None:
    peer.open(1, pseudo_path=WATCH)


def _half_closed(peer: Peer) -> None:
    peer.feed(peer.headers(1, request(pseudo_path=WATCH), end=True))


def _closed_by_us(peer: Peer) -> None:
    _open(peer)
    peer.session.call.end()
    peer.take()


def _closed_by_peer(peer: Peer) -> None:
    _open(peer)
    peer.feed(frames.rst_stream(1, 8))


def _forgotten(peer: Peer) -> None:
    peer.feed(peer.headers(3, end=True))


STATES: dict[StreamState, Callable[[Peer], None]] = {
    StreamState.IDLE: _idle,
    StreamState.OPEN: _open,
    StreamState.HALF_CLOSED_REMOTE: _half_closed,
    StreamState.CLOSED_BY_US: _closed_by_us,
    StreamState.CLOSED_BY_PEER: _closed_by_peer,
    StreamState.FORGOTTEN: _forgotten,
}


@pytest.mark.parametrize("kind", FRAMES)
@pytest.mark.parametrize("state", StreamState)
def test_every_frame_in_every_state_obeys_the_table(state: StreamState, kind: int) -> None:
    peer = Peer()
    STATES[state](peer)
    assert peer.connection.streams.state(1) is state
    before = peer.reset_with()
    flags, payload = FRAMES[kind]
    if kind == frames.HEADERS and state is StreamState.OPEN:
        payload = literals([("a", "trailer")])
    if kind == frames.HEADERS:
        payload = b"\x20" + payload
    # The stream of the setup was opened by a fresh encoder; a size update is always legal first.
    peer.feed(raw(kind, flags, 1, payload))

    scope, code = TABLE[state, kind]
    if scope is FrameScope.CONNECTION_ERROR:
        assert peer.failed_with() == code
    elif scope is FrameScope.STREAM_ERROR:
        assert peer.reset_with() == code
    else:
        assert peer.reset_with() == before


@pytest.mark.parametrize(
    ("kind", "stream_id"),
    # WINDOW_UPDATE on 0 is the connection's window.
    [(kind, i) for kind in FRAMES for i in (0, 2) if (kind, i) != (frames.WINDOW_UPDATE, 0)],
)
def test_no_stream_frame_on_identifiers_that_clients_cannot_open(kind: int, stream_id: int) -> None:
    peer = Peer()
    peer.feed(raw(kind, FRAMES[kind][0], stream_id, FRAMES[kind][1]))

    assert peer.failed_with() == ErrorCode.PROTOCOL_ERROR


def test_identifiers_must_increase() -> None:
    peer = Peer()
    peer.open(5)
    peer.feed(peer.headers(3))

    assert peer.failed_with() == ErrorCode.PROTOCOL_ERROR


def test_a_stream_closed_long_ago_is_forgotten_and_costs_only_the_stream() -> None:
    peer = Peer()
    peer.feed(peer.headers(1, end=True))
    peer.feed(*(peer.headers(2 * i + 3, end=True) for i in range(REMEMBERED)))
    peer.feed(peer.data(1, b""))

    assert peer.reset_with() == ErrorCode.STREAM_CLOSED


def test_after_a_stream_error_its_frames_are_discarded_quietly() -> None:
    peer = Peer()
    _half_closed(peer)
    peer.feed(peer.data(1, message(b"x")))
    assert peer.reset_with() == ErrorCode.STREAM_CLOSED
    new = peer.feed(peer.data(1, message(b"x")), peer.headers(1, end=True))

    assert new == []


def test_reset_is_not_followed_by_reset() -> None:
    peer = Peer()
    _open(peer)
    assert peer.feed(frames.rst_stream(1, 8), frames.rst_stream(1, 8)) == []
    assert peer.feed(frames.rst_stream(1, 0), frames.rst_stream(1, 0)) == []


def test_peer_reset_closes_the_session_once() -> None:
    peer = Peer()
    _open(peer)
    peer.feed(frames.rst_stream(1, 0xBEEF))  # 9113 7: unknown codes are no error
    peer.session.call.send(b"late")
    peer.session.call.end()
    peer.connection.lose()

    assert peer.session.num_closed == 1
    assert peer.take() == []
    assert peer.counters.streams_reset_by_peer == 1


def test_nothing_is_written_for_a_stream_reset_in_the_same_read() -> None:
    peer = Peer()
    new = peer.feed(
        peer.headers(1),
        peer.data(1, message(b"one")),
        peer.headers(3),
        peer.data(3, message(b"two")),
        frames.rst_stream(1, 8),
    )

    assert {frame.stream_id for frame in new} == {3}
    assert peer.sessions[0].num_closed == 1
    assert peer.sessions[0].messages == [b"one"]


@pytest.mark.parametrize("end", [True, False])
def test_nothing_is_written_for_a_stream_answered_and_reset_in_one_read(end: bool) -> None:
    peer = Peer()
    fields = request(pseudo_path=HASTY)
    new = peer.feed(peer.headers(1, fields, end=end), frames.rst_stream(1, 8))

    assert new == []
    assert peer.session.num_closed == 1


def test_a_dropped_response_returns_its_connection_window() -> None:
    peer = Peer()
    before = peer.connection.outbox.window_bytes
    peer.feed(peer.headers(1), peer.data(1, message(b"x" * 500)), frames.rst_stream(1, 8))

    assert peer.connection.outbox.window_bytes == before
    assert peer.connection.outbox.data_frames == 0


def test_drop_reaches_behind_a_settings_acknowledgement() -> None:
    peer = Peer()
    new = peer.feed(
        peer.headers(1),
        peer.data(1, message(b"one")),
        frames.settings({}),
        peer.data(1, message(b"two")),
        frames.rst_stream(1, 8),
    )

    assert [type(frame) for frame in new] == [hf.SettingsFrame]


def test_drop_keeps_the_frames_of_other_streams_before_an_acknowledgement() -> None:
    peer = Peer()
    new = peer.feed(
        peer.headers(1),
        peer.data(1, message(b"one")),
        frames.settings({}),
        peer.headers(3),
        peer.data(3, message(b"two")),
        frames.rst_stream(3, 8),
    )

    assert [frame.stream_id for frame in new] == [1, 1, 0]


@pytest.mark.parametrize("length", [0, 3, 5])
def test_rst_stream_has_four_octets(length: int) -> None:
    peer = Peer()
    _open(peer)
    peer.feed(raw(frames.RST_STREAM, 0, 1, bytes(length)))

    assert peer.failed_with() == ErrorCode.FRAME_SIZE_ERROR


def test_late_resets_of_answered_streams_are_accepted() -> None:
    peer = Peer()
    for stream_id in (1, 3, 5):
        peer.open(stream_id)
        peer.session.call.end()
    peer.feed(*(frames.rst_stream(stream_id, 8) for stream_id in (1, 3, 5)))
    peer.feed(*(frames.rst_stream(stream_id, 8) for stream_id in (1, 3, 5)))

    assert not peer.connection.is_failed
    assert peer.counters.streams_answered == 3


@pytest.mark.parametrize("pad", [1, 7, 255])
def test_padding_is_stripped(pad: int) -> None:
    peer = Peer()
    block = first_block()
    peer.feed(raw(frames.HEADERS, 0x4 | 0x8, 1, bytes((pad,)) + block + bytes(pad)))
    peer.feed(peer.data(1, message(b"x"), pad=pad), peer.data(1, message(b"y"), pad=pad, end=True))

    assert peer.session.messages == [b"x", b"y"]
    assert peer.session.is_half_closed


@pytest.mark.parametrize("kind", [frames.DATA, frames.HEADERS])
def test_padding_as_long_as_the_payload_is_a_protocol_error(kind: int) -> None:
    peer = Peer()
    if kind == frames.DATA:
        _open(peer)
    peer.feed(raw(kind, 0x8 | 0x4, 1, b"\x05abcd"))

    assert peer.failed_with() == ErrorCode.PROTOCOL_ERROR


@pytest.mark.parametrize(
    ("kind", "flags", "payload"),
    [(frames.DATA, 0x8, b""), (frames.HEADERS, 0xC, b""), (frames.HEADERS, 0x24, bytes(4))],
)
def test_no_room_for_pad_length_or_priority_is_a_frame_size_error(
    kind: int, flags: int, payload: bytes
) -> None:
    peer = Peer()
    if kind == frames.DATA:
        _open(peer)
    peer.feed(raw(kind, flags, 1, payload))

    assert peer.failed_with() == ErrorCode.FRAME_SIZE_ERROR


def test_priority_fields_of_headers_are_ignored() -> None:
    peer = Peer()
    peer.feed(raw(frames.HEADERS, 0x24, 1, b"\x80\0\0\x03\xff" + first_block()))

    assert len(peer.sessions) == 1


def test_headers_that_depend_on_themselves_are_a_stream_error() -> None:
    peer = Peer()
    peer.feed(raw(frames.HEADERS, 0x24, 1, b"\0\0\0\x01\xff" + first_block()))

    assert peer.reset_with() == ErrorCode.PROTOCOL_ERROR
    assert peer.sessions == []


def test_priority_is_ignored_in_every_state() -> None:
    peer = Peer()
    for prepare in (_idle, _open):
        prepare(peer)
        assert peer.feed(raw(frames.PRIORITY, 0, 1, b"\0\0\0\x05\x10")) == []
    peer.session.call.end()
    peer.take()

    assert peer.feed(raw(frames.PRIORITY, 0, 1, b"\0\0\0\x05\x10")) == []


def test_priority_on_itself_is_a_stream_error() -> None:
    peer = Peer()
    _open(peer)
    peer.feed(raw(frames.PRIORITY, 0, 1, b"\x80\0\0\x01\x10"))

    assert peer.reset_with() == ErrorCode.PROTOCOL_ERROR


@pytest.mark.parametrize("length", [4, 6])
def test_priority_of_another_length_is_a_stream_error(length: int) -> None:
    peer = Peer()
    _open(peer)
    peer.feed(raw(frames.PRIORITY, 0, 1, bytes(length)))

    assert peer.reset_with() == ErrorCode.FRAME_SIZE_ERROR


@pytest.mark.parametrize("stream_id", [1, 2])
def test_idle_streams_are_not_reset(stream_id: int) -> None:
    peer = Peer()
    peer.feed(raw(frames.PRIORITY, 0, stream_id, bytes(4)))

    assert peer.failed_with() == ErrorCode.FRAME_SIZE_ERROR


def test_no_stream_is_reset_twice() -> None:
    peer = Peer()
    _open(peer)
    assert len(peer.feed(raw(frames.PRIORITY, 0, 1, bytes(4)))) == 1
    assert peer.feed(raw(frames.PRIORITY, 0, 1, bytes(4))) == []


def test_priority_on_the_connection_is_a_protocol_error() -> None:
    peer = Peer()
    peer.feed(raw(frames.PRIORITY, 0, 0, bytes(5)))

    assert peer.failed_with() == ErrorCode.PROTOCOL_ERROR


def test_push_promise_is_a_protocol_error() -> None:
    peer = Peer()
    _open(peer)
    peer.feed(raw(frames.PUSH_PROMISE, 0x4, 1, b"\0\0\0\x02" + literals(REQUEST)))

    assert peer.failed_with() == ErrorCode.PROTOCOL_ERROR


def test_trailers_end_the_request() -> None:
    peer = Peer()
    peer.open()
    peer.feed(peer.data(1, message(b"x")), peer.headers(1, [("checksum", "1")], end=True))

    assert peer.session.is_half_closed
    assert peer.responses[1].status == 0
    assert peer.responses[1].reset_code is None


@pytest.mark.parametrize(
    ("fields", "end"),
    [([("a", "b")], False), ([(":path", "/x")], True), ([("connection", "x")], True)],
)
def test_malformed_trailers_are_a_stream_error(fields: list[tuple[str, str]], end: bool) -> None:
    peer = Peer()
    peer.open()
    peer.feed(peer.headers(1, fields, end=end))

    assert peer.reset_with() == ErrorCode.PROTOCOL_ERROR
    assert peer.session.num_closed == 1


def test_response_before_the_request_ends_is_followed_by_a_reset_without_error() -> None:
    peer = Peer()
    peer.open()
    peer.session.call.send(b"enough")
    peer.session.call.end()
    peer.take()

    assert peer.responses[1].frame_names == ["Headers", "Data", "Headers", "RstStream"]
    assert peer.reset_with() == ErrorCode.NO_ERROR
    assert peer.session.num_closed == 1


def test_response_to_a_complete_request_is_not_followed_by_a_reset() -> None:
    peer = Peer()
    peer.feed(peer.headers(1), peer.data(1, message(b"x"), end=True))

    assert peer.responses[1].frame_names == ["Headers", "Data", "Headers"]


def test_connection_error_names_the_last_stream_and_closes_all_sessions() -> None:
    peer = Peer()
    peer.open(1, pseudo_path=WATCH)
    peer.open(7, pseudo_path=WATCH)
    peer.feed(raw(frames.PING, 0, 0, b"short"))

    assert peer.goaway is not None
    assert peer.goaway.last_stream_id == 7
    assert [session.num_closed for session in peer.sessions] == [1, 1]
    assert peer.counters.streams_lost == 2
    assert peer.feed(peer.headers(9)) == []


def test_lost_connection_closes_all_sessions_once() -> None:
    counters_peer = Peer()
    counters_peer.open(1, pseudo_path=WATCH)
    counters_peer.connection.lose()
    counters_peer.connection.lose()

    assert counters_peer.session.num_closed == 1
    assert counters_peer.counters.connections_open == 0
    assert counters_peer.counters.streams_open == 0
    counters_peer.connection.tick(now=1.0)
    counters_peer.connection.start_drain(now=1.0)
    assert counters_peer.take() == []


@pytest.mark.parametrize("is_half_closed", [False, True])
@pytest.mark.parametrize("has_answered", [False, True])
@pytest.mark.parametrize("is_ended", [False, True])
@pytest.mark.parametrize("size", [0, 300, 20_000, 70_000])
def test_a_last_message_and_its_end_in_one_step_are_the_same_bytes(
    is_half_closed: bool, has_answered: bool, is_ended: bool, size: int
) -> None:
    """And leave the same behind: the windows, the counts, and how the stream closed."""

    def told(*, in_one_step: bool) -> object:
        peer = Peer()
        peer.open(1, pseudo_path=WATCH)
        if is_half_closed:
            peer.feed(frames.frame(frames.DATA, frames.END_STREAM, 1))
        call, connection = peer.session.call, peer.connection
        if has_answered:
            call.send(b"first")
        if is_ended:
            call.end(Code.CANCELLED)
        if in_one_step:
            call.finish(b"x" * size)
        else:
            call.send(b"x" * size)
            call.end()
        sent = connection.data_to_send()
        outbox, streams = connection.outbox, connection.streams
        left = (outbox.window_bytes, outbox.data_frames, outbox.queued_bytes, list(streams.open))
        return sent, left, peer.counters, streams.state(1), peer.session.num_closed

    assert told(in_one_step=True) == told(in_one_step=False)
