"""9113 3.4, 4, 5.5: the preface, the frame layer, header blocks over several frames."""

from __future__ import annotations

import hpack
import pytest
from hyperframe import frame as hf

from extproc.wire import Limits, frames
from extproc.wire.limits import ErrorCode
from tests.wire.peer import (
    ECHO,
    REQUEST,
    WATCH,
    Peer,
    first_block,
    literals,
    message,
    raw,
    request,
)


def test_server_preface_is_settings() -> None:
    peer = Peer(handshake=False)

    first = peer.frames[0]
    assert isinstance(first, hf.SettingsFrame)
    assert "ACK" not in first.flags
    assert first.settings[hf.SettingsFrame.HEADER_TABLE_SIZE] == 0
    assert hf.SettingsFrame.ENABLE_PUSH not in first.settings


def test_small_connection_window_needs_no_update_in_the_preface() -> None:
    peer = Peer(handshake=False, limits=Limits(connection_window_bytes=65_535))

    assert [type(frame) for frame in peer.frames] == [hf.SettingsFrame]


@pytest.mark.parametrize(
    "text", [b"GET / HTTP/1.1\r\n", b"PRI * HTTP/2.0\r\n\r\nXX", b"\x16\x03\x01"]
)
def test_wrong_preface_is_a_protocol_error(text: bytes) -> None:
    peer = Peer(handshake=False)
    peer.feed(text)

    assert peer.failed_with() == ErrorCode.PROTOCOL_ERROR


@pytest.mark.parametrize(
    "first", [raw(frames.PING, 0, 0, bytes(8)), frames.SETTINGS_ACK, raw(0xBE, 0, 0)]
)
def test_preface_must_be_followed_by_settings(first: bytes) -> None:
    peer = Peer(handshake=False)
    peer.feed(frames.PREFACE + first)

    assert peer.failed_with() == ErrorCode.PROTOCOL_ERROR


def test_requests_may_follow_the_preface_in_one_read() -> None:
    peer = Peer(handshake=False)
    peer.feed(
        frames.PREFACE,
        frames.settings({}),
        peer.headers(1),
        peer.data(1, message(b"hello"), end=True),
    )

    assert peer.responses[1].data == message(b"hello")
    assert peer.responses[1].status == 0


def test_bytes_may_be_split_anywhere() -> None:
    peer = Peer(handshake=False)
    peer.encoder.header_table_size = 0
    stream = frames.PREFACE + frames.settings({3: 7}) + frames.SETTINGS_ACK
    stream += peer.headers(1) + peer.data(1, message(b"one") + message(b"two"), end=True)
    for i in range(len(stream)):
        peer.feed(stream[i : i + 1])

    assert peer.session.messages == [b"one", b"two"]
    assert peer.responses[1].status == 0


def test_a_frame_cut_after_its_header_is_completed_by_the_next_read() -> None:
    peer = Peer()
    peer.open()
    whole = peer.data(1, message(b"x" * 1000)) + peer.data(1, message(b"y"), end=True)
    peer.feed(whole[:500])
    peer.feed(whole[500:])

    assert peer.session.messages == [b"x" * 1000, b"y"]


def test_too_large_frame_is_a_frame_size_error_before_its_payload_comes() -> None:
    peer = Peer()
    peer.feed(frames.FRAME_HEADER.pack(16_385 << 8 | frames.DATA, 0, 1))

    assert peer.failed_with() == ErrorCode.FRAME_SIZE_ERROR


def test_too_large_frame_is_a_frame_size_error_also_when_its_header_is_split() -> None:
    peer = Peer()
    header = frames.FRAME_HEADER.pack(16_385 << 8 | frames.DATA, 0, 1)
    peer.feed(header[:5])
    peer.feed(header[5:])

    assert peer.failed_with() == ErrorCode.FRAME_SIZE_ERROR


def test_frame_of_the_maximum_size_is_taken() -> None:
    peer = Peer()
    peer.open()
    body = b"x" * (16_384 - 5)
    peer.feed(peer.data(1, message(body)))

    assert peer.session.messages == [body]


def test_unknown_frame_types_are_ignored() -> None:
    peer = Peer()
    peer.open()
    new = peer.feed(raw(0xFA, 0xFF, 1, b"what"), raw(0xFA, 0, 0), peer.data(1, message(b"x")))

    assert [frame.type for frame in new] == [frames.HEADERS, frames.DATA]


