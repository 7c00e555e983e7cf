"""9113 10.5: every limit is there, has its name, and spares those who behave."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest

from extproc.wire import Abuse, Counters, Limits, frames
from extproc.wire.control import ANSWERED_COST, SETTINGS_COST
from extproc.wire.grpccall import WireStream
from extproc.wire.limits import ErrorCode
from extproc.wire.outbox import Outbox
from tests.wire.peer import REQUEST, WATCH, Peer, first_block, literals, message, raw, request

LIMITS = Limits(max_control_frames=SETTINGS_COST + 20)  # those of the beginning, and so much
FLOODS = {
    "SETTINGS": (frames.settings({}), SETTINGS_COST),
    "PING": (frames.ping(bytes(8)), ANSWERED_COST),
    "DATA without content": (raw(frames.DATA, 0, 1), ANSWERED_COST),
    "WINDOW_UPDATE": (frames.window_update(0, 1), ANSWERED_COST),
    "PRIORITY": (raw(frames.PRIORITY, 0, 1, b"\0\0\0\x05\x10"), 1),
}
"""Each with what it costs."""


@pytest.mark.parametrize("name", FLOODS)
@pytest.mark.parametrize("is_one_read", [True, False])
def test_flood_ends_the_connection(name: str, is_one_read: bool) -> None:
    frame, cost = FLOODS[name]
    peer = Peer(limits=Limits(max_control_frames=SETTINGS_COST + 20 * cost))
    peer.open(1, pseudo_path=WATCH)
    for _ in range(1 if is_one_read else 20):
        peer.feed(frame * (20 if is_one_read else 1))
    assert not peer.connection.is_failed
    peer.feed(frame)

    assert peer.failed_with() == ErrorCode.ENHANCE_YOUR_CALM
    assert peer.counters.abuse[Abuse.FRAME_FLOOD] == 1
    assert peer.session.num_closed == 1


def test_data_without_content_within_a_message_is_a_flood_too() -> None:
    peer = Peer(limits=Limits(max_control_frames=SETTINGS_COST + 20 * ANSWERED_COST))
    peer.open(1, pseudo_path=WATCH)
    peer.feed(peer.data(1, message(b"xyz")[:6]), raw(frames.DATA, 0, 1) * 21)

    assert peer.failed_with() == ErrorCode.ENHANCE_YOUR_CALM


@pytest.mark.parametrize("name", FLOODS)
def test_the_same_frames_at_leisure_are_no_flood(name: str) -> None:
    frame, cost = FLOODS[name]
    peer = Peer(limits=Limits(max_control_frames=SETTINGS_COST + 20 * cost))
    peer.open(1, pseudo_path=WATCH)
    for _ in range(10):
        peer.feed(frame * 15)
        peer.now += 10.0

    assert not peer.connection.is_failed


def test_frames_of_all_kinds_have_one_budget() -> None:
    costs = sum(cost for _, cost in FLOODS.values())
    peer = Peer(limits=Limits(max_control_frames=SETTINGS_COST + costs))
    peer.open(1, pseudo_path=WATCH)
    peer.feed(*(frame for frame, _ in FLOODS.values()))
    assert not peer.connection.is_failed
    peer.feed(FLOODS["PRIORITY"][0])

    assert peer.failed_with() == ErrorCode.ENHANCE_YOUR_CALM


@pytest.mark.parametrize("kind", [0xBE, frames.RST_STREAM, frames.HEADERS])
def test_frames_that_go_nowhere_are_counted(kind: int) -> None:
    peer = Peer(limits=LIMITS)
    peer.open(1, pseudo_path=WATCH)
    peer.session.call.end()
    peer.take()
    payload = {frames.HEADERS: literals(REQUEST), frames.RST_STREAM: bytes(4)}.get(kind, b"")
    peer.feed(raw(kind, 0x4, 1, payload) * 30)

    assert peer.failed_with() == ErrorCode.ENHANCE_YOUR_CALM
    assert peer.counters.abuse[Abuse.FRAME_FLOOD] == 1


@pytest.mark.parametrize("reserved", [0, 1 << 31])  # 9113 4.1: to be ignored
def test_resets_that_may_have_crossed_the_end_of_a_stream_are_no_flood(reserved: int) -> None:
    peer = Peer(limits=Limits(max_control_frames=SETTINGS_COST))
    peer.open(1, pseudo_path=WATCH)
    peer.session.call.end()
    peer.take()
    for _ in range(3):  # across our end, after its own, and one that comes late
        peer.feed(raw(frames.RST_STREAM, 0, 1 | reserved, bytes(4)))
    assert not peer.connection.is_failed
    peer.feed(raw(frames.RST_STREAM, 0, 1 | reserved, bytes(4)))

    assert peer.failed_with() == ErrorCode.ENHANCE_YOUR_CALM


def test_window_updates_for_our_own_data_are_no_flood() -> None:
    peer = Peer(limits=LIMITS)
    peer.open()
    for _ in range(50):
        peer.feed(peer.data(1, message(b"x")))
        peer.feed(frames.window_update(0, 6), frames.window_update(1, 6))

    assert not peer.connection.is_failed


def test_ten_thousand_held_clients_may_leave_at_once() -> None:
    peer = Peer()
    peer.feed(raw(frames.HEADERS, 4, 1, first_block(request(pseudo_path=WATCH))))
    block = literals(request(pseudo_path=WATCH))
    ids = range(3, 20_003, 2)
    peer.feed(*(raw(frames.HEADERS, 4, i, block) for i in ids))
    assert len(peer.connection.streams.open) == 10_001
    peer.feed(*(frames.rst_stream(i, 8) for i in ids))

    assert not peer.connection.is_failed
    assert len(peer.connection.streams.open) == 1
    assert all(session.num_closed == 1 for session in peer.sessions[1:])


def test_resets_that_the_peer_makes_us_send_are_rapid_too() -> None:
    peer = Peer(limits=Limits(max_control_frames=SETTINGS_COST + 60))
    for i in range(21):
        peer.feed(peer.headers(2 * i + 1), frames.window_update(2 * i + 1, 0))

    assert peer.failed_with() == ErrorCode.ENHANCE_YOUR_CALM
    assert peer.counters.abuse[Abuse.FRAME_FLOOD] == 1


def test_malformed_requests_are_rapid_resets_too() -> None:
    peer = Peer(limits=LIMITS)
    for i in range(21):
        peer.feed(peer.headers(2 * i + 1, request(te="gzip")))

    assert peer.failed_with() == ErrorCode.ENHANCE_YOUR_CALM
    assert peer.counters.abuse[Abuse.FRAME_FLOOD] == 1


def test_streams_above_the_limit_of_a_connection_are_refused() -> None:
    peer = Peer(limits=Limits(max_streams_per_connection=2))
    for stream_id in (1, 3, 5):
        peer.feed(peer.headers(stream_id))
    assert peer.reset_with(5) == ErrorCode.REFUSED_STREAM
    assert peer.counters.abuse[Abuse.TOO_MANY_STREAMS] == 1
    peer.feed(peer.data(5, message(b"x")), peer.data(1, message(b"x"), end=True))
    peer.open(7)

    assert len(peer.sessions) == 3
    assert peer.counters.streams_refused == 1


def test_streams_above_the_limit_of_all_connections_are_refused() -> None:
    counters = Counters()
    limits = Limits(max_streams=2)
    one, other = (Peer(limits=limits, counters=counters) for _ in range(2))
    one.open(1)
    one.open(3)
    other.feed(other.headers(1))

    assert other.reset_with() == ErrorCode.REFUSED_STREAM
    assert counters.streams_open == 2


def test_continuation_flood_ends_the_connection() -> None:
    peer = Peer()
    peer.feed(raw(frames.HEADERS, 0, 1), raw(frames.CONTINUATION, 0, 1) * 17)

    assert peer.failed_with() == ErrorCode.ENHANCE_YOUR_CALM
    assert peer.counters.abuse[Abuse.CONTINUATION_FLOOD] == 1


def test_header_block_is_bounded_over_its_frames() -> None:
    peer = Peer()
    big = raw(frames.CONTINUATION, 0, 1, bytes(16_384))
    peer.feed(raw(frames.HEADERS, 0, 1, bytes(16_384)), big, big)

    assert peer.failed_with() == ErrorCode.ENHANCE_YOUR_CALM
    assert peer.counters.abuse[Abuse.HEADER_BLOCK] == 1


def test_header_list_is_bounded() -> None:
    peer = Peer(limits=Limits(max_header_list_bytes=1000))
    peer.feed(raw(frames.HEADERS, 4, 1, first_block([*REQUEST, ("a", "x" * 1000)])))

    assert peer.responses[1].status == 8
    assert peer.sessions == []
    assert peer.counters.abuse[Abuse.HEADER_LIST] == 1


def test_header_list_of_remembered_fields_is_bounded() -> None:
    peer = Peer(limits=Limits(max_header_list_bytes=1000))
    peer.open()
    block = literals([*REQUEST, *[("a", "x" * 100)] * 10])
    peer.feed(raw(frames.HEADERS, 4, 3, block))

    assert peer.responses[3].status == 8
    assert len(peer.sessions) == 1
    assert peer.counters.abuse[Abuse.HEADER_LIST] == 1


def test_hpack_bomb_is_a_header_list_too_large() -> None:
    """One field in the dynamic table, then named a thousand times by one octet each."""
    peer = Peer(handshake=False)
    bomb = b"\x40\x01a\x7f\x81\x1e" + b"x" * 4000 + b"\xbe" * 1000
    peer.feed(frames.PREFACE + frames.settings({}), raw(frames.HEADERS, 4, 1, bomb))

    assert peer.failed_with() == ErrorCode.ENHANCE_YOUR_CALM
    assert peer.counters.abuse[Abuse.HEADER_LIST] == 1


def test_one_connection_s_sins_do_not_count_for_another() -> None:
    counters = Counters()
    sinner, other = (Peer(limits=LIMITS, counters=counters) for _ in range(2))
    other.open(1)
    sinner.feed(frames.ping(bytes(8)) * 11)
    other.feed(frames.ping(bytes(8)) * 9, other.data(1, message(b"x"), end=True))

    assert sinner.connection.is_failed
    assert other.responses[1].status == 0


def test_every_abuse_has_a_limit_and_is_counted_from_zero() -> None:
    assert Counters().abuse == dict.fromkeys(Abuse, 0)
    assert all(field.default for field in dataclasses.fields(Limits))


def test_a_settings_frame_is_one_look_at_the_streams_however_often_it_names_the_window(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A frame of 16 KiB has room for 2,730 values, a connection for thousands of streams."""
    peer = Peer()
    num_streams = 50
    peer.feed(peer.headers(1))
    peer.feed(*(peer.headers(2 * i + 1) for i in range(1, num_streams)))
    looks: list[int] = []
    change = Outbox.add_stream_window

    def counted(outbox: Outbox, stream: WireStream, change_bytes: int) -> bool:
        looks.append(stream.id)
        return change(outbox, stream, change_bytes)

    monkeypatch.setattr(Outbox, "add_stream_window", counted)
    values = [frames.SETTING.pack(frames.INITIAL_WINDOW_SIZE, 1000 + i) for i in range(2000)]
    peer.feed(raw(frames.SETTINGS, 0, 0, b"".join(values)))

    assert len(looks) == num_streams
    assert {s.window_bytes for s in peer.connection.streams.open.values()} == {2999}


