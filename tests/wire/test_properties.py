"""Whatever a peer sends: defined outcomes only, no exception, counts that add up."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.wire import Counters, Limits, frames
from extproc.wire.budget import Budget
from extproc.wire.rpc import Code
from tests.wire.peer import (
    BROKEN,
    ECHO,
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

LIMITS = Limits(
    max_streams_per_connection=4,
    max_message_bytes=300,
    max_queued_bytes=2_000,
    stream_window_bytes=1_000,
    connection_window_bytes=70_000,
    max_control_frames=1_000,
)

stream_ids = st.sampled_from([0, 1, 3, 5, 7, 9, 2, 2**31 - 1, 2**31 + 1])
blocks = st.one_of(
    st.sampled_from(
        [
            literals(REQUEST),
            first_block(),
            *(literals(request(pseudo_path=path)) for path in (ECHO, WATCH, BROKEN, HASTY, "/no")),
            literals(request(content_length="6")),
            literals(request(grpc_timeout="1S")),
            literals([("a", "trailer")]),
            b"\x40\x01a\x01b" + literals(REQUEST),
        ]
    ),
    st.binary(max_size=30),
)
contents = st.one_of(
    st.binary(max_size=20).map(message),
    st.sampled_from([message(b"raise"), message(b"x" * 250), message(b"x" * 400), b"", b"\0\0"]),
    st.binary(max_size=20),
)
u32 = st.sampled_from([0, 1, 100, 65_535, 2**31 - 1, 2**32 - 1]).map(frames.U32.pack)
payloads = st.one_of(
    blocks,
    contents,
    u32,
    st.binary(min_size=8, max_size=8),
    st.tuples(st.integers(0, 7), st.sampled_from([0, 1, 10, 65_535, 16_384, 2**31])).map(
        lambda item: frames.SETTING.pack(*item)
    ),
)
any_frame = st.builds(raw, st.integers(0, 10), st.integers(0, 255), stream_ids, payloads)
likely_frame = st.one_of(
    st.builds(raw, st.just(frames.HEADERS), st.sampled_from([4, 5, 0, 0x24]), stream_ids, blocks),
    st.builds(raw, st.just(frames.DATA), st.sampled_from([0, 1, 8]), stream_ids, contents),
    st.builds(raw, st.just(frames.RST_STREAM), st.just(0), stream_ids, u32),
    st.builds(raw, st.just(frames.WINDOW_UPDATE), st.just(0), stream_ids, u32),
    st.just(frames.settings({4: 10})),
    st.just(frames.settings({4: 100_000})),
    st.just(frames.SETTINGS_ACK),
)
steps = st.one_of(
    st.lists(st.one_of(likely_frame, any_frame), min_size=1, max_size=6).map(b"".join),
    st.binary(min_size=1, max_size=40),
    st.sampled_from(["tick", "late", "end", "drain", "pause", "resume", "hold", "let go"]),
)


def check(peer: Peer, counters: Counters) -> None:
    """The invariants after every step."""
    connection = peer.connection
    assert counters.streams_open == len(connection.streams.open)
    assert counters.streams_opened == (
        counters.streams_answered
        + counters.streams_reset_by_peer
        + counters.streams_reset_by_us
        + counters.streams_lost
        + counters.streams_open
    )
    queued = sum(s.queue.num_bytes for s in connection.streams.open.values() if s.queue is not None)
    held = sum(s.held_bytes for s in connection.streams.open.values())
    assert held == sum(
        s.kept_bytes + len(s.partial or b"") for s in connection.streams.open.values()
    )
    assert connection.outbox.queued_bytes == queued
    assert peer.budget.used_bytes == held + queued
    assert peer.budget.used_bytes <= peer.budget.max_bytes + queued
    assert set(connection.streams.partial_since_s) <= set(connection.streams.open)
    assert set(connection.streams.deadlines_s) <= set(connection.streams.open)
    if connection.is_failed:
        assert connection.is_over
        assert not connection.streams.open
    assert all(session.num_closed <= 1 for session in peer.sessions)


def run(peer: Peer, all_steps: list[bytes | str]) -> None:
    """Take every step, checking after each."""
    for step in all_steps:
        call = peer.sessions[-1].call if peer.sessions else None
        if isinstance(step, bytes):
            peer.feed(step)
        elif step == "tick":
            peer.tick(0.7)
        elif step == "drain":
            peer.connection.start_drain(now=peer.now)
        elif step == "pause":
            peer.connection.outbox.pause()
        elif step == "resume":
            peer.connection.outbox.resume()
        elif step == "late" and call is not None:
            call.send(b"late" * 30)
        elif step in ("hold", "let go") and call is not None:
            call.hold(200 if step == "hold" else 0, is_whole=len(peer.sessions) % 2 == 0)
            peer.feed(b"")
        elif step == "end" and call is not None:
            call.end(Code.UNKNOWN, "late")
        peer.take()
        check(peer, peer.counters)
    peer.connection.lose()
    check(peer, peer.counters)
    assert peer.budget.used_bytes == 0
    assert all(session.num_closed == 1 for session in peer.sessions)


@settings(max_examples=4 * settings().max_examples)
@given(st.lists(steps, max_size=25))
def test_any_sequence_of_frames_has_a_defined_outcome(all_steps: list[bytes | str]) -> None:
    run(Peer(limits=LIMITS, budget=Budget(500, max_upload_bytes=300)), all_steps)


@given(st.lists(st.binary(max_size=60), max_size=10))
def test_any_bytes_before_the_handshake_have_a_defined_outcome(reads: list[bytes]) -> None:
    run(Peer(limits=LIMITS, handshake=False), list(reads))


@settings(max_examples=2 * settings().max_examples)
@given(st.lists(likely_frame, max_size=20), st.lists(st.integers(1, 60), max_size=20))
def test_how_bytes_are_split_into_reads_changes_no_outcome(
    sequence: list[bytes], cuts: list[int]
) -> None:
    """Frames of one read may be dropped by a reset in it; sessions must not see a difference."""
    whole, split = Peer(limits=LIMITS), Peer(limits=LIMITS)
    data = b"".join(sequence)
    whole.feed(data)
    position = 0
    for cut in cuts:
        split.feed(data[position : position + cut])
        position += cut
    split.feed(data[position:])

    assert [s.messages for s in whole.sessions] == [s.messages for s in split.sessions]
    assert whole.connection.is_failed == split.connection.is_failed
