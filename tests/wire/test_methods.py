"""9113 8: what a request must look like; header lists, well-formed and malformed."""

from __future__ import annotations

import hpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.wire import Counters, Limits, frames
from extproc.wire.headers import HeaderReader, StickyCache, split_stateless
from extproc.wire.limits import ConnectionFault, ErrorCode
from extproc.wire.methods import Field, Request
from tests.wire.peer import REQUEST, Peer, first_block, literals, message, raw, request


@pytest.mark.parametrize(
    "fields",
    [
        request(pseudo_method=None),
        request(pseudo_scheme=None),
        request(pseudo_path=None),
        request(pseudo_path=""),
        request(pseudo_path="test"),
        request(pseudo_path="*"),
        request(pseudo_status="200"),
        request(pseudo_unknown="x"),
        [*REQUEST, (":authority", "late")],
        [*REQUEST[:2], (":path", "/a"), *REQUEST[2:]],
        [*REQUEST, ("connection", "close")],
        [*REQUEST, ("keep-alive", "x")],
        [*REQUEST, ("proxy-connection", "x")],
        [*REQUEST, ("transfer-encoding", "chunked")],
        [*REQUEST, ("upgrade", "h2c")],
        request(te="gzip"),
        [*REQUEST, ("Upper", "x")],
        [*REQUEST, ("with space", "x")],
        [*REQUEST, ("", "x")],
        [*REQUEST, ("a:b", "x")],
        [*REQUEST, ("caf\xe9", "x")],
        [*REQUEST, ("a", "x\ny")],
        [*REQUEST, ("a", "x\ry")],
        [*REQUEST, ("a", "x\0y")],
        [*REQUEST, ("a", " x")],
        [*REQUEST, ("a", "x\t")],
        [*REQUEST, ("host", "elsewhere")],
        [*REQUEST, ("content-length", "many")],
        [*REQUEST, ("content-length", "5"), ("content-length", "5")],
        [*REQUEST, ("content-length", "-1")],
        request(pseudo_method="CONNECT"),
        [(":method", "CONNECT"), (":path", "/"), (":authority", "a")],
        [(":method", "CONNECT"), (":scheme", "http"), (":authority", "a")],
        [(":method", "CONNECT")],
        [],
    ],
)
def test_malformed_request_is_a_stream_error(fields: list[tuple[str, str]]) -> None:
    peer = Peer()
    peer.feed(raw(frames.HEADERS, 0x4, 1, first_block(fields)))

    assert peer.reset_with() == ErrorCode.PROTOCOL_ERROR
    assert peer.sessions == []
    assert peer.counters.streams_reset_by_us == 1


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        (request(pseudo_method="GET"), "405"),
        ([(":method", "CONNECT"), (":authority", "a:1")], "405"),
        (request(pseudo_method="OPTIONS", pseudo_path="*"), "405"),
        (request(content_type="application/json"), "415"),
        (request(content_type="application/grpcweb"), "415"),
        (request(content_type=None), "415"),
    ],
)
def test_requests_that_are_not_grpc_get_an_http_status(
    fields: list[tuple[str, str]], status: str
) -> None:
    peer = Peer()
    peer.feed(peer.headers(1, fields, end=True))

    assert peer.responses[1].headers == [[(":status", status)]]
    assert peer.responses[1].is_ended
    assert peer.reset_with() is None


@pytest.mark.parametrize("kind", ["application/grpc+proto", "application/grpc;x=y"])
def test_grpc_content_types_are_served(kind: str) -> None:
    peer = Peer()
    peer.open(1, content_type=kind)

    assert len(peer.sessions) == 1


def test_metadata_holds_the_fields_without_pseudo_headers() -> None:
    peer = Peer()
    fields = [*REQUEST, ("x", "1"), ("cookie", "a=b"), ("x", "2"), ("cookie", "c=d"), ("y", "\xe9")]
    peer.feed(raw(frames.HEADERS, 0x4, 1, first_block(fields)))

    metadata = peer.session.metadata
    assert metadata["x"] == "1,2"
    assert metadata["cookie"] == "a=b; c=d"
    assert metadata["y"] == "\xe9"
    assert ":path" not in metadata
    with pytest.raises(TypeError):
        metadata["x"] = "mine"  # type: ignore[index]


def test_host_may_repeat_the_authority_or_replace_it() -> None:
    peer = Peer()
    peer.open(1, host="localhost")
    peer.open(3, host="localhost", pseudo_authority=None)

    assert len(peer.sessions) == 2


@pytest.mark.parametrize(("length", "is_right"), [(6, True), (5, False), (7, False), (0, False)])
def test_content_length_must_fit_the_data(length: int, is_right: bool) -> None:
    peer = Peer()
    peer.open(1, content_length=str(length))
    peer.feed(peer.data(1, message(b"x")), peer.data(1, b"", end=True))

    assert peer.reset_with() == (None if is_right else ErrorCode.PROTOCOL_ERROR)
    assert peer.session.num_closed == 1