def test_an_intermediate_value_that_overflows_a_window_is_an_error() -> None:
    peer = Peer()
    peer.open()
    peer.feed(frames.window_update(1, 2**30))
    values = [frames.SETTING.pack(frames.INITIAL_WINDOW_SIZE, each) for each in (2**31 - 1, 10)]
    peer.feed(raw(frames.SETTINGS, 0, 0, b"".join(values)))

    assert peer.failed_with() == ErrorCode.FLOW_CONTROL_ERROR


def test_a_stream_does_not_keep_its_header_list() -> None:
    """A block may refer to one large field again and again: kept, it costs 400 times its bytes."""
    peer = Peer()
    peer.open(x_large="v" * 4000)
    (stream,) = peer.connection.streams.open.values()
    kept = [getattr(stream, name, None) for name in WireStream.__slots__]

    assert not any(isinstance(each, Mapping) for each in kept)
    assert not any(hasattr(each, "metadata") for each in kept if each is not stream.session)


def test_settings_that_move_many_windows_count_for_more_than_one() -> None:
    peer = Peer(limits=Limits(max_control_frames=4 * SETTINGS_COST))
    peer.feed(peer.headers(1))
    peer.feed(*(peer.headers(2 * i + 1) for i in range(1, 2 * 4096)))
    for value in (1000, 2000):
        assert peer.failed_with() is None
        peer.feed(frames.settings({frames.INITIAL_WINDOW_SIZE: value}))

    assert peer.failed_with() == ErrorCode.ENHANCE_YOUR_CALM
