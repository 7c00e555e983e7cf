"""9113 5.2, 6.9: flow control in both directions, queues and turns."""

from __future__ import annotations

import tracemalloc

import pytest
from hyperframe import frame as hf

from extproc.wire import Abuse, Counters, Limits, frames
from extproc.wire.budget import Budget
from extproc.wire.limits import ErrorCode
from extproc.wire.rpc import Code
from tests.wire.peer import WATCH, Peer, message, request

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
    peer.session.call.end(Code.NOT_FOUND, "gone")
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


def test_a_shrunk_window_ends_the_turns_of_its_stream() -> None:
    peer = Peer()
    peer.connection.outbox.pause()
    _send(peer, 1, b"x" * 100)
    peer.feed(frames.settings({4: 0}))
    peer.connection.outbox.resume()
    peer.take()
    assert _sent(peer, 1) == 0
    peer.feed(frames.window_update(1, 1_000))

    assert peer.responses[1].data == message(b"x" * 100)


def test_streams_take_turns() -> None:
    peer = Peer()
    peer.connection.outbox.pause()
    for stream_id in (1, 3, 5):
        _send(peer, stream_id, b"x" * 20_000)
    assert peer.of_type(hf.DataFrame) == []
    peer.connection.outbox.resume()
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


def test_reset_drops_the_queue() -> None:
    peer = Peer()
    for stream_id in (1, 3):
        _send(peer, stream_id, b"x" * 60_000)
    assert peer.connection.outbox.queued_bytes > 0
    peer.feed(frames.rst_stream(3, 8), frames.window_update(0, 200_000))

    assert peer.connection.outbox.queued_bytes == 0
    assert peer.budget.used_bytes == 0


def test_paused_socket_holds_data_back_but_not_control_frames() -> None:
    peer = Peer()
    peer.open()
    peer.connection.outbox.pause()
    peer.connection.outbox.pause()
    new = peer.feed(peer.data(1, message(b"x")), frames.ping(bytes(8)))
    assert {type(frame) for frame in new} == {hf.HeadersFrame, hf.PingFrame}
    peer.feed(frames.window_update(0, 10))
    assert _sent(peer, 1) == 0
    peer.connection.outbox.resume()
    peer.connection.outbox.resume()
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
        peer.connection.outbox.pause()
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


def test_complete_messages_replenish_the_window_too() -> None:
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


def test_data_of_closed_streams_replenishes_the_connection_window() -> None:
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
    # The peer is never given anything back.
    peer.connection.streams.limits = Limits(stream_window_bytes=2**31)
    peer.feed(peer.data(1, message(b"x" * 100_000)[:16_384]) * 5)
    peer.connection.streams.limits = Limits(stream_window_bytes=65_535)
    peer.feed(peer.data(1, b"x"))

    assert peer.reset_with() == ErrorCode.FLOW_CONTROL_ERROR


def test_more_than_the_connection_window_in_one_read_is_a_connection_error() -> None:
    peer = Peer(limits=Limits(connection_window_bytes=65_535))
    peer.open()
    peer.feed(peer.data(1, message(b"x" * 100_000)[:16_384]) * 5)

    assert peer.failed_with() == ErrorCode.FLOW_CONTROL_ERROR


# ---- bounds of what is kept


