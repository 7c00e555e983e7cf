"""9113 5.2, 6.9: flow control in both directions, queues and turns."""

from __future__ import annotations

import pytest
from hyperframe import frame as hf

from extproc.core.wire import Abuse, Counters, Limits, frames
from extproc.core.wire.errors import ErrorCode
from tests.core.wire.peer import WATCH, Peer, message, request

WINDOW = 65_535


def _sent(peer: Peer, stream_id: int) -> int:
    response = peer.responses.get(stream_id)
    return len(response.data) if response else 0


def _send(peer: Peer, stream_id: int, body: bytes) -> None:
    """Let the service send on a stream that it opens."""
    peer.open(stream_id, pseudo_path=WATCH)
    peer.session.call.send(body)
    peer.take()


def test_no_more_is_sent_than_the_windows_allow() -> None:
    peer = Peer()
    _send(peer, 1, b"x" * 100_000)
    assert _sent(peer, 1) == WINDOW
    peer.feed(frames.window_update(1, 10_000))
    assert _sent(peer, 1) == WINDOW
    peer.feed(frames.window_update(0, 4_000))
    assert _sent(peer, 1) == WINDOW + 4_000
    peer.feed(frames.window_update(0, 100_000), frames.window_update(1, 100_000))

    assert peer.responses[1].data == message(b"x" * 100_000)


def test_end_waits_behind_queued_messages() -> None:
    peer = Peer()
    _send(peer, 1, b"x" * 100_000)
    peer.session.call.send(b"last")
    peer.session.call.end(5, "gone")
    peer.session.call.send(b"ignored")
    peer.take()
    assert "grpc-status" not in peer.responses[1].last
    num_closed_before = peer.session.num_closed
    peer.feed(frames.window_update(0, 100_000), frames.window_update(1, 100_000))

    assert peer.responses[1].data == message(b"x" * 100_000) + message(b"last")
    assert peer.responses[1].status == 5
    assert (num_closed_before, peer.session.num_closed) == (0, 1)


def test_headers_and_trailers_need_no_window() -> None:
    peer = Peer(settings={hf.SettingsFrame.INITIAL_WINDOW_SIZE: 0})
    _send(peer, 1, b"x")
    assert peer.responses[1].frame_names == ["Headers"]
    peer.feed(peer.headers(3, request(pseudo_path="/none"), end=True))

    assert peer.responses[3].status == 12


def test_no_frame_is_larger_than_the_peer_takes() -> None:
    peer = Peer(settings={hf.SettingsFrame.MAX_FRAME_SIZE: 2**24 - 1})
    _send(peer, 1, b"x" * 50_000)

    sizes = [len(frame.data) for frame in peer.frames if isinstance(frame, hf.DataFrame)]
    assert max(sizes) == 16_384
    assert sum(sizes) == 50_005


def test_a_megabyte_is_echoed_through_the_smallest_windows() -> None:
    peer = Peer()
    peer.open()
    body = bytes(range(256)) * 4096
    rest = message(body)
    while rest:
        peer.feed(peer.data(1, rest[:16_384]))
        rest = rest[16_384:]
    while _sent(peer, 1) < len(body) + 5:
        got = _sent(peer, 1)
        peer.feed(frames.window_update(0, 30_000), frames.window_update(1, 30_000))
        assert _sent(peer, 1) > got
    peer.feed(peer.data(1, b"", end=True))

    assert peer.responses[1].data == message(body)
    assert peer.responses[1].status == 0


def test_new_initial_window_moves_every_stream_also_below_zero() -> None:
    peer = Peer()
    _send(peer, 1, b"x" * 50_000)
    peer.feed(frames.settings({4: 10_000}))  # 50,005 sent: the window is now -40,005
    peer.session.call.send(b"y" * 1_000)
    peer.take()
    assert _sent(peer, 1) == 50_005
    peer.feed(frames.window_update(1, 40_000), frames.window_update(0, 100_000))
    assert _sent(peer, 1) == 50_005
    peer.feed(frames.window_update(1, 105))
    assert _sent(peer, 1) == 50_105
    peer.feed(frames.settings({4: 20_000}))

    assert peer.responses[1].data == message(b"x" * 50_000) + message(b"y" * 1_000)


def test_data_under_a_larger_window_follows_the_acknowledgement() -> None:
    peer = Peer(settings={hf.SettingsFrame.INITIAL_WINDOW_SIZE: 10})
    peer.open()
    new = peer.feed(peer.data(1, message(b"x" * 100)), frames.settings({4: 1_000}))

    kinds = [type(frame) for frame in new]
    assert kinds == [hf.HeadersFrame, hf.DataFrame, hf.SettingsFrame, hf.DataFrame]


def test_a_window_that_shrinks_takes_the_stream_out_of_its_turn() -> None:
    peer = Peer()
    peer.connection.pause_sending()
    _send(peer, 1, b"x" * 100)
    peer.feed(frames.settings({4: 0}))
    peer.connection.resume_sending()
    peer.take()
    assert _sent(peer, 1) == 0
    peer.feed(frames.window_update(1, 1_000))

    assert peer.responses[1].data == message(b"x" * 100)


