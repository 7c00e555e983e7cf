"""What readers of texts from outside take of memory: some times the text, whatever is in it.

The texts are those of which each byte makes as much as it can: one label of names without number,
series, keys, items and parts of a few bytes, deep nesting, long names.
"""

from __future__ import annotations

import asyncio
import ctypes
import struct
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import dns.message
import pytest
from dns.exception import DNSException
from envoy.service.accesslog.v3.als_pb2 import StreamAccessLogsMessage
from envoy.service.discovery.v3.discovery_pb2 import DiscoveryRequest
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest
from google.protobuf.message import DecodeError
from grpc_health.v1.health_pb2 import HealthCheckRequest
from hypothesis import given
from hypothesis import strategies as st
from redis.exceptions import RedisError

from extproc.adapters.adapterfiles import decode_config
from extproc.adapters.effect import read_answer
from extproc.adapters.engineapi import _decode as decode_reply
from extproc.adapters.registrationhttp import MAX_LIST, MAX_LIST_BYTES
from extproc.adapters.stores.content import MAX_CONTENT_BYTES, decode, decode_all
from extproc.adapters.stores.redisreplies import BoundedParser
from extproc.discovery.dnsanswers import LongAnswerError, check_answer
from extproc.discovery.kubernetes.objects import rewrites_query
from extproc.discovery.kubernetes.objectstore import ObjectStore
from extproc.envoy import completions, eds
from extproc.envoy.completions import CompletionService
from extproc.errors import ExtprocError, ProtocolError
from extproc.files.yamltext import load_yaml
from extproc.gen.peers_pb2 import PeerMessage
from extproc.peers import link
from extproc.peers.peermessages import decode as decode_picks
from extproc.peers.peermessages import decode_adapters
from extproc.pods.completion import Completion
from extproc.pods.pool import Pool
from extproc.reports import exposition
from extproc.reports.engines import PROFILES
from extproc.reports.exposition import parse_report
from extproc.reports.listings import decode_models
from extproc.reports.longpages import LongPages
from extproc.reports.orca import parse_orca
from extproc.reports.pagereader import PageReader
from extproc.reports.podasks import _read_version
from extproc.reports.podclient import _Connection
from extproc.reports.textformat import read_labels
from extproc.request.codec import MAX_BESIDE_BODY_BYTES, Codec
from extproc.request.multipart import FormReader
from tests.builders import fill
from tests.conftest import IS_THOROUGH

KIB = 1024
ONE_IN = 1 if IS_THOROUGH else 4
"""Of the longest texts of slow readers, a quarter is read where there is no time for all: what is
asked of a reader is linear."""
OWN_BYTES = 4096 * KIB
"""That a reader may take for any text."""

Make = Callable[[int], bytes]