def half(size_bytes: int) -> bytes:
    """The first half of a message of this size."""
    return message(b"x" * size_bytes)[: size_bytes // 2]


def test_the_oldest_half_received_message_of_all_connections_is_given_up() -> None:
    budget, counters = Budget(30_000), Counters()
    one, other = (Peer(counters=counters, budget=budget) for _ in range(2))
    for stream_id in (1, 3, 5):
        one.open(stream_id)
        one.feed(one.data(stream_id, half(18_000)))
    assert budget.used_bytes == 27_000
    other.open(1)
    other.feed(other.data(1, half(18_000)))
    assert one.num_wakes == 1
    one.take()

    assert one.responses[1].status == 8
    assert counters.abuse[Abuse.BUFFERED_BYTES] == budget.num_given_up == 1
    assert budget.used_bytes == 27_000
    assert 3 not in one.responses
    assert 1 not in other.responses


def test_held_bytes_of_a_call_count_along_with_its_incomplete_message() -> None:
    peer = Peer(budget=Budget(30_000))
    keeper = peer.open(1)
    keeper.call.hold(20_000)
    keeper.call.hold(15_000)
    peer.feed(peer.data(1, half(10_000)))
    assert peer.budget.used_bytes == 20_000
    peer.open(3)
    peer.feed(peer.data(3, half(30_000)[:10_001]))

    assert peer.responses[1].status == 8
    assert peer.budget.used_bytes == 10_001
    keeper.call.hold(7)
    assert peer.budget.used_bytes == 10_001, "an ended call keeps nothing"


def test_complete_uploads_are_given_up_after_unfinished_ones() -> None:
    peer = Peer(budget=Budget(30_000))
    peer.open(1).call.hold(20_000, is_whole=True)
    peer.open(3)
    peer.feed(peer.data(3, half(30_000)[:10_001]))

    assert 1 not in peer.responses
    assert peer.responses[3].status == 8
    assert peer.budget.used_bytes == 20_000
    peer.connection.lose()
    assert peer.budget.used_bytes == 0


def test_an_ended_call_releases_memory_while_its_response_waits_for_a_window() -> None:
    peer = Peer(settings={4: 0})
    call = peer.open(1).call
    call.hold(20_000)
    call.send(b"x" * 100)
    call.end()
    call.hold(10_000)

    assert peer.budget.used_bytes == len(message(b"x" * 100))
    peer.feed(hf.WindowUpdateFrame(1, window_increment=1000))
    call.hold(10_000)
    assert peer.budget.used_bytes == 0


def test_a_session_may_respond_itself_when_it_is_given_up() -> None:
    peer = Peer(budget=Budget(10_000))
    session = peer.open(1)

    def give_up(*, is_too_large: bool) -> None:
        assert not is_too_large
        session.call.send(b"too much")
        session.call.end()

    setattr(session, "give_up", give_up)  # noqa: B010 - sessions have it or have it not
    peer.feed(peer.data(1, half(30_000)[:10_001]))

    assert peer.responses[1].data == message(b"too much")
    assert peer.responses[1].status == 0
    assert peer.budget.used_bytes == 0


def test_a_session_may_respond_itself_when_a_message_is_too_large() -> None:
    peer = Peer(limits=Limits(max_message_bytes=1000))
    session = peer.open(1)

    def give_up(*, is_too_large: bool) -> None:
        assert is_too_large
        session.call.send(b"too large")
        session.call.end()

    setattr(session, "give_up", give_up)  # noqa: B010 - as above
    peer.feed(peer.data(1, half(1001)))

    assert peer.responses[1].data == message(b"too large")
    assert peer.responses[1].status == 0
    assert peer.counters.abuse[Abuse.MESSAGE_TOO_LARGE] == 1


def test_a_session_that_raises_when_it_is_given_up_ends_its_own_stream_only() -> None:
    peer = Peer(budget=Budget(10_000))

    def give_up(*, is_too_large: bool) -> None:
        raise RuntimeError("cannot")

    setattr(peer.open(1), "give_up", give_up)  # noqa: B010 - as above
    peer.feed(peer.data(1, half(30_000)[:10_001]))

    assert peer.responses[1].status == 13
    assert str(peer.errors[0][0]) == "cannot"


def test_a_call_given_up_releases_memory_even_without_a_window_for_its_response() -> None:
    peer = Peer(budget=Budget(10_000), settings={4: 0})
    session = peer.open(1)
    session.call.send(b"waits for a window")
    peer.feed(peer.data(1, half(30_000)[:10_001]))

    assert not peer.responses[1].is_ended
    assert peer.budget.used_bytes == len(message(b"waits for a window"))
    peer.feed(hf.WindowUpdateFrame(1, window_increment=1000))
    assert peer.responses[1].status == 8
    assert peer.budget.used_bytes == 0


def test_unsent_responses_above_the_budget_refuse_new_streams() -> None:
    peer = Peer(budget=Budget(10_000), settings={4: 0})
    session = peer.open(1)
    session.call.send(b"x" * 10_000)
    peer.feed(peer.headers(3))
    assert peer.reset_with(3) == ErrorCode.REFUSED_STREAM
    assert peer.counters.abuse[Abuse.BUFFERED_BYTES] == 1
    peer.feed(hf.WindowUpdateFrame(1, window_increment=20_000))
    peer.open(5)

    assert len(peer.sessions) == 2


def test_above_half_of_the_budget_the_oldest_upload_goes_on_and_the_others_wait() -> None:
    """As many of the oldest go on as fit to their end; small messages need no more window."""
    limits = Limits(stream_window_bytes=65_535)
    peer = Peer(limits=limits, budget=Budget(220_000, max_upload_bytes=121_000))
    frame = b"x" * 16_000
    for stream_id in (1, 3):
        peer.open(stream_id)
        peer.feed(peer.data(stream_id, message(b"x" * 120_000)[:16_000]))
    for _ in range(3):
        peer.feed(peer.data(1, frame), peer.data(3, frame))

    updates = [u.stream_id for u in peer.of_type(hf.WindowUpdateFrame) if u.stream_id]
    assert updates == [1, 3], "below half of the budget both go on"
    peer.feed(*(peer.data(i, frame) for _ in range(2) for i in (1, 3)))
    updates = [u.stream_id for u in peer.of_type(hf.WindowUpdateFrame) if u.stream_id]
    assert updates == [1, 3, 1], "the younger one waits"
    peer.open(5)
    peer.feed(peer.data(5, message(b"small")))
    assert peer.responses[5].data == message(b"small")
    peer.frames.clear()
    peer.feed(peer.data(1, frame), peer.data(1, b"x" * (120_005 - 112_000)))

    assert peer.sessions[0].messages == [b"x" * 120_000]
    updates = [u.stream_id for u in peer.of_type(hf.WindowUpdateFrame) if u.stream_id]
    assert updates == [3], "and goes on when there is room again"


def test_a_stream_that_has_ended_gets_no_window() -> None:
    limits = Limits(stream_window_bytes=65_535)
    peer = Peer(limits=limits, settings={4: 0}, budget=Budget(50_000))
    peer.open(1)
    peer.session.call.hold(40_000)
    peer.open(3)
    peer.session.call.send(b"waits for a window")
    peer.feed(*(peer.data(3, part) for part in (message(b"x" * 50_000)[:5_000], b"x" * 3_000)))
    stream = peer.connection.streams.open[3]
    stream.grant()
    assert peer.take() != []
    stream.end()
    stream.grant()

    assert peer.take() == []


def test_above_the_limit_the_longest_queues_are_reset_and_the_others_go_on() -> None:
    peer = Peer(limits=Limits(max_queued_bytes=100_000))
    peer.open(1, pseudo_path=WATCH)
    for _ in range(20):
        peer.session.call.send(b"x" * 10_000)
    assert peer.num_wakes == 1
    _send(peer, 3, b"y" * 1_000)

    assert peer.reset_with(1) == ErrorCode.ENHANCE_YOUR_CALM
    assert peer.counters.abuse[Abuse.SLOW_READER] == 1
    assert [session.num_closed for session in peer.sessions] == [1, 0]
    peer.feed(frames.window_update(0, 100_000))
    assert peer.responses[3].data == message(b"y" * 1_000)
    assert peer.budget.used_bytes == 0


def test_answers_of_the_same_bytes_wait_without_copies() -> None:
    peer = Peer()
    answer = bytes(1_000_000)
    tracemalloc.start()
    for stream_id in range(1, 41, 2):
        _send(peer, stream_id, answer)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert peer.connection.outbox.queued_bytes == 20 * (len(answer) + 5) - WINDOW
    assert peak_bytes < len(answer)


@pytest.mark.parametrize("sizes", [(1, 20_000, 1), (16_384, 16_384), (20_000, 1, 1, 40_000)])
def test_messages_of_any_size_wait_in_their_order(sizes: tuple[int, ...]) -> None:
    peer = Peer(settings={hf.SettingsFrame.INITIAL_WINDOW_SIZE: 0})
    peer.open(1, pseudo_path=WATCH)
    bodies = [bytes([number]) * size for number, size in enumerate(sizes)]
    for body in bodies:
        peer.session.call.send(body)
    while peer.connection.outbox.queued_bytes:
        peer.feed(frames.window_update(0, 7_001), frames.window_update(1, 7_001))

    assert peer.responses[1].data == b"".join(map(message, bodies))


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
    assert peer.budget.used_bytes == 0
    assert peer.session.num_closed == 1


def test_a_stream_that_is_not_read_ends_alone() -> None:
    peer = Peer(limits=Limits(keepalive_s=1e9), settings={4: 0})
    _send(peer, 1, b"x")
    peer.tick(61.0)
    peer.feed(frames.settings({4: 100}))
    _send(peer, 3, b"y")

    assert peer.reset_with(1) == ErrorCode.ENHANCE_YOUR_CALM
    assert peer.responses[3].data == message(b"y")
    assert peer.counters.abuse[Abuse.SLOW_READER] == 1
