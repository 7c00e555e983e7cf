"""Caches that are not as configured: told once."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from extproc.learned.cachesize import OBSERVATIONS_PER_LOOK
from extproc.pods.cpucaches import CacheWatch
from extproc.pods.pool import Pool, PoolSettings
from extproc.pods.serverflags import ServerFlags
from tests.builders import address, endpoint, report


def taught(configured: int | None, size: int) -> Pool:
    """A pool of pods with 2 slots that has seen caches of this size."""
    pool = Pool(PoolSettings(max_cpu_loras=configured))
    pool.set_endpoints([endpoint(1)])
    pool.record_report(address(1), report(max_loras=2), taken_at_s=0.0)
    teach(pool, size)
    return pool


def teach(pool: Pool, size: int, *, group: str = "") -> None:
    for number in range(2 * OBSERVATIONS_PER_LOOK):
        place = number % (2 * size)
        ttft_s = 0.02 if place < size else 0.2
        pool.caches.groups[group].record_first_token(place, ttft_s)


@pytest.mark.parametrize(("configured", "presumed"), [(16, 16), (None, 2)])
def test_a_disagreement_is_a_warning_once(configured: int | None, presumed: int) -> None:
    watch = CacheWatch(taught(configured, 4).caches)
    said = list[str]()
    for _ in range(3):
        said += watch.take_news()

    (warning,) = said
    assert f"about 4 adapters in their CPU caches, but the configuration says {presumed}" in warning
    assert watch.sizes() == {("", "configured"): presumed, ("", "learned"): 4}


def test_another_configuration_that_is_wrong_too_is_a_warning_of_its_own() -> None:
    pool = taught(16, 4)
    watch = CacheWatch(pool.caches)
    said = list[str]()
    said += watch.take_news()
    pool.configure(PoolSettings(max_cpu_loras=32))
    said += watch.take_news()

    assert len(said) == 2


@pytest.mark.parametrize(("size", "num_warnings"), [(2, 0), (4, 1)])
def test_pods_that_are_replaced_are_no_reason_to_warn(size: int, num_warnings: int) -> None:
    pool = taught(None, size)
    watch = CacheWatch(pool.caches)
    said = list[str]()
    said += watch.take_news()
    for number in range(2, 6):
        pool.set_endpoints([])
        said += watch.take_news()
        pool.set_endpoints([endpoint(number)])
        said += watch.take_news()
        pool.record_report(address(number), report(max_loras=2), taken_at_s=1.0)
        said += watch.take_news()

    assert len(said) == num_warnings


def test_pods_that_change_back_and_forth_are_one_warning_a_size() -> None:
    pool = taught(None, 8)
    watch = CacheWatch(pool.caches)
    said = list[str]()
    for number in range(2, 8):
        pool.set_endpoints([endpoint(number)])
        slots = report(max_loras=2 + number % 2)
        pool.record_report(address(number), slots, taken_at_s=1.0)
        said += watch.take_news()

    assert len(said) == 2


def test_agreement_is_no_warning() -> None:
    assert list(CacheWatch(taught(4, 4).caches).take_news()) == []


def test_nothing_is_said_while_nothing_is_known() -> None:
    watch = CacheWatch(Pool().caches)
    said = list[str]()
    said += watch.take_news()

    assert said == []
    assert watch.sizes() == {("", "configured"): 1}


def test_an_engine_s_own_statement_counts_more() -> None:
    pool = taught(4, 4)
    states = report(max_loras=2, cpu_adapters=frozenset("abcdef"))
    pool.record_report(address(1), states, taken_at_s=1.0)
    watch = CacheWatch(pool.caches)
    said = list[str]()
    said += watch.take_news()

    assert "about 6 adapters" in str(said)
    assert watch.sizes()["", "learned"] == 6


def test_the_warning_about_a_group_names_its_field() -> None:
    pool = Pool(PoolSettings(groups={"l4": ServerFlags(max_cpu_loras=16)}))
    pool.set_endpoints([replace(endpoint(1), group="l4")])
    pool.record_report(address(1), report(max_loras=2), taken_at_s=0.0)
    teach(pool, 4, group="l4")
    watch = CacheWatch(pool.caches)
    said = list[str]()
    for _ in range(3):
        said += watch.take_news()

    (warning,) = said
    assert "the configuration says 16 (pods.groups.l4.max_cpu_loras, else" in warning
    assert watch.sizes() == {
        ("", "configured"): 1,
        ("l4", "configured"): 16,
        ("l4", "learned"): 4,
    }