def _repeated(item: bytes, between: bytes = b"") -> Make:
    return lambda num_bytes: between.join([item] * (num_bytes // (len(item) + len(between))))


def _numbered(before: bytes, after: bytes) -> Make:
    """Items that differ."""

    def make(num_bytes: int) -> bytes:
        num = num_bytes // (len(before) + len(after) + 4)
        return b"".join(b"%b%x%b" % (before, number, after) for number in range(num))

    return make


def _around(before: bytes, make: Make, after: bytes) -> Make:
    return lambda num_bytes: before + make(num_bytes) + after


JSON: Mapping[str, Make] = {
    **{
        f"list of {item.decode()}": _around(b"[", _repeated(item, b","), b"]")
        for item in (b"[]", b"{}", b"1", b'""', b"null", b"1e9", b'"\\u0041"', b'{"":[]}')
    },
    "keys": _around(b"{", _numbered(b'"', b'":[],'), b'"x":1}'),
    "nested lists": lambda num: b"[" * (num // 2) + b"]" * (num // 2),
    "nested objects": lambda num: b'{"a":' * (num // 6) + b"1" + b"}" * (num // 6),
    "a text": _around(b'"', _repeated(b"x"), b'"'),
    "a text and one sign": _around(b'"', _repeated(b"x"), "\N{SLICE OF PIZZA}".encode() + b'"'),
    "escapes": _around(b'"', _repeated(b"\\u00e9"), b'"'),
    "an end that is missing": _repeated(b'{"id":"a","x":[', b""),
}
HEAD = b'vllm:num_requests_running{a="b"} 1\nvllm:num_requests_waiting{a="b"} 0\n'
LORA = b'vllm:lora_requests_info{max_lora="4",waiting_lora_adapters="",running_lora_adapters="'
PAGES: Mapping[str, Make] = {
    "names": _around(HEAD + LORA, _numbered(b"", b","), b'"} 1.7e9\n'),
    "the same name": _around(HEAD + LORA, _repeated(b"a,"), b'"} 1.7e9\n'),
    "series of names": _numbered(LORA + b"a,b,c,d,e,f,g,h,i,", b'"} 1.7e9\n'),
    "engines": _numbered(b'vllm:num_requests_running{engine="', b'"} 0\n'),
    "one engine": _repeated(b"vllm:num_requests_running 0\n"),
    "loaded": _numbered(b'vllm:lora_adapter_loaded{level="cpu",adapter_name="', b'"} 1\n'),
    "labels": _around(b"vllm:num_requests_running{", _numbered(b"a", b'="",'), b"} 1\n"),
    "escapes": _around(b'vllm:num_requests_running{a="', _repeated(b'\\"'), b'"} 1\n'),
    "caches": _numbered(b'vllm:cache_config_info{num_gpu_blocks="', b'"} 1\n'),
    "other series": _numbered(b"x", b" 1\n"),
    "blanks": _repeated(b" a 1\n"),
    "no text": _repeated(b"\0\n"),
    "empty lines": _repeated(b"\n"),
    "no line": _repeated(b"x"),
    "a comment": _around(b"# ", _repeated(b"x"), b"\n"),
    "lines that say nothing": _repeated(b"{}\n"),
    "timestamps": _repeated(b"vllm:num_requests_running 0 1 # {} 1\n"),
}


class Reader(NamedTuple):
    """A reader of texts from outside.

    Attributes:
        read: It.
        max_bytes: Of its texts, at most.
        shapes: Of the texts.
        times: Bytes of memory for each of a text.
        around: What texts come within.
        one_in: So many of the longest text's bytes is one read.
    """

    read: Callable[[bytes], object]
    max_bytes: int
    shapes: Mapping[str, Make]
    times: float
    around: tuple[tuple[bytes, bytes], ...] = ((b"", b""),)
    one_in: int = 1

    @property
    def longest_bytes(self) -> int:
        return self.max_bytes // self.one_in

    def may_take_bytes(self, text: bytes) -> float:
        return self.times * len(text) + OWN_BYTES // self.one_in


def _read_twice(page: bytes) -> None:
    reader = PageReader(PROFILES["vllm"])
    for text in (page, page + b"vllm:num_requests_running 2\n"):
        with suppress(ExtprocError):
            reader.read(text)


def _metrics(engine: str) -> Callable[[bytes], object]:
    return lambda page: parse_report(page, PROFILES[engine])


READERS = {
    "vLLM's metrics": Reader(
        lambda page: parse_report(page, PROFILES["vllm"]), 512 * KIB, PAGES, 12
    ),
    "SGLang's metrics": Reader(
        lambda page: parse_report(page, PROFILES["sglang"]), 512 * KIB, PAGES, 12
    ),
    "metrics that are compared": Reader(_read_twice, 64 * KIB, PAGES, 12),
    "a pod's models": Reader(
        decode_models,
        256 * KIB,
        JSON,
        12,
        ((b"", b""), (b'{"data":', b"}"), (b'{"data":[{"id":"a","x":', b"}]}")),
    ),
    "a pod's version": Reader(_read_version, 64 * KIB, JSON, 8, ((b'{"version":', b"}"),)),
    "a pod's load": Reader(
        lambda text: parse_orca("JSON " + text.decode()),
        60 * KIB,
        JSON,
        8,
        ((b'{"named_metrics":', b"}"),),
    ),
    "a pod's word on an adapter": Reader(
        decode_reply, 256 * KIB, JSON, 8, ((b'{"error":', b"}"), (b'{"loaded_adapters":', b"}"))
    ),
    "a pod's likeliest tokens": Reader(
        read_answer,
        256 * KIB,
        JSON,
        8,
        ((b'{"choices":', b"}"), (b'{"choices":[{"logprobs":{"top_logprobs":', b"}}]}")),
    ),
    "a declaration": Reader(
        decode,
        MAX_CONTENT_BYTES,
        JSON,
        8,
        ((b'{"name":"a","targets":', b"}"), (b'{"name":"a","tenants":', b"}")),
    ),
    "declarations": Reader(
        lambda body: list(decode_all(body, MAX_LIST)), MAX_LIST_BYTES, JSON, 36, ((b"", b""),)
    ),
    "an adapter's file": Reader(
        decode_config,
        256 * KIB,
        JSON,
        8,
        ((b"", b""), (b'{"target_modules":', b"}"), (b'{"rank_pattern":', b"}")),
    ),
}


def _peak_bytes(read: Callable[[bytes], object], text: bytes) -> int:
    tracemalloc.start()
    try:
        with suppress(ExtprocError, ValueError):
            read(text)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", READERS)
@given(data=st.data())
def test_a_reader_takes_no_more_memory_than_some_times_its_text(
    name: str, data: st.DataObject
) -> None:
    reader = READERS[name]
    shape = data.draw(st.sampled_from([*reader.shapes]))
    num_bytes = data.draw(st.sampled_from([reader.max_bytes, reader.max_bytes // 3, 4 * KIB]))
    before, after = data.draw(st.sampled_from(reader.around))
    text = before + reader.shapes[shape](num_bytes - len(before + after)) + after

    assert _peak_bytes(reader.read, text) <= reader.may_take_bytes(text)


# --- protobuf: in memory of its own, which Python does not count ---------------------------------


def _field(number: int, content: bytes) -> bytes:
    """A field with a length."""
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(number: int) -> bytes:
    low, high = number & 127, number >> 7
    return bytes([low | 128]) + _varint(high) if high else bytes([low])


def _within(*numbers: int) -> Callable[[Make], Make]:
    """Put what is made into a field of a field, and so on."""

    def around(make: Make) -> Make:
        def wrapped(num_bytes: int) -> bytes:
            text = make(num_bytes - 6 * len(numbers))
            for number in reversed(numbers):
                text = _field(number, text)
            return text

        return wrapped

    return around


_EMPTY = _repeated(_field(1, b""))
_MAP = _repeated(_field(1, _field(1, b"a") + _field(2, b"")))
MESSAGES: Mapping[str, tuple[Any, int, float, tuple[Make, ...]]] = {
    "ext_proc": (
        ProcessingRequest,
        MAX_BESIDE_BODY_BYTES,
        50,
        (
            _within(2, 1)(_EMPTY),  # headers
            _within(2, 1)(_repeated(_field(1, _field(1, b"") + _field(3, b"")))),
            _within(8, 1)(_MAP),  # metadata
            _within(8, 1, 2, 1, 2, 6)(_EMPTY),  # a list in it
            _repeated(_field(90, b"")),  # unknown fields
        ),
    ),
    "an access log": (
        StreamAccessLogsMessage,
        completions.MAX_MESSAGE_BYTES,
        50,
        (
            _within(2)(_EMPTY),  # entries
            _within(2)(_repeated(_field(1, _field(1, _field(2, b"") + _field(5, b""))))),
            _within(2, 1, 1)(_repeated(_field(22, _field(1, b"a")))),  # tags
        ),
    ),
    "a peer": (
        PeerMessage,
        link.MAX_MESSAGE_BYTES,
        60,
        tuple(
            _within(kind.number)(_repeated(_field(each.number, b"")))
            for kind in PeerMessage.DESCRIPTOR.fields
            if kind.message_type
            for each in kind.message_type.fields
        ),
    ),
    "a subscription": (
        DiscoveryRequest,
        eds.MAX_REQUEST_BYTES,
        20,
        (_repeated(_field(3, b"")), _within(2)(_repeated(_field(10, b"")))),
    ),
    "a question about health": (HealthCheckRequest, 27 * KIB * KIB, 3, (_EMPTY,)),
}


class _MallInfo(ctypes.Structure):
    """`struct mallinfo2` of glibc."""

    _fields_: ClassVar = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks"),
            *("uordblks", "fordblks", "keepcost"),
        )
    ]


def _allocated_bytes() -> int:
    """All that this process has of malloc."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        pytest.skip("only glibc tells what is allocated")
    libc.mallinfo2.restype = _MallInfo
    found = libc.mallinfo2()
    return int(found.uordblks + found.hblkhd)


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_takes_no_more_memory_than_some_times_its_bytes(name: str) -> None:
    kind, max_bytes, times, shapes = MESSAGES[name]
    for number, make in enumerate(shapes):
        text = make(max_bytes // ONE_IN)
        before_bytes = _allocated_bytes()
        with suppress(DecodeError):
            kept = kind.FromString(text)
            assert _allocated_bytes() - before_bytes <= times * len(text) + OWN_BYTES // ONE_IN, (
                number
            )
            del kept


def _num_calls(read: Callable[[bytes], object], text: bytes) -> int:
    """Calls of functions, Python's own too, while a text is read: some 0.1 us each.

    Nothing is remembered of texts that were read before.
    """
    for remembered in (read_labels, exposition._read_adapters):
        remembered._answers.clear()
        remembered.num_bytes = 0
    num = 0

    def count(_frame: object, event: str, _what: object) -> None:
        nonlocal num
        num += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        with suppress(ExtprocError, ValueError, DecodeError):
            read(text)
    finally:
        sys.setprofile(None)
    return num


def _record(text: bytes) -> None:
    CompletionService(lambda *_: True, wall_clock=lambda: 0.0).record(text)


def _hear(text: bytes) -> None:
    told = PeerMessage.FromString(text)
    update = decode_picks(told.sums)
    fill(Pool(), 1).peer_picks.hear("r", update.sums, now=0.0)
    decode_adapters(told.adapters)


MAX_CALLS = 3 * KIB * KIB
"""Of one pass."""


@pytest.mark.parametrize(
    ("name", "read"),
    [("ext_proc", Codec().decode), ("an access log", _record), ("a peer", _hear)],
)
def test_the_longest_pass_over_a_message_has_a_limit(
    name: str, read: Callable[[bytes], object]
) -> None:
    _, max_bytes, _, shapes = MESSAGES[name]

    assert (
        max(_num_calls(read, make(max_bytes // ONE_IN)) for make in shapes) <= MAX_CALLS // ONE_IN
    )


@pytest.mark.parametrize(
    "make",
    [
        _within(2, 1)(_EMPTY),
        lambda num: _field(4, _field(1, b"x")) + _within(8, 1)(_MAP)(num),
        lambda num: _field(3, b"") + _within(8, 1)(_MAP)(num),
    ],
)
def test_a_longer_message_of_ext_proc_is_refused_unless_it_is_a_body(make: Make) -> None:
    body = _field(4, _field(1, bytes(2 * MAX_BESIDE_BODY_BYTES)))
    with pytest.raises(ProtocolError, match="beside a body"):
        Codec().decode(make(2 * MAX_BESIDE_BODY_BYTES))
    Codec().decode(body)
    Codec().decode_any(body)


def test_a_longer_message_of_a_log_is_refused_and_entries_beyond_the_limit_are_not_read() -> None:
    read: list[Completion] = []
    garbage: list[int] = []
    service = CompletionService(
        lambda each, _: read.append(each),
        wall_clock=lambda: 0.0,
        on_garbage=lambda: garbage.append(1),
    )
    with pytest.raises(DecodeError):
        service.record(_within(2)(_EMPTY)(completions.MAX_MESSAGE_BYTES + 100))
    service.record(_field(2, _field(1, b"") * (completions.MAX_ENTRIES + 1)))
    service.record_relayed([b""] * (completions.MAX_ENTRIES + 1))

    assert len(read) == 2 * completions.MAX_ENTRIES
    assert garbage == [1]


# --- readers that take longer under a measure, or their text in pieces ---------------------------

YAML: Mapping[str, Make] = {
    "items": _around(b"[", _repeated(b"x,"), b"]"),
    "keys": _numbered(b"k", b": 1\n"),
    "lists": _around(b"[", _repeated(b"[],"), b"]"),
    "mappings": _around(b"[", _repeated(b"{a: 1},"), b"]"),
    "open": _repeated(b"["),
    "open in a list": _around(b"[", _repeated(b"[x,"), b""),
    "open mappings": _repeated(b"{a: "),
    "deep lists": _around(b"[", _repeated(b"[" * 100 + b"]" * 100 + b","), b"]"),
    "deep": _around(b"[" * 100, _repeated(b"x,"), b""),
    "items of items": _repeated(b"- "),
    "indented": lambda num: b"".join(b" " * n + b"a:\n" for n in range(int((2 * num) ** 0.5))),
    "aliases": _around(b"a: &a {b: 1}\nc: [", _repeated(b"*a,"), b"]"),
    "merged": _around(b"a: &a {b: 1}\nc:\n  <<: [", _repeated(b"*a,"), b"]"),
    "tags": _around(b"[", _repeated(b"!%41 ,"), b"]"),
    "directives": _numbered(b"%TAG !", b"! x\n"),
    "a word": _repeated(b"x"),
    "words": _repeated(b"x "),
    "lines": _repeated(b"\n"),
    "a literal": _around(b"|\n", _repeated(b" x\n"), b""),
    "quoted": _around(b'"', _repeated(b"\\x41"), b'"'),
    "quoted lines": _around(b'"', _repeated(b"\n"), b'"'),
    "numbers": _around(b"[", _repeated(b"1:" * 2000 + b"1,"), b"]"),
    "dates": _around(b"[", _repeated(b"2024-01-01,"), b"]"),
}
BOUNDARY = b"--b\r\n"
PART = BOUNDARY + b'Content-Disposition: form-data; name="'
FORMS: Mapping[str, Make] = {
    "parts": _repeated(PART + b'x"\r\n\r\n\r\n'),
    "models": _repeated(PART + b'model"\r\n\r\na\r\n'),
    "a model": _around(PART + b'model"\r\n\r\n', _repeated(b"x"), b""),
    "headers": _repeated(PART + b'x"' + b"\r\nX:" * 900 + b"\r\n\r\n\r\n"),
    "parameters": _repeated(
        PART + b'x"' + b"".join(b";%x=a" % n for n in range(500)) + b"\r\n\r\n\r\n"
    ),
    "blanks": _around(BOUNDARY + b"X:", lambda num: b" " * min(num, 4080), b"\x01\r\n\r\n"),
    "near boundaries": _around(PART + b'x"\r\n\r\n', _repeated(b"\r\n--"), b""),
    "after the end": _around(b"--b--", _repeated(b"\r\n--b"), b""),
}
HTTP = b"HTTP/1.1 200 OK\r\n"
CHUNKS = HTTP + b"transfer-encoding: chunked\r\n\r\n"
HEADS: Mapping[str, Make] = {
    "fields": _around(HTTP, _numbered(b"x", b": y\r\n"), b""),
    "a field's name": _around(HTTP, _repeated(b"x"), b""),
    "a field's value": _around(HTTP + b"x: ", _repeated(b"x"), b""),
    "a reason": _around(HTTP[:-2], _repeated(b"x"), b""),
    "folded": _around(HTTP + b"x: y", _repeated(b"\r\n y"), b""),
    "heads": _repeated(b"HTTP/1.1 100 Continue\r\n\r\n"),
    "empty lines": _repeated(b"\r\n"),
    "pieces": _around(CHUNKS, _repeated(b"1\r\nx\r\n"), b""),
    "extensions": _around(CHUNKS + b"1;", _repeated(b"x=y;"), b""),
    "extended pieces": _around(CHUNKS, _repeated(b"1;x=y\r\nx\r\n"), b""),
    "a trailer": _around(CHUNKS + b"0\r\n", _numbered(b"x", b": y\r\n"), b""),
    "bodies": _repeated(HTTP + b"content-length: 1\r\n\r\nx"),
    "a body": _around(HTTP + b"content-length: 9999999999999\r\n\r\n", _repeated(b"x"), b""),
}
REPLIES: Mapping[str, Make] = {
    "a text": lambda num: b"$%d\r\n" % num + b"x" * num,
    "an endless text": _around(b"$99999999999\r\n", _repeated(b"x"), b""),
    "an endless line": _around(b"+", _repeated(b"x"), b""),
    "an endless error": _around(b"-", _repeated(b"x"), b""),
    "a number": _around(b":", _repeated(b"9"), b"\r\n"),
    "a list of room": lambda _: b"*4000000000\r\n",
    "a list of lists": _around(b"*2000000000\r\n", _repeated(b"*0\r\n"), b""),
    "a list of numbers": _around(b"*2000000000\r\n", _repeated(b":1\r\n"), b""),
    "a list of texts": _around(b"*2000000000\r\n", _repeated(b"$0\r\n\r\n"), b""),
    "a list of errors": _around(b"*2000000000\r\n", _repeated(b"-ERR\r\n"), b""),
    "nested lists": _repeated(b"*1\r\n"),
    "replies": _repeated(b"+OK\r\n"),
    "less than nothing": _repeated(b"$-9\r\n"),
}


def _pointers(num_bytes: int) -> bytes:
    """Each record's name points to the last of many pointers."""
    pointers = b"".join(struct.pack("!H", 0xC000 | 25 + 2 * n) for n in range(3000))
    text = _record_of(1, b"\0" + pointers, b"\0")
    records = _repeated(_record_of(1, bytes(4), struct.pack("!H", 0xC000 | len(text) + 10)))
    filled = text + records(min(num_bytes, 65535) - len(text) - 12)
    return struct.pack("!6H", 1, 0x8180, 0, 3000, 0, 0) + filled


def _record_of(kind: int, data: bytes, owner: bytes = b"\xc0\x0c") -> bytes:
    return owner + struct.pack("!HHIH", kind, 1, 1, len(data)) + data


def _answer(item: Callable[[int], bytes], name: bytes = b"\x04pods\0") -> Make:
    """An answer about a name, with records as many as fit."""

    def make(num_bytes: int) -> bytes:
        question = name + struct.pack("!HH", 1, 1)
        room = min(num_bytes, 65535) - len(question) - 12
        records = [item(number) for number in range(room // len(item(0)))]
        head = struct.pack("!6H", 1, 0x8180, 1, len(records), 0, 0)
        return head + question + b"".join(records)

    return make


LONG_NAME = b"\x01a" * 126 + b"\0"


def _service(number: int) -> bytes:
    return _record_of(33, struct.pack("!HHHBH", 0, 0, 80, 2, number) + b"\xc0\x10")


ANSWERS: Mapping[str, Make] = {
    "addresses": _answer(lambda number: _record_of(1, struct.pack("!I", number))),
    "one address": _answer(lambda _: _record_of(1, bytes(4))),
    "IPv6": _answer(lambda number: _record_of(28, struct.pack("!QQ", 1, number))),
    "services": _answer(_service, b"\x01a" * 6 + b"\0"),
    "services of long names": _answer(_service, LONG_NAME),
    "addresses of a long name": _answer(
        lambda number: _record_of(1, struct.pack("!I", number)), LONG_NAME
    ),
    "names": _answer(
        lambda number: _record_of(1, bytes(4), b"\x02" + struct.pack("!H", number) + b"\xc0\x10"),
        LONG_NAME,
    ),
    "aliases": _answer(
        lambda number: _record_of(5, b"\x02" + struct.pack("!H", number) + b"\xc0\x10"), LONG_NAME
    ),
    "texts": _answer(lambda _: _record_of(16, b"\x01a")),
    "types": _answer(lambda number: _record_of(1000 + number, b"")),
    "mail": _answer(
        lambda number: _record_of(15, struct.pack("!H", number) + b"\xc0\x0c"), LONG_NAME
    ),
    "few services of a long name": lambda num: _answer(_service, LONG_NAME)(min(num, 600)),
    "some addresses of a long name": lambda num: _answer(
        lambda number: _record_of(1, struct.pack("!I", number)), LONG_NAME
    )(min(num, 4200)),
    "pointers": _pointers,
    "no bytes": lambda num: bytes(num),
}


def _read_form(text: bytes) -> None:
    reader, at = FormReader("multipart/form-data; boundary=b"), 0
    while at < len(text):
        at = reader.feed(text, at)


class _NoTransport(asyncio.Transport):
    """Sends nothing."""

    def write(self, data: object) -> None:
        pass

    def abort(self) -> None:
        pass


def _read_head(text: bytes) -> None:
    with closing(asyncio.new_event_loop()) as loop:
        connection = _Connection(loop, LongPages().lease())
        connection.connection_made(_NoTransport())
        answer = connection.ask(b"", KIB * KIB)
        for at in range(0, len(text), 64 * KIB):
            if not connection.is_asked:
                break
            connection.data_received(text[at : at + 64 * KIB])
        if answer.done():
            answer.exception()


def _read_reply(text: bytes) -> None:
    async def read() -> None:
        stream = asyncio.StreamReader()
        stream.feed_data(text)
        stream.feed_eof()
        parser = BoundedParser(65536)
        link = SimpleNamespace(_reader=stream, encoder=None)
        parser.on_connect(link)  # type: ignore[no-untyped-call]
        await parser.read_response(disable_decoding=True)

    with suppress(RedisError), closing(asyncio.new_event_loop()) as loop:
        loop.run_until_complete(read())


def _read_dns_answer(text: bytes) -> None:
    with suppress(DNSException, LongAnswerError):
        check_answer(text)
        dns.message.from_wire(text)


SLOW_READERS = {
    # Of 50,000 values, which 1 MiB can have, and 100 KiB too: 32 KiB have a third.
    "YAML": Reader(lambda text: load_yaml(text.decode()), 32 * KIB, YAML, 400, one_in=ONE_IN),
    "a form": Reader(_read_form, KIB * KIB, FORMS, 3, one_in=ONE_IN),
    "the head of a pod's response": Reader(_read_head, 512 * KIB, HEADS, 12),
    "a reply of Redis": Reader(_read_reply, KIB * KIB, REPLIES, 8),
    "a page of objects": Reader(
        lambda page: ObjectStore(rewrites_query(keeper=_NoneOf())).read_page(page, is_first=True),
        256 * KIB,
        JSON,
        12,
        ((b'{"metadata":{},"items":[{"metadata":{"name":"a"},"spec":', b"}]}"),),
    ),
    "a DNS answer": Reader(_read_dns_answer, 65535, ANSWERS, 40, one_in=ONE_IN),
}


@pytest.mark.few(30)
@pytest.mark.parametrize(
    ("name", "shape"),
    [(name, shape) for name, each in SLOW_READERS.items() for shape in each.shapes],
)
def test_a_reader_of_pieces_takes_no_more_memory_than_some_times_its_text(
    name: str, shape: str
) -> None:
    reader = SLOW_READERS[name]
    before, after = reader.around[-1]
    text = before + reader.shapes[shape](reader.longest_bytes - len(before + after)) + after

    assert _peak_bytes(reader.read, text) <= reader.may_take_bytes(text)


def _cases() -> Iterator[tuple[str, str]]:
    for name, reader in (READERS | SLOW_READERS).items():
        yield from ((name, shape) for shape in reader.shapes)


@pytest.mark.parametrize(("name", "shape"), [*_cases()])
def test_the_longest_pass_over_a_text_has_a_limit_and_is_linear_in_its_bytes(
    name: str, shape: str
) -> None:
    reader = (READERS | SLOW_READERS)[name]
    before, after = reader.around[-1]
    make = _around(before, reader.shapes[shape], after)
    num_bytes = reader.longest_bytes - len(before + after)
    half, whole = (_num_calls(reader.read, make(num)) for num in (num_bytes // 2, num_bytes))

    assert whole <= min(2.2 * half + 1000, MAX_CALLS // reader.one_in)


def _repeated_header(num_bytes: int) -> bytes:
    header = _field(1, _field(1, b"content-type") + _field(3, b"v" * 100))
    return _within(2, 1)(_repeated(header))(num_bytes)


@pytest.mark.parametrize(
    ("read", "make", "num_bytes"),
    [
        (Codec().decode, _repeated_header, 256 * KIB),
        (_read_form, FORMS["blanks"], KIB),
    ],
    ids=["headers of one name", "blanks in a form"],
)
def test_what_no_count_of_calls_shows_is_linear_too(
    read: Callable[[bytes], object], make: Make, num_bytes: int
) -> None:
    assert _cpu_s(read, make(4 * num_bytes)) <= 9 * _cpu_s(read, make(num_bytes)) + 0.001


def _cpu_s(read: Callable[[bytes], object], text: bytes) -> float:
    """CPU time of reading a text, the least of several."""
    times = []
    for _ in range(7):
        begin_s = time.process_time()
        with suppress(ExtprocError):
            read(text)
        times.append(time.process_time() - begin_s)
    return min(times)


class _NoneOf:
    """Keeps nothing of any object."""

    def one(self, found: object) -> None:
        return None

    def bound(self, objects: dict[tuple[str, str], object]) -> None:
        pass


def test_of_a_page_of_objects_of_which_nothing_is_kept_one_is_read_at_a_time() -> None:
    labels = ",".join(f'"k{number}":"v"' for number in range(2000))
    item = f'{{"metadata":{{"name":"a","labels":{{{labels}}}}}}}'
    page = f'{{"metadata":{{}},"items":[{",".join([item] * 40)}]}}'.encode()
    store = ObjectStore(rewrites_query(keeper=_NoneOf()))

    assert _peak_bytes(lambda body: store.read_page(body, is_first=True), page) < 2 * len(page)
    assert not store.objects
