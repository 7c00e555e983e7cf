"""9113 6.5, 6.7, 6.8: SETTINGS, PING, GOAWAY, and how a connection drains."""

from __future__ import annotations

import pytest
from hyperframe import frame as hf

from extproc.wire import Abuse, Limits, frames
from extproc.wire.limits import ErrorCode
from tests.wire.peer import WATCH, Peer, message, raw, request

DRAIN_S = Limits().keepalive_timeout_s


def test_settings_are_acknowledged() -> None:
    peer = Peer()
    (ack,) = peer.feed(frames.settings({3: 100, 0xABC: 5}))

    assert isinstance(ack, hf.SettingsFrame)
    assert set(ack.flags) == {"ACK"}


def test_acknowledgements_are_not_acknowledged() -> None:
    peer = Peer()

    assert peer.feed(frames.SETTINGS_ACK) == []


@pytest.mark.parametrize(
    ("flags", "stream_id", "payload", "code"),
    [
        (0, 1, b"", ErrorCode.PROTOCOL_ERROR),
        (1, 0, bytes(6), ErrorCode.FRAME_SIZE_ERROR),
        (0, 0, bytes(5), ErrorCode.FRAME_SIZE_ERROR),
        (0, 0, frames.SETTING.pack(2, 2), ErrorCode.PROTOCOL_ERROR),
        (0, 0, frames.SETTING.pack(4, 2**31), ErrorCode.FLOW_CONTROL_ERROR),
        (0, 0, frames.SETTING.pack(5, 16_383), ErrorCode.PROTOCOL_ERROR),
        (0, 0, frames.SETTING.pack(5, 2**24), ErrorCode.PROTOCOL_ERROR),
    ],
)
def test_broken_settings_are_connection_errors(
    flags: int, stream_id: int, payload: bytes, code: ErrorCode
) -> None:
    peer = Peer()
    peer.feed(raw(frames.SETTINGS, flags, stream_id, payload))

    assert peer.failed_with() == code


def test_settings_at_the_edge_of_their_range_are_taken() -> None:
    peer = Peer()
    peer.feed(
        frames.settings({2: 0, 4: 2**31 - 1, 5: 16_384}), frames.settings({2: 1, 5: 2**24 - 1})
    )

    assert not peer.connection.is_failed


def test_settings_are_applied_in_their_order() -> None:
    peer = Peer()
    payload = frames.SETTING.pack(4, 1) + frames.SETTING.pack(4, 70_000)
    peer.feed(raw(frames.SETTINGS, 0, 0, payload))

    assert peer.connection.outbox.initial_window_bytes == 70_000


def test_ping_is_acknowledged_with_the_same_octets() -> None:
    peer = Peer()
    (pong,) = peer.feed(frames.ping(b"12345678"))

    assert isinstance(pong, hf.PingFrame)
    assert set(pong.flags) == {"ACK"}
    assert pong.opaque_data == b"12345678"


def test_ping_acknowledgement_is_not_acknowledged() -> None:
    peer = Peer()

    assert peer.feed(frames.ping(b"12345678", is_ack=True)) == []


@pytest.mark.parametrize(
    ("stream_id", "length", "code"),
    [
        (1, 8, ErrorCode.PROTOCOL_ERROR),
        (0, 7, ErrorCode.FRAME_SIZE_ERROR),
        (0, 9, ErrorCode.FRAME_SIZE_ERROR),
    ],
)
def test_broken_ping_is_a_connection_error(stream_id: int, length: int, code: ErrorCode) -> None:
    peer = Peer()
    peer.feed(raw(frames.PING, 0, stream_id, bytes(length)))

    assert peer.failed_with() == code


def test_goaway_of_the_peer_leaves_running_calls_alone() -> None:
    peer = Peer()
    peer.open()
    peer.feed(frames.goaway(0, 0, b"bye"), peer.data(1, message(b"x"), end=True))

    assert peer.responses[1].status == 0


@pytest.mark.parametrize(
    ("stream_id", "length", "code"),
    [(1, 8, ErrorCode.PROTOCOL_ERROR), (0, 7, ErrorCode.FRAME_SIZE_ERROR)],
)
def test_broken_goaway_is_a_connection_error(stream_id: int, length: int, code: ErrorCode) -> None:
    peer = Peer()
    peer.feed(raw(frames.GOAWAY, 0, stream_id, bytes(length)))

    assert peer.failed_with() == code


def _drain(peer: Peer) -> list[hf.Frame]:
    peer.connection.start_drain(now=peer.now)
    return peer.take()


