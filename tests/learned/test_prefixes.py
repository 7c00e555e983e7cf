"""Beginnings of prompts in KV caches: what is believed, for how long, and how much of it."""

from __future__ import annotations

import gc
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from extproc.costs import BYTES_PER_TOKEN
from extproc.learned.prefixes import (
    DEFAULT_KV_CACHE_TOKENS,
    KEPT_RATIO,
    MARKS_BYTES,
    KvCache,
    PrefixIndex,
    prefix_hashes,
)
from extproc.types import RequestInfo
from tests.builders import address, request

KEPT_BYTES = int(KEPT_RATIO * BYTES_PER_TOKEN * DEFAULT_KV_CACHE_TOKENS)


def asked(prompt: bytes = b"", model: str = "a") -> RequestInfo:
    """A request with this prompt, and a little around it."""
    hashes = prefix_hashes(model, prompt)
    size = len(prompt) + 50
    return request(model, body_bytes=size, prefix_hashes=hashes)


def sent(prefix_index: PrefixIndex, cache: KvCache, info: RequestInfo) -> None:
    cache.computed_bytes += info.body_bytes
    prefix_index.add(info, cache)


# --- hashes ----------------------------------------------------------------------------------


def test_a_mark_is_never_more_than_a_quarter_further_than_the_last() -> None:
    assert MARKS_BYTES[0] == 1024
    assert MARKS_BYTES[-1] == 224 * 1024
    pairs = pairwise(MARKS_BYTES[3:])
    assert all(mark < after <= 1.25 * mark for mark, after in pairs)


@given(st.integers(0, 9000), st.integers(0, 3000), st.integers(0, 3000))
def test_prompts_share_the_hashes_of_what_they_have_in_common(
    common: int, more: int, other: int
) -> None:
    one = prefix_hashes("a", b"x" * common + b"y" * more)
    two = prefix_hashes("a", b"x" * common + b"z" * other)

    num_shared = sum(mark <= common for mark in MARKS_BYTES)
    assert one[:num_shared] == two[:num_shared]
    assert not set(one[num_shared:]) & set(two[num_shared:])
    assert len(one) == sum(mark <= common + more for mark in MARKS_BYTES)


def test_another_models_prompt_has_other_hashes() -> None:
    assert not set(prefix_hashes("a", b"x" * 4096)) & set(prefix_hashes("b", b"x" * 4096))


def test_a_prompt_beyond_the_last_mark_has_no_more_hashes() -> None:
    assert len(prefix_hashes("a", b"x" * 300 * 1024)) == len(MARKS_BYTES) == 27


def test_any_name_has_hashes() -> None:
    assert prefix_hashes("\ud800", b"x" * 1024)


# --- where a beginning is --------------------------------------------------------------------


def test_each_endpoint_has_as_much_as_the_prompts_that_it_was_sent_had_in_common() -> None:
    prefix_index, first, second = PrefixIndex(), KvCache(address(1)), KvCache(address(2))
    sent(prefix_index, first, asked(b"x" * 3000 + b"y" * 9000))
    sent(prefix_index, second, asked(b"x" * 9000))

    found = prefix_index.find(asked(b"x" * 20_000))

    assert found == {address(1): 2048, address(2): 8192}
    assert prefix_index.find(asked(b"x" * 20_000, model="b")) == {}
    assert prefix_index.find(asked(b"z" * 20_000)) == {}
    assert prefix_index.find(asked(b"x" * 1000)) == {}


def test_a_session_is_no_beginning() -> None:
    """Nobody knows how much of a prompt it has in common with the last."""
    prefix_index, cache = PrefixIndex(), KvCache(address(1))
    info = request(body_bytes=10_000_000, session="s")
    sent(prefix_index, cache, info)

    assert prefix_index.find(info) == {}


def test_a_beginning_is_gone_once_half_a_cache_has_been_computed_since() -> None:
    prefix_index, cache, info = PrefixIndex(), KvCache(address(1)), asked(b"x" * 3000)
    sent(prefix_index, cache, info)

    cache.computed_bytes += KEPT_BYTES - 1
    assert prefix_index.find(info) == {address(1): 2048}
    cache.computed_bytes += 1
    assert prefix_index.find(info) == {}
    sent(prefix_index, cache, info)
    assert prefix_index.find(info) == {address(1): 2048}


def test_a_small_cache_keeps_little() -> None:
    prefix_index, cache, info = PrefixIndex(), KvCache(address(1)), asked(b"x" * 3000)
    sent(prefix_index, cache, info)
    cache.resize(1000)
    cache.computed_bytes += 2000

    assert prefix_index.find(info) == {}


def test_an_engine_that_keeps_no_beginnings_has_none() -> None:
    prefix_index, cache, info = PrefixIndex(), KvCache(address(1)), asked(b"x" * 3000)
    cache.resize(0)
    sent(prefix_index, cache, info)

    assert prefix_index.find(info) == {}


def test_a_cache_that_is_lost_has_nothing_and_its_follower_begins_empty() -> None:
    prefix_index, cache, info = PrefixIndex(), KvCache(address(1)), asked(b"x" * 3000)
    sent(prefix_index, cache, info)
    cache.lose()
    assert prefix_index.find(info) == {}

    sent(prefix_index, KvCache(address(1)), asked(b"x" * 1500))
    assert prefix_index.find(info) == {address(1): 1024}