def test_reserved_bit_of_the_stream_identifier_is_ignored() -> None:
    peer = Peer()
    bit = 0x8000_0000
    peer.feed(raw(frames.HEADERS, 0x4, 1 | bit, first_block()))
    peer.feed(raw(frames.DATA, 0x1, 1 | bit, message(b"x")))

    assert peer.session.messages == [b"x"]
    assert peer.responses[1].status == 0


def test_reserved_bit_makes_no_identifier_higher() -> None:
    peer = Peer()
    peer.open(5)
    peer.feed(raw(frames.HEADERS, 0x4, 3 | 0x8000_0000, literals(REQUEST)))

    assert peer.failed_with() == ErrorCode.PROTOCOL_ERROR


def test_undefined_flags_are_ignored() -> None:
    peer = Peer()
    peer.feed(raw(frames.HEADERS, 0x4 | 0xD2, 1, first_block()))
    peer.feed(raw(frames.DATA, 0xF6, 1, message(b"x")), raw(frames.PING, 0xFE, 0, bytes(8)))

    assert peer.session.messages == [b"x"]
    assert not peer.connection.is_failed


@pytest.mark.parametrize("flag", [0, 1])
def test_header_block_may_be_split_over_continuations(flag: int) -> None:
    peer = Peer()
    block = first_block()
    peer.feed(raw(frames.HEADERS, flag, 1, block[:10]))
    peer.feed(raw(frames.CONTINUATION, 0, 1, block[10:20]), raw(frames.CONTINUATION, 0, 1))
    assert not peer.sessions
    peer.feed(raw(frames.CONTINUATION, frames.END_HEADERS, 1, block[20:]))

    assert peer.session.is_half_closed == bool(flag)


@pytest.mark.parametrize(
    "between",
    [
        raw(frames.DATA, 0, 1, b""),
        raw(frames.PING, 0, 0, bytes(8)),
        raw(frames.CONTINUATION, 4, 3, b""),
        raw(frames.HEADERS, 4, 3, literals(REQUEST)),
        raw(0xFA, 0, 1, b""),
        raw(frames.PRIORITY, 0, 1, bytes(5)),
    ],
)
def test_nothing_may_come_within_a_header_block(between: bytes) -> None:
    peer = Peer()
    peer.feed(raw(frames.HEADERS, 0, 1, literals(REQUEST)), between)

    assert peer.failed_with() == ErrorCode.PROTOCOL_ERROR


@pytest.mark.parametrize("stream_id", [0, 1, 3])
def test_continuation_without_a_header_block_is_a_protocol_error(stream_id: int) -> None:
    peer = Peer()
    peer.open(1)
    peer.feed(raw(frames.CONTINUATION, frames.END_HEADERS, stream_id, b""))

    assert peer.failed_with() == ErrorCode.PROTOCOL_ERROR


@pytest.mark.parametrize(
    "block",
    [
        b"\xc0",  # index 64 of an empty dynamic table
        b"\x80",  # index 0
        b"\x00\x05ab",  # a string that ends early
        b"\x3f\xe2\x1f",  # size update to 4097 while 4096 is allowed
        b"\x88\x20",  # size update behind a field
        b"\x00\x81\xff\x01a",  # Huffman: only padding
        b"\x0f",  # an integer that ends early
        b"\xff\x80\x80\x80\x80\x80\x01",  # an integer without end
        b"\x10",  # no name
        b"\x00\x85\xff\xff\xff\xff\xff\x00",  # Huffman: EOS and padding too long
        b"\x7f\xff\xff\xff\xff\xff",
    ],
)
def test_undecodable_header_block_is_a_compression_error(block: bytes) -> None:
    peer = Peer(handshake=False)
    peer.feed(frames.PREFACE + frames.settings({}), raw(frames.HEADERS, 4, 1, block))

    assert peer.failed_with() == ErrorCode.COMPRESSION_ERROR


def test_block_after_our_settings_must_begin_with_a_size_update() -> None:
    peer = Peer()  # has acknowledged a table of size 0
    peer.feed(raw(frames.HEADERS, 4, 1, b"\x40\x01a\x01b"))

    assert peer.failed_with() == ErrorCode.COMPRESSION_ERROR


