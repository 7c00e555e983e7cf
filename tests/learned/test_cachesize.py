"""The size of the CPU caches, learned from first tokens and from statements."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.learned.cachesize import MAX_OBSERVATIONS, OBSERVATIONS_PER_LOOK, CacheSize, find_size

LOAD_S = 0.1
"""From disk, beyond a copy from the CPU cache."""


def observations(
    size: int,
    *,
    seed: int = 1,
    num: int = 600,
    num_places: int = 64,
    load_s: float = LOAD_S,
    noise_s: float = 0.03,
    odd: float = 0.0,
) -> list[tuple[int, float]]:
    """What requests find in caches of `size`; `odd` are off by up to two places."""
    rng = random.Random(seed)
    found = []
    for _ in range(num):
        place = rng.randrange(num_places)
        real = place + rng.randint(-2, 2) if rng.random() < odd else place
        wait_s = 0.02 + rng.expovariate(1 / noise_s)
        found.append((place, wait_s + (load_s if real >= size else 0.0)))
    return found


# --- steps ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [4, 8, 16, 32, 48])
def test_a_clear_step_is_found(size: int) -> None:
    found = find_size(observations(size))

    assert found is not None
    assert found.high - found.low <= 6


@given(
    size=st.integers(4, 56), seed=st.integers(0, 1000), odd=st.sampled_from((0.0, 0.02, 0.05, 0.3))
)
def test_the_sizes_that_explain_a_step_include_the_real_one(
    size: int, seed: int, odd: float
) -> None:
    """Even if places are off now and then; if they are so often, nothing is concluded."""
    found = find_size(observations(size, seed=seed, odd=odd))

    assert found is None or found.low <= size <= found.high


def test_fewer_observations_allow_more_sizes() -> None:
    few, many = (find_size(observations(16, num=num)) for num in (100, 1000))

    assert few is not None
    assert many is not None
    assert few.low <= many.low <= 16 <= many.high <= few.high


@given(seed=st.integers(0, 1000), noise_s=st.sampled_from((0.001, 0.03, 0.3)))
def test_nothing_is_concluded_where_all_places_are_alike(seed: int, noise_s: float) -> None:
    for size in (0, 64):
        assert find_size(observations(size, seed=seed, noise_s=noise_s)) is None


@given(seed=st.integers(0, 1000))
def test_first_tokens_that_come_later_by_and_by_are_no_step(seed: int) -> None:
    """As where rare adapters have longer prompts."""
    rng = random.Random(seed)
    places = [rng.randrange(64) for _ in range(800)]
    found = [(place, 0.02 + place * 0.003 + rng.expovariate(30)) for place in places]

    assert find_size(found) is None


def test_a_copy_from_the_cpu_cache_is_no_step() -> None:
    assert find_size(observations(8, load_s=0.02, noise_s=0.002)) is None


def test_a_load_that_is_not_much_longer_than_a_first_token_is_no_step() -> None:
    found = [(place, seconds + 0.3) for place, seconds in observations(8, noise_s=0.01)]

    assert find_size(found) is None


def test_pods_too_busy_to_answer_anything_fast_tell_nothing() -> None:
    assert find_size(observations(16, noise_s=2.0)) is None


def test_a_place_between_fast_and_slow_is_no_step() -> None:
    """Half of the pods have 8 places, half 40: neither is the size of all."""
    found = [*observations(8, seed=1, num=300), *observations(40, seed=2, num=300)]
    size = find_size(found)

    assert size is None or size.low >= 32


def test_steps_need_observations_on_both_sides() -> None:
    found = observations(16)
    few = sorted(each for each in found if each[0] >= 16)[:10]

    assert find_size([]) is None
    assert find_size([each for each in found if each[0] < 16] + few) is None


def test_the_step_of_disks_wins_over_that_of_slots() -> None:
    """Copies to the GPU of a large model's adapters are slow too."""
    found = [
        (place, seconds + (0.1 if place >= 8 else 0.0) + (0.5 if place >= 32 else 0.0))
        for place, seconds in observations(64, noise_s=0.005)
    ]
    size = find_size(found)

    assert size is not None
    assert size.low <= 32 <= size.high


# --- what is learned --------------------------------------------------------------------------


def taught(size: int, num: int = 640) -> CacheSize:
    cache = CacheSize()
    for place, ttft_s in observations(size, num=num):
        cache.record_first_token(place, ttft_s)
    return cache


@pytest.mark.parametrize(("size", "presumed"), [(4, 16), (32, 8)])
def test_a_wrong_configuration_is_corrected(size: int, presumed: int) -> None:
    learned = taught(size).learned(presumed)

    assert learned is not None
    assert abs(learned - size) <= 2


@given(size=st.integers(4, 56))
def test_a_right_configuration_is_never_changed(size: int) -> None:
    cache = CacheSize()
    for place, ttft_s in observations(size, seed=size):
        cache.record_first_token(place, ttft_s)
        assert cache.learned(size) in (None, size)


def test_nothing_is_known_before_the_first_look() -> None:
    assert CacheSize().learned(8) is None
    assert taught(4, num=OBSERVATIONS_PER_LOOK - 1).learned(8) is None


def test_pods_restarted_with_another_size_are_understood() -> None:
    cache = taught(4)
    for place, ttft_s in observations(32, num=2 * MAX_OBSERVATIONS):
        cache.record_first_token(place, ttft_s)
    learned = cache.learned(4)

    assert learned is not None
    assert abs(learned - 32) <= 2


def test_only_news_is_reported() -> None:
    cache = CacheSize()
    news = [cache.record_first_token(*each) for each in observations(8, num=320)]

    assert any(news)
    assert not any(taught(64, num=0).record_first_token(1, 0.1) for _ in range(100))


# --- statements -------------------------------------------------------------------------------


def test_a_cache_that_evicts_is_full() -> None:
    cache = CacheSize()
    cache.record_statement(frozenset("abc"), frozenset("bcd"))

    assert cache.stated(16) == 3
    assert cache.stated(2) == 3


def test_a_cache_is_at_least_as_large_as_what_it_holds() -> None:
    cache = CacheSize()
    assert cache.stated(2) is None
    cache.record_statement(frozenset(), frozenset("abc"))

    assert cache.stated(2) == 3
    assert cache.stated(16) == 16


def test_a_cache_that_only_shrinks_was_emptied() -> None:
    cache = CacheSize()
    cache.record_statement(frozenset("abc"), frozenset("abc"))
    cache.record_statement(frozenset("abc"), frozenset("a"))

    assert cache.stated(16) == 16