def test_streams_take_turns() -> None:
    peer = Peer()
    peer.connection.pause_sending()
    for stream_id in (1, 3, 5):
        _send(peer, stream_id, b"x" * 20_000)
    assert peer.of_type(hf.DataFrame) == []
    peer.connection.resume_sending()
    # Frames are collected by stream, so what shows the turns is who got how much of the window.
    peer.take()

    assert [_sent(peer, stream_id) for stream_id in (1, 3, 5)] == [20_005, 20_005, 20_005]


def test_a_full_window_is_shared_by_turns() -> None:
    peer = Peer(settings={hf.SettingsFrame.INITIAL_WINDOW_SIZE: 2**20})
    for stream_id in (1, 3, 5):
        peer.open(stream_id, pseudo_path=WATCH)
    for session in peer.sessions:
        session.call.send(b"x" * 200_000)
    peer.take()
    before = [_sent(peer, stream_id) for stream_id in (1, 3, 5)]
    peer.feed(frames.window_update(0, 6 * 16_384))

    after = [_sent(peer, stream_id) for stream_id in (1, 3, 5)]
    assert [b - a for a, b in zip(before, after, strict=True)] == [2 * 16_384] * 3


def test_reset_forgets_what_was_queued() -> None:
    peer = Peer()
    for stream_id in (1, 3):
        _send(peer, stream_id, b"x" * 60_000)
    assert peer.connection.outbox.queued_bytes > 0
    peer.feed(frames.rst_stream(3, 8), frames.window_update(0, 200_000))

    assert peer.connection.outbox.queued_bytes == 0
    assert peer.counters.buffered_bytes == 0


def test_paused_socket_holds_data_back_but_not_control_frames() -> None:
    peer = Peer()
    peer.open()
    peer.connection.pause_sending()
    peer.connection.pause_sending()
    new = peer.feed(peer.data(1, message(b"x")), frames.ping(bytes(8)))
    assert {type(frame) for frame in new} == {hf.HeadersFrame, hf.PingFrame}
    peer.feed(frames.window_update(0, 10))
    assert _sent(peer, 1) == 0
    peer.connection.resume_sending()
    peer.connection.resume_sending()
    peer.take()

    assert peer.responses[1].data == message(b"x")
    assert peer.connection.outbox.window_bytes == WINDOW + 10 - 6


def test_window_update_of_zero_is_an_error_of_its_stream() -> None:
    peer = Peer()
    peer.open()
    peer.feed(frames.window_update(1, 0))

    assert peer.reset_with() == ErrorCode.PROTOCOL_ERROR


def test_window_update_of_zero_on_the_connection_is_a_connection_error() -> None:
    peer = Peer()
    peer.feed(frames.window_update(0, 0))

    assert peer.failed_with() == ErrorCode.PROTOCOL_ERROR


@pytest.mark.parametrize("stream_id", [0, 1])
def test_window_update_of_another_length_is_a_connection_error(stream_id: int) -> None:
    peer = Peer()
    peer.open()
    peer.feed(frames.frame(frames.WINDOW_UPDATE, 0, stream_id, bytes(3)))

    assert peer.failed_with() == ErrorCode.FRAME_SIZE_ERROR


def test_stream_window_above_the_largest_is_a_stream_error() -> None:
    peer = Peer()
    peer.open()
    peer.feed(frames.window_update(1, 2**31 - 1 - WINDOW))
    assert peer.reset_with() is None
    peer.feed(frames.window_update(1, 1))

    assert peer.reset_with() == ErrorCode.FLOW_CONTROL_ERROR


@pytest.mark.parametrize("is_paused", [False, True])
def test_connection_window_above_the_largest_is_a_connection_error(is_paused: bool) -> None:
    peer = Peer()
    if is_paused:
        peer.connection.pause_sending()
    peer.feed(frames.window_update(0, 2**31 - 1 - WINDOW))
    assert not peer.connection.is_failed
    peer.feed(frames.window_update(0, 1))

    assert peer.failed_with() == ErrorCode.FLOW_CONTROL_ERROR


def test_initial_window_that_overflows_a_stream_is_a_connection_error() -> None:
    peer = Peer()
    peer.open()
    peer.feed(frames.window_update(1, 2**31 - 1 - WINDOW), frames.settings({4: WINDOW + 1}))

    assert peer.failed_with() == ErrorCode.FLOW_CONTROL_ERROR


# ---- the windows that we give


def _credits(peer: Peer, stream_id: int) -> int:
    updates = peer.of_type(hf.WindowUpdateFrame)
    return sum(frame.window_increment for frame in updates if frame.stream_id == stream_id)


def test_windows_are_given_back_as_bytes_arrive() -> None:
    peer = Peer(limits=Limits(stream_window_bytes=65_535, connection_window_bytes=65_535))
    peer.open()
    rest = message(b"x" * 300_000)
    total = len(rest)
    while rest:
        peer.feed(peer.data(1, rest[:16_384]))
        rest = rest[16_384:]

    assert total - 65_535 <= _credits(peer, 1) <= total
    assert total - 65_535 <= _credits(peer, 0) <= total
    assert len(peer.session.messages) == 1