def test_remembered_block_does_not_pass_where_a_size_update_is_due() -> None:
    peer = Peer(handshake=False)
    peer.feed(frames.PREFACE + frames.settings({}))
    block = literals(REQUEST)
    for stream_id in (1, 3, 5):
        peer.feed(raw(frames.HEADERS, 4, stream_id, block))
    assert peer.counters.header_blocks_cached == 1
    peer.feed(frames.SETTINGS_ACK, raw(frames.HEADERS, 4, 7, block))

    assert peer.failed_with() == ErrorCode.COMPRESSION_ERROR


def test_blocks_are_remembered_again_after_the_size_update() -> None:
    peer = Peer(handshake=False)
    peer.feed(frames.PREFACE + frames.settings({}))
    block = literals(REQUEST)
    for stream_id in (1, 3):
        peer.feed(raw(frames.HEADERS, 4, stream_id, block))
    peer.feed(frames.SETTINGS_ACK, raw(frames.HEADERS, 4, 5, b"\x20" + block))
    peer.feed(raw(frames.HEADERS, 4, 7, block))

    assert peer.counters.header_blocks_cached == 1
    assert [session.metadata for session in peer.sessions] == [peer.session.metadata] * 4


def test_further_acknowledgements_ask_for_no_further_size_update() -> None:
    peer = Peer()
    peer.open(1)
    peer.feed(frames.SETTINGS_ACK)
    for stream_id in (3, 5, 7):
        peer.feed(raw(frames.HEADERS, 4, stream_id, literals(REQUEST)))

    assert len(peer.sessions) == 4
    assert peer.counters.header_blocks_cached == 1


def test_size_update_in_trailers_counts_too() -> None:
    peer = Peer(handshake=False)
    block = literals(REQUEST)
    peer.feed(frames.PREFACE + frames.settings({}))
    for stream_id in (1, 3):
        peer.feed(raw(frames.HEADERS, 4, stream_id, block))
    peer.feed(frames.SETTINGS_ACK, raw(frames.HEADERS, 5, 1, b"\x20" + literals([("a", "b")])))
    peer.feed(raw(frames.HEADERS, 4, 5, block))

    assert peer.counters.header_blocks_cached == 1


def test_dynamic_table_serves_until_the_peer_acknowledges() -> None:
    peer = Peer(handshake=False)
    peer.feed(frames.PREFACE + frames.settings({}))
    encoder = hpack.Encoder()
    fields = request(user_agent="a-client", x_a="b")
    blocks = [encoder.encode(fields) for _ in range(5)]
    assert len(blocks[1]) < len(blocks[0])
    for i, block in enumerate(blocks):
        peer.feed(raw(frames.HEADERS, 4, 2 * i + 1, block))

    assert [session.metadata["x-a"] for session in peer.sessions] == ["b"] * 5
    assert peer.counters.header_blocks_cached == 2


def test_blocks_that_read_the_dynamic_table_are_forgotten_when_it_changes() -> None:
    peer = Peer(handshake=False)
    peer.feed(frames.PREFACE + frames.settings({}))
    reading = literals(REQUEST) + b"\xbe"  # the newest entry, whatever it is
    sent: list[bytes] = []
    for value in (b"1", b"2", b"3"):
        sent += [literals(REQUEST) + b"\x40\x03x-a\x01" + value, reading, reading, reading]
    for i, block in enumerate(sent):
        peer.feed(raw(frames.HEADERS, 4, 2 * i + 1, block))

    assert [session.metadata["x-a"] for session in peer.sessions] == [*"111122223333"]
    assert peer.counters.header_blocks_cached > 0


def test_two_entries_that_replace_each_other_are_a_change() -> None:
    """The table has room for one: the second insertion may reuse the memory of the first."""
    peer = Peer(handshake=False)
    peer.feed(frames.PREFACE + frames.settings({}))
    size = b"\x3f\x0a"  # 41: one entry of 9 octets
    peer.feed(raw(frames.HEADERS, 4, 1, size + literals(REQUEST) + b"\x40\x03x-a\x01" + b"0"))
    reading, stream_id = literals(REQUEST) + b"\xbe", 3
    for value in b"123456789":
        insertions = b"".join(b"\x40\x03x-a\x01" + bytes((v,)) for v in (120, value))
        for block in (literals(REQUEST) + insertions, reading, reading, reading):
            peer.feed(raw(frames.HEADERS, 4, stream_id, block))
            stream_id += 2
        assert [s.metadata["x-a"] for s in peer.sessions[-3:]] == [chr(value)] * 3


