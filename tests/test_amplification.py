"""What readers of texts from outside take of memory: some times the text, whatever is in it.

The texts are those of which each byte makes as much as it can: one label of names without number,
series, keys, items and parts of a few bytes, deep nesting, long names.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.adapters.adapterfiles import AdapterConfig
from extproc.adapters.effect import read_answer
from extproc.adapters.engineapi import _decode as decode_reply
from extproc.adapters.registrationhttp import MAX_LIST, MAX_LIST_BYTES
from extproc.adapters.stores.content import MAX_CONTENT_BYTES, decode, decode_all
from extproc.discovery.kubernetes.objects import rewrites_query
from extproc.discovery.kubernetes.store import Store
from extproc.errors import ExtprocError
from extproc.fleet.engines import PROFILES
from extproc.fleet.exposition import parse_report
from extproc.fleet.models import decode_models
from extproc.fleet.orca import parse_orca
from extproc.fleet.pagereader import PageReader
from extproc.fleet.podasks import _read_version

KIB = 1024
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
    """

    read: Callable[[bytes], object]
    max_bytes: int
    shapes: Mapping[str, Make]
    times: float
    around: tuple[tuple[bytes, bytes], ...] = ((b"", b""),)


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
        lambda body: decode_all(body, MAX_LIST), MAX_LIST_BYTES, JSON, 36, ((b"", b""),)
    ),
    "an adapter's file": Reader(
        msgspec.json.Decoder(AdapterConfig).decode,
        256 * KIB,
        JSON,
        8,
        ((b"", b""), (b'{"target_modules":', b"}"), (b'{"rank_pattern":', b"}")),
    ),
}


def _peak_bytes(read: Callable[[bytes], object], text: bytes) -> int:
    tracemalloc.start()
    try:
        with suppress(ExtprocError, ValueError, RecursionError):
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

    assert _peak_bytes(reader.read, text) <= reader.times * len(text) + OWN_BYTES


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
    store = Store(rewrites_query(keeper=_NoneOf()))

    assert _peak_bytes(lambda body: store.read_page(body, is_first=True), page) < 2 * len(page)
    assert not store.objects