def test_whole_messages_give_the_window_back_too() -> None:
    peer = Peer(limits=Limits(stream_window_bytes=65_535))
    peer.open(1, pseudo_path=WATCH)
    for _ in range(10):
        peer.feed(peer.data(1, message(b"x" * 10_000)))

    assert _credits(peer, 1) >= 100_000 - 65_535


def test_padding_counts_towards_the_windows() -> None:
    peer = Peer(limits=Limits(stream_window_bytes=65_535, connection_window_bytes=65_535))
    peer.open(1, pseudo_path=WATCH)
    for _ in range(200):
        peer.feed(peer.data(1, message(b"x"), pad=255))

    assert _credits(peer, 1) > 32_000
    assert _credits(peer, 0) > 32_000


def test_data_of_closed_streams_gives_the_connection_window_back() -> None:
    peer = Peer(limits=Limits(connection_window_bytes=65_535))
    peer.open()
    peer.session.call.end()
    peer.take()
    for _ in range(20):
        peer.feed(peer.data(1, b"x" * 10_000))

    assert _credits(peer, 0) >= 200_000 - 65_535
    assert _credits(peer, 1) == 0


def test_half_received_messages_do_not_starve_the_connection() -> None:
    peer = Peer(limits=Limits(connection_window_bytes=65_535))
    for i in range(100):
        peer.feed(peer.headers(2 * i + 1), peer.data(2 * i + 1, message(b"x" * 20_000)[:10_000]))
    peer.open(201)
    peer.feed(peer.data(201, message(b"me too"), end=True))

    assert peer.responses[201].data == message(b"me too")
    assert _credits(peer, 0) >= 1_000_000 - 65_535


def test_more_than_the_stream_window_is_a_stream_error() -> None:
    peer = Peer(limits=Limits(stream_window_bytes=65_535))
    peer.open()
    peer.connection.windows._stream_bytes = 2**31  # the peer is never given anything back
    peer.feed(peer.data(1, message(b"x" * 100_000)[:16_384]) * 5)
    peer.connection.windows._stream_bytes = 65_535
    peer.feed(peer.data(1, b"x"))

    assert peer.reset_with() == ErrorCode.FLOW_CONTROL_ERROR


def test_more_than_the_connection_window_in_one_read_is_a_connection_error() -> None:
    peer = Peer(limits=Limits(connection_window_bytes=65_535))
    peer.open()
    peer.feed(peer.data(1, message(b"x" * 100_000)[:16_384]) * 5)

    assert peer.failed_with() == ErrorCode.FLOW_CONTROL_ERROR


# ---- bounds of what is kept


def test_half_received_messages_of_all_connections_refuse_new_streams() -> None:
    counters = Counters()
    limits = Limits(max_buffered_bytes=30_000)
    one, other = (Peer(limits=limits, counters=counters) for _ in range(2))
    for stream_id in (1, 3, 5):
        one.open(stream_id)
        one.feed(one.data(stream_id, message(b"x" * 20_000)[:10_000]))
    other.feed(other.headers(1))
    assert other.reset_with() == ErrorCode.REFUSED_STREAM
    assert counters.abuse[Abuse.BUFFERED_BYTES] == 1
    one.feed(one.data(1, message(b"x" * 20_000)[10_000:]))  # running ones go on
    one.connection.lose()
    other.open(3)

    assert counters.buffered_bytes == 0
    assert len(other.sessions) == 1


def test_half_received_messages_of_one_connection_are_bounded() -> None:
    peer = Peer(limits=Limits(max_connection_buffered_bytes=25_000))
    for stream_id in (1, 3, 5):
        peer.open(stream_id)
        peer.feed(peer.data(stream_id, message(b"x" * 20_000)[:10_000]))

    assert peer.responses[5].status == 8
    assert 1 not in peer.responses
    assert peer.counters.abuse[Abuse.BUFFERED_BYTES] == 1
    assert peer.counters.buffered_bytes == 20_000


def test_slow_reader_loses_its_connection() -> None:
    peer = Peer(limits=Limits(max_queued_bytes=100_000))
    peer.open(1, pseudo_path=WATCH)
    for _ in range(20):
        peer.session.call.send(b"x" * 10_000)
    assert peer.num_wakes == 1
    peer.take()

    assert peer.failed_with() == ErrorCode.ENHANCE_YOUR_CALM
    assert peer.counters.abuse[Abuse.SLOW_READER] == 1
    assert peer.counters.buffered_bytes == 0
    assert peer.session.num_closed == 1


def test_reader_that_stands_still_loses_its_connection() -> None:
    peer = Peer(limits=Limits(keepalive_s=1e9, stall_timeout_s=60.0))
    _send(peer, 1, b"x" * 200_000)
    peer.tick(50.0)
    peer.feed(frames.window_update(0, 1_000), frames.window_update(1, 1_000))
    peer.tick(50.0)
    peer.tick(50.0)
    assert not peer.connection.is_failed
    peer.tick(61.0)

    assert peer.failed_with() == ErrorCode.ENHANCE_YOUR_CALM
    assert peer.counters.abuse[Abuse.SLOW_READER] == 1