def test_our_first_block_disables_the_dynamic_table() -> None:
    peer = Peer(settings={hf.SettingsFrame.HEADER_TABLE_SIZE: 0})
    peer.decoder.max_allowed_table_size = 0
    peer.open()
    peer.feed(peer.data(1, message(b"x"), end=True))

    assert peer.responses[1].status == 0  # the decoder would have raised


def test_size_update_of_a_dropped_response_comes_with_the_next() -> None:
    peer = Peer(settings={hf.SettingsFrame.HEADER_TABLE_SIZE: 0})
    peer.decoder.max_allowed_table_size = 0
    peer.feed(peer.headers(1), peer.data(1, message(b"x")), frames.rst_stream(1, 8))
    assert 1 not in peer.responses
    peer.feed(peer.headers(3), peer.data(3, message(b"x"), end=True))

    assert peer.responses[3].status == 0


def test_any_path_is_judged_by_its_own_block() -> None:
    peer = Peer()
    for stream_id in range(1, 13, 2):
        peer.feed(
            peer.headers(stream_id, request(pseudo_path=ECHO if stream_id % 4 == 1 else WATCH))
        )

    assert [session.is_echo for session in peer.sessions] == [True, False] * 3


def passes_over(peer: Peer, data: bytes) -> list[list[hf.Frame]]:
    """The output after each pass over one read."""
    position, came = 0, []
    while position < len(data):
        position = peer.connection.receive_pass(data, position, now=peer.now)
        came.append(peer.take())
    return came


def test_a_read_of_many_frames_takes_many_passes() -> None:
    came = passes_over(Peer(), hf.PingFrame(0, opaque_data=b"12345678").serialize() * 1000)

    assert len(came) > 10
    assert max(map(len, came)) <= 100
    assert sum(map(len, came)) == 1000


def test_header_blocks_that_hold_much_take_more_passes() -> None:
    """The same number of requests; a block that must be decoded costs by its fields."""
    num_passes = []
    for num_fields in (1, 300):
        long = request(**{f"x_{n}": "v" for n in range(num_fields)})
        blocks = [b"\x20" + literals([*long, ("x-nr", str(n))]) for n in range(20)]
        requests = [raw(frames.HEADERS, 4, 2 * n + 1, block) for n, block in enumerate(blocks)]
        peer = Peer()
        num_passes.append(len(passes_over(peer, b"".join(requests))))

        assert len(peer.sessions) == 20
    assert num_passes[0] == 1
    assert num_passes[1] >= 5


def test_header_blocks_of_many_references_take_more_passes() -> None:
    """A field in a byte costs as much to read as one that is spelled out."""
    references = b"\x90" * 100  # 7541 appendix A: accept-encoding
    blocks = [b"\x20" + literals([*request(), ("x-nr", str(n))]) + references for n in range(40)]
    requests = [raw(frames.HEADERS, 4, 2 * n + 1, block) for n, block in enumerate(blocks)]

    assert len(passes_over(Peer(), b"".join(requests))) >= 4


def test_messages_of_one_read_take_one_pass() -> None:
    peer = Peer()
    peer.feed(raw(frames.HEADERS, 4, 1, first_block()))
    came = passes_over(peer, raw(frames.DATA, 0, 1, message(b"x" * 8000)) * 16)

    assert len(came) == 1
    assert len(peer.session.messages) == 16


def test_frames_of_many_messages_take_more_passes() -> None:
    peer = Peer()
    peer.feed(raw(frames.HEADERS, 4, 1, first_block()))
    came = passes_over(peer, raw(frames.DATA, 0, 1, message(b"") * 1000) * 8)

    assert len(came) == 8
    assert len(peer.session.messages) == 8000


def test_a_read_is_over_where_the_connection_fails_in_a_pass() -> None:
    ping = hf.PingFrame(0, opaque_data=b"12345678").serialize()
    came = passes_over(Peer(), ping + raw(frames.PING, 0, 0, b"short") + ping * 1000)

    assert len(came) == 1
    assert [type(frame) for frame in came[0]] == [hf.PingFrame, hf.GoAwayFrame]