@pytest.mark.parametrize(("length", "code"), [("0", None), ("6", ErrorCode.PROTOCOL_ERROR)])
def test_content_length_without_data(length: str, code: ErrorCode | None) -> None:
    peer = Peer()
    peer.feed(peer.headers(1, request(content_length=length), end=True))

    assert peer.reset_with() == code


def test_content_length_must_fit_where_trailers_end_the_request() -> None:
    peer = Peer()
    peer.open(1, content_length="6")
    peer.feed(peer.headers(1, [("a", "b")], end=True))

    assert peer.reset_with() == ErrorCode.PROTOCOL_ERROR


# ---- header blocks without decoding


def _reader(judged: list[list[Field]] | None = None) -> HeaderReader:
    def judge(fields: list[Field]) -> Request:
        if judged is not None:
            judged.append(fields)
        return Request(details=" ".join(f"{field.name}={field.value}" for field in fields))

    return HeaderReader(judge, Limits(), Counters())


names = st.text("abcdefgh-", min_size=1, max_size=200)
values = st.text(st.characters(max_codepoint=255), max_size=300)


@given(st.lists(st.tuples(names, values), max_size=12))
def test_cutting_a_block_changes_nothing_that_is_read(fields: list[tuple[str, str]]) -> None:
    block = literals(fields)

    pieces = split_stateless(block)
    assert pieces is not None
    assert b"".join(pieces) == block
    request = _reader().read_request(block)
    assert request.details == " ".join(f"{name}={value}" for name, value in fields)


@given(st.binary(max_size=60))
def test_cutting_never_raises_and_never_loses_a_byte(block: bytes) -> None:
    pieces = split_stateless(block)

    assert pieces is None or b"".join(pieces) == block


@pytest.mark.parametrize(
    "block",
    [
        b"\x80",  # index 0
        b"\xbe",  # the first dynamic entry
        b"\x40\x01a\x01b",  # incremental indexing
        b"\x20",  # size update
        b"\x0f\x2f\x01b",  # name from the dynamic table: 15 + 47
        b"\x00\x7f\x80\x01",  # a length of three octets
        b"\x00\x01",  # cut
        b"\x0f",
    ],
)
def test_blocks_that_depend_on_state_are_not_cut(block: bytes) -> None:
    assert split_stateless(block) is None


def test_names_from_the_static_table_may_take_two_octets() -> None:
    assert split_stateless(b"\x0f\x2e\x01b\x83") == [b"\x0f\x2e\x01b", b"\x83"]


def test_fields_are_remembered_when_blocks_are_not() -> None:
    judged: list[list[Field]] = []
    reader = _reader(judged)
    for i in range(4):
        reader.read_request(literals([*REQUEST, ("traceparent", f"00-{i:032}-{i:016}-01")]))

    assert judged[2][0] is judged[3][0]
    assert judged[2][-1].value != judged[3][-1].value
    assert reader.requests == {}


few = st.tuples(st.sampled_from(["a", "b", "c"]), st.sampled_from(["1", "2", "x" * 40]))


@given(
    st.lists(
        st.one_of(
            st.lists(few, max_size=4),
            st.sampled_from([0, 60, 120, 4096]),
            st.sampled_from([b"\xbe", b"\xbf", b"\x82", b"\x40\x01a\x011", b"\x00\x01a\x011"]),
        ),
        max_size=40,
    )
)
def test_caching_never_changes_the_meaning_of_a_block(
    blocks: list[list[tuple[str, str]] | int | bytes],
) -> None:
    """The same blocks through a decoder that remembers and one that does not."""
    encoder, plain, reader = hpack.Encoder(), hpack.Decoder(), _reader()
    for item in blocks:
        if isinstance(item, int):
            encoder.header_table_size = item
            continue
        block = item if isinstance(item, bytes) else encoder.encode(item)
        try:
            decoded = plain.decode(block, raw=True)
        except hpack.HPACKError:
            with pytest.raises(ConnectionFault):
                _look_up(reader, block)
            return
        expected = b" ".join(bytes(name) + b"=" + bytes(value) for name, value in decoded)
        assert _look_up(reader, block).details.encode() == expected


def _look_up(reader: HeaderReader, block: bytes) -> Request:
    return reader.requests.get(block) or reader.read_request(block)


def test_cache_keeps_repeated_keys_and_evicts_nothing() -> None:
    cache: StickyCache[int] = StickyCache(max_entries=2, max_key_bytes=4)
    for key in (b"a", b"a", b"b", b"long!", b"long!", b"c", b"c", b"d", b"d"):
        cache.offer(key, 1)

    assert set(cache.kept) == {b"a", b"c"} or set(cache.kept) == {b"a", b"b"}
    kept = set(cache.kept)
    for i in range(1000):
        cache.offer(b"%d" % i, 1)
    assert set(cache.kept) == kept


def test_cache_full_of_outdated_entries_starts_over() -> None:
    cache: StickyCache[int] = StickyCache(max_entries=1, max_key_bytes=4)
    for key in (b"a", b"a"):
        cache.offer(key, 1)
    for _ in range(5000):
        cache.offer(b"b", 2)

    assert cache.kept == {b"b": 2}