def test_drain_announces_pings_and_then_names_the_last_stream() -> None:
    peer = Peer()
    peer.open(1)
    first, ping = _drain(peer)
    assert isinstance(first, hf.GoAwayFrame)
    assert isinstance(ping, hf.PingFrame)
    assert first.last_stream_id == 2**31 - 1
    peer.open(3)
    (last,) = peer.feed(frames.ping(ping.opaque_data, is_ack=True))

    assert isinstance(last, hf.GoAwayFrame)
    assert (last.last_stream_id, last.error_code) == (3, 0)
    assert not peer.connection.is_over


def test_drain_is_over_when_the_last_call_has_ended() -> None:
    peer = Peer()
    peer.open(1)
    _drain(peer)
    peer.feed(frames.ping(peer.pinged(), is_ack=True))
    assert not peer.connection.is_over
    peer.feed(peer.data(1, message(b"x"), end=True))

    assert peer.responses[1].status == 0
    assert peer.connection.is_over


def test_streams_above_the_last_one_are_ignored() -> None:
    peer = Peer()
    peer.open(1)
    _drain(peer)
    peer.feed(frames.ping(peer.pinged(), is_ack=True))
    new = peer.feed(peer.headers(3), peer.data(3, message(b"x"), end=True))

    assert new == []
    assert len(peer.sessions) == 1
    assert peer.connection.streams.state(1).name == "OPEN"


def test_drain_ends_long_lived_calls_with_unavailable() -> None:
    peer = Peer()
    peer.open(1, pseudo_path=WATCH)
    _drain(peer)
    peer.feed(peer.headers(3, request(pseudo_path=WATCH)))

    assert peer.responses[1].status == peer.responses[3].status == 14
    assert len(peer.sessions) == 1


def test_drain_does_not_wait_for_an_unresponsive_peer() -> None:
    peer = Peer()
    _drain(peer)
    peer.feed(frames.ping(b"somebody", is_ack=True))
    assert not peer.connection.is_over
    peer.tick(DRAIN_S + 0.1)

    assert peer.connection.is_over


def test_forged_drain_acknowledgement_drains_nothing() -> None:
    peer = Peer()
    _drain(peer)
    other = Peer()
    other.feed(frames.ping(peer.pinged(), is_ack=True))

    assert other.goaway is None
    assert not other.connection.is_over


def test_drain_begins_once() -> None:
    peer = Peer()
    _drain(peer)

    assert _drain(peer) == []


def test_handshake_has_a_time_limit() -> None:
    peer = Peer(handshake=False)
    peer.feed(frames.PREFACE + frames.settings({}))
    peer.tick(9.9)
    assert not peer.connection.is_failed
    peer.tick(0.2)

    assert peer.failed_with() == ErrorCode.SETTINGS_TIMEOUT
    assert peer.counters.abuse[Abuse.HANDSHAKE_TIMEOUT] == 1


def test_silence_is_probed_and_then_ended() -> None:
    peer = Peer()
    peer.open(1, pseudo_path=WATCH)
    assert peer.tick(4.0) == []
    (ping,) = peer.tick(1.5)
    assert isinstance(ping, hf.PingFrame)
    assert peer.tick(4.0) == []
    peer.tick(2.0)

    assert peer.connection.is_over
    assert peer.counters.abuse[Abuse.HALF_OPEN] == 1
    assert peer.session.num_closed == 1


def test_any_sign_of_life_ends_the_suspicion() -> None:
    peer = Peer()
    peer.open(1, pseudo_path=WATCH)
    peer.tick(6.0)
    peer.now += 3
    peer.feed(frames.window_update(0, 1))
    peer.tick(2.0)
    peer.tick(2.0)
    assert not peer.connection.is_over
    peer.tick(3.0)
    peer.feed(frames.ping(peer.pinged(), is_ack=True))
    peer.tick(4.0)

    assert not peer.connection.is_over


def test_idle_connection_is_drained_and_a_busy_one_never() -> None:
    limits = Limits(idle_timeout_s=100.0, keepalive_s=1e9)
    idle, busy = Peer(limits=limits), Peer(limits=limits)
    busy.open(1, pseudo_path=WATCH)
    for peer in (idle, busy):
        peer.tick(60.0)
        peer.tick(60.0)

    assert isinstance(idle.frames[-2], hf.GoAwayFrame)
    assert idle.counters.abuse[Abuse.IDLE] == 1
    assert busy.goaway is None
    idle.tick(200.0)
    assert idle.connection.is_over
    assert idle.counters.abuse[Abuse.IDLE] == 1


def test_short_calls_between_two_looks_are_use_too() -> None:
    peer = Peer(limits=Limits(idle_timeout_s=100.0, keepalive_s=1e9))
    for stream_id in (1, 3, 5):
        peer.tick(60.0)
        peer.feed(peer.headers(stream_id, end=True))

    peer.tick(60.0)
    assert peer.goaway is None