class WatchedCache(KvCache):
    """Counts how often it is asked what it keeps."""

    num_looks: int = 0

    def __getattribute__(self, name: str) -> object:
        if name == "kept_bytes":
            self.num_looks += 1
        return super().__getattribute__(name)


def test_an_endpoint_that_has_a_longer_beginning_is_not_asked_for_shorter_ones() -> None:
    """A held request is looked up at each look, on a hundred endpoints."""
    prefix_index = PrefixIndex()
    caches = [WatchedCache(address(number)) for number in range(1, 28)]
    for cache, mark in zip(caches, MARKS_BYTES, strict=True):
        sent(prefix_index, cache, asked(b"x" * mark))

    found = prefix_index.find(asked(b"x" * MARKS_BYTES[-1]))

    assert list(found) == [cache.address for cache in reversed(caches)]
    assert [cache.num_looks for cache in caches] == [1] * len(caches)


# --- memory ----------------------------------------------------------------------------------


def places_in(prefix_index: PrefixIndex) -> int:
    values = prefix_index._places.values()
    return sum(len(places) if isinstance(places, dict) else 1 for places in values)


def test_the_garbage_collector_does_not_visit_what_is_remembered_of_one_endpoint() -> None:
    """It would take 7 ms more for a full memory. Before Python 3.14 it visits a tuple once."""
    prefix_index, cache = PrefixIndex(), KvCache(address(1))
    sent(prefix_index, cache, asked(b"x" * 2500))
    sent(prefix_index, cache, asked(b"x" * 2500 + b"y" * 2500))
    gc.collect()

    assert not any(map(gc.is_tracked, prefix_index._places.values()))


def test_what_was_used_last_is_remembered_longest() -> None:
    prefix_index, cache = PrefixIndex(max_places=8), KvCache(address(1))
    used = asked(b"x" * 1500)
    sent(prefix_index, cache, used)
    for number in range(20):
        sent(prefix_index, cache, asked(bytes([number]) * 1500))
        sent(prefix_index, cache, used)

    assert prefix_index.find(used) == {address(1): 1024}
    assert prefix_index.find(asked(bytes([1]) * 1500)) == {}
    assert prefix_index.find(asked(bytes([19]) * 1500)) == {address(1): 1024}


def test_a_full_memory_forgets_as_much_as_comes_in() -> None:
    """Half of it at once would hold up all requests for 16 ms."""
    prefix_index, cache = PrefixIndex(max_places=40), KvCache(address(1))
    for number in range(100):
        sent(prefix_index, cache, asked(bytes([number]) * 2500))

    assert prefix_index.num_places == 40


def test_of_a_long_prompt_the_longest_beginning_is_forgotten_first() -> None:
    prefix_index, cache, long = PrefixIndex(max_places=8), KvCache(address(1)), asked(b"x" * 9000)
    sent(prefix_index, cache, long)
    marks = []
    for number in range(8):
        marks.append(prefix_index.find(long).get(address(1), 0))
        sent(prefix_index, cache, asked(bytes([number]) * 1500))

    assert marks == [1024 * num_kib for num_kib in range(8, 0, -1)]
    assert prefix_index.find(long) == {}


def test_what_is_found_to_be_gone_takes_no_memory() -> None:
    prefix_index, cache = PrefixIndex(), KvCache(address(1))
    for number in range(10):
        sent(prefix_index, cache, asked(bytes([number]) * 3000))
    cache.computed_bytes += KEPT_BYTES
    for number in range(10):
        assert prefix_index.find(asked(bytes([number]) * 3000)) == {}

    assert prefix_index.num_places == len(prefix_index._places) == 0


steps = st.tuples(
    st.integers(0, 4),
    st.sampled_from((b"x", b"y", b"z")),
    st.integers(0, 9000),
    st.sampled_from((0, KEPT_BYTES + 1)),
)


@given(st.lists(steps, max_size=40), st.integers(0, 20))
def test_memory_is_bounded_and_no_prompt_is_cached_beyond_its_length(
    sends: list[tuple[int, bytes, int, int]], most: int
) -> None:
    prefix_index = PrefixIndex(max_places=most)
    caches = [KvCache(address(number + 1)) for number in range(5)]
    for number, letter, size, passed in sends:
        info = asked(letter * size)
        found = prefix_index.find(info)
        assert all(0 < num_bytes <= info.body_bytes for num_bytes in found.values())
        sent(prefix_index, caches[number], info)
        caches[number].computed_bytes += passed
        assert places_in(prefix_index) == prefix_index.num_places <= most


@given(st.lists(steps, max_size=20))
def test_whoever_was_sent_a_prompt_last_has_its_beginning(
    sends: list[tuple[int, bytes, int, int]],
) -> None:
    """Up to the last mark, unless much has been computed since."""
    prefix_index = PrefixIndex()
    caches = [KvCache(address(number + 1)) for number in range(5)]
    for number, letter, size, _ in sends:
        info = asked(letter * size)
        sent(prefix_index, caches[number], info)
        marks = [mark for mark in MARKS_BYTES if mark <= size]
        assert prefix_index.find(info).get(address(number + 1), 0) == max(marks, default=0)
