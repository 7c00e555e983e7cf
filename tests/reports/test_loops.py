from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from random import Random

import pytest
from aiohttp.test_utils import unused_port
from hypothesis import given
from hypothesis import strategies as st
from yarl import URL

from extproc.reports.loops import EndpointLoops, LoopSettings, Visit, choose_backoff_s
from extproc.reports.podclient import PodClient
from extproc.reports.podhttp import ResponseError, base_url
from extproc.types import Endpoint
from tests.virtualtime import VirtualTimeLoop, in_virtual_time

A = Endpoint("10.0.0.1:8000")
B = Endpoint("10.0.0.2:8000")
HOUR_S = 3600.0


class Visits:
    """Counts what the loops do. A visit ends when `behave` does."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.made: dict[str, int] = {}
        self.failures: list[tuple[str, str]] = []
        self.unreachable: list[bool] = []
        self.changed = asyncio.Event()
        self.behave: dict[str, Callable[[], object]] = {}
        self.num_now = 0
        self.max_at_once = 0

    def begin(self, client: PodClient, endpoint: Endpoint) -> Visit:
        address = endpoint.address
        self.begun.append(base_url(endpoint))

        async def visit() -> float:
            self.num_now += 1
            self.max_at_once = max(self.max_at_once, self.num_now)
            self.made[address] = self.made.get(address, 0) + 1
            self.changed.set()
            try:
                result = self.behave.get(address, lambda: None)()
                if asyncio.iscoroutine(result):
                    result = await result
                return result if isinstance(result, float) else 0.0
            finally:
                self.num_now -= 1

        return visit

    def on_failure(self, address: str, error: str, is_unreachable: bool) -> None:
        self.failures.append((address, error))
        self.unreachable.append(is_unreachable)
        self.changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


@asynccontextmanager
async def running(
    visits: Visits, *, interval_s: float = 0.002, timeout_s: float = 5.0
) -> AsyncIterator[EndpointLoops]:
    loops = EndpointLoops(
        visits.begin,
        LoopSettings(interval_s, timeout_s, max_backoff_s=0.01),
        on_failure=visits.on_failure,
        rng=Random(1),
    )
    try:
        yield loops
    finally:
        await loops.aclose()


async def test_every_endpoint_is_visited_again_and_again() -> None:
    visits = Visits()
    async with running(visits) as loops:
        loops.set_endpoints([A, B])
        await visits.until(lambda: min(visits.made.get(e.address, 0) for e in (A, B)) >= 3)

    assert visits.failures == []


async def test_a_removed_endpoint_is_no_longer_visited() -> None:
    visits = Visits()
    async with running(visits) as loops:
        loops.set_endpoints([A, B])
        await visits.until(lambda: len(visits.made) == 2)
        loops.set_endpoints([B])
        made_by_a, made_by_b = visits.made[A.address], visits.made[B.address]
        await visits.until(lambda: visits.made[B.address] >= made_by_b + 3)

        assert visits.made[A.address] == made_by_a


async def test_an_endpoint_that_stays_keeps_its_loop_and_one_with_another_url_gets_a_new_one() -> (
    None
):
    visits = Visits()
    async with running(visits) as loops:
        loops.set_endpoints([A, B])
        loops.set_endpoints(
            [
                Endpoint(A.address, name="renamed", is_ready=False),
                Endpoint(B.address, url="https://10.0.0.2:8443/"),
            ]
        )
        await visits.until(lambda: len(visits.made) == 2)

    # B's first loop ended before it began.
    assert sorted(visits.begun) == ["http://10.0.0.1:8000", "https://10.0.0.2:8443"]


async def test_visits_of_one_endpoint_never_overlap() -> None:
    visits = Visits()
    visits.behave[A.address] = lambda: asyncio.sleep(0.01)
    async with running(visits) as loops:
        loops.set_endpoints([A])
        await visits.until(lambda: visits.made.get(A.address, 0) >= 4)
        loops.poke(A.address)
        await visits.until(lambda: visits.made[A.address] >= 6)

    assert visits.max_at_once == 1


async def test_a_hanging_endpoint_times_out_again_and_again_and_delays_no_other() -> None:
    visits = Visits()
    visits.behave[A.address] = lambda: asyncio.sleep(HOUR_S)
    async with running(visits, timeout_s=0.01) as loops:
        loops.set_endpoints([A, B])
        await visits.until(lambda: len(visits.failures) >= 2 and visits.made[B.address] >= 3)

    assert set(visits.failures) == {(A.address, "timed out")}


@in_virtual_time
async def test_each_visit_has_the_whole_time_and_no_more() -> None:
    """However the visits before it ended, and although one timer serves them all."""
    loop, visits = asyncio.get_running_loop(), Visits()
    lengths_s = iter([0.9, 0.3, 0.999, HOUR_S, 0.999, HOUR_S, 0.5])
    ended_s = list[tuple[float, bool]]()

    async def last() -> None:
        began_s, length_s = loop.time(), next(lengths_s, 0.1)
        try:
            await asyncio.sleep(length_s)
        finally:
            ended_s.append((round(loop.time() - began_s, 3), length_s == HOUR_S))

    visits.behave[A.address] = last
    async with running(visits, interval_s=0.05, timeout_s=1.0) as loops:
        loops.set_endpoints([A])
        await visits.until(lambda: len(ended_s) >= 7)

    assert ended_s[:7] == [
        *[(0.9, False), (0.3, False), (0.999, False), (1.0, True), (0.999, False), (1.0, True)],
        (0.5, False),
    ]
    assert visits.failures == [(A.address, "timed out")] * 2


async def test_a_loop_that_is_ended_during_a_visit_ends_at_once_and_says_nothing() -> None:
    visits = Visits()
    visits.behave[A.address] = lambda: asyncio.sleep(HOUR_S)
    async with running(visits) as loops:
        loops.set_endpoints([A])
        await visits.until(lambda: visits.num_now == 1)

    assert (visits.num_now, visits.failures) == (0, [])


@pytest.mark.parametrize("error", [ResponseError("HTTP 503"), OSError("HTTP 503")])
async def test_a_failed_visit_is_reported_and_repeated(error: Exception) -> None:
    def fail() -> None:
        raise error

    visits = Visits()
    visits.behave[A.address] = fail
    async with running(visits) as loops:
        loops.set_endpoints([A])
        await visits.until(lambda: len(visits.failures) >= 3)

    assert set(visits.failures) == {(A.address, "HTTP 503")}


async def test_a_bug_in_a_visit_is_logged_and_reported_and_ends_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def break_down() -> None:
        raise KeyError("bug")

    visits = Visits()
    visits.behave[A.address] = break_down
    async with running(visits) as loops:
        loops.set_endpoints([A, B])
        await visits.until(lambda: len(visits.failures) >= 2 and visits.made[B.address] >= 3)

    assert visits.failures[0] == (A.address, "KeyError('bug')")
    assert (caplog.records[0].levelno, caplog.records[0].exc_info is None) == (logging.ERROR, False)


async def test_a_callback_that_breaks_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Deaf(Visits):
        def on_failure(self, address: str, error: str, is_unreachable: bool) -> None:
            raise RuntimeError("cannot listen")

    def fail() -> None:
        raise ResponseError("HTTP 503")

    visits = Deaf()
    visits.behave[A.address] = fail
    async with running(visits) as loops:
        loops.set_endpoints([A])
        await visits.until(lambda: visits.made.get(A.address, 0) >= 3)

    assert "could not be recorded" in caplog.text


async def test_a_poke_brings_one_visit_forward_and_a_burst_of_them_no_more_than_one() -> None:
    visits = Visits()
    async with running(visits, interval_s=HOUR_S) as loops:
        loops.set_endpoints([A])
        await visits.until(lambda: visits.made.get(A.address, 0) == 1)
        for _ in range(100):
            loops.poke(A.address)
            loops.poke("10.9.9.9:1")  # not ours: ignored
            await asyncio.sleep(0)
        await visits.until(lambda: visits.made[A.address] == 2)
        await asyncio.sleep(0.15)

        assert visits.made == {A.address: 2}


@in_virtual_time
async def test_limited_pokes_cause_one_visit_now_and_one_after_the_interval() -> None:
    visits = Visits()
    loop = asyncio.get_running_loop()
    async with running(visits, interval_s=HOUR_S) as loops:
        loops.set_endpoints([A])
        await visits.until(lambda: visits.made.get(A.address, 0) == 1)
        began_s = loop.time()
        seen = []
        while visits.made[A.address] < 4:
            loops.poke(A.address, min_interval_s=0.3)
            loops.poke("10.9.9.9:1", min_interval_s=0.3)
            seen.append((visits.made[A.address], loop.time() - began_s))
            await asyncio.sleep(0.001)

    # However many pokes there were: the second visit that they cause is after the interval.
    assert min(at_s for num_made, at_s in seen if num_made == 3) == pytest.approx(0.3, abs=0.002)


@in_virtual_time
async def test_a_visit_can_wait_for_longer_and_a_poke_ends_that() -> None:
    class Patient(EndpointLoops):
        num_waits = 0

        def wait_s(self, address: str) -> float | None:
            assert address == A.address
            self.num_waits += 1
            return 0.5 if self.num_waits % 4 else None

    visits, begun_s, loop = Visits(), list[float](), asyncio.get_running_loop()
    visits.behave[A.address] = lambda: begun_s.append(loop.time())
    loops = Patient(
        visits.begin, LoopSettings(0.5, 5.0, 1.0), on_failure=visits.on_failure, rng=Random(1)
    )
    loops.set_endpoints([A])
    await visits.until(lambda: len(begun_s) == 4)
    await asyncio.sleep(1.2)
    loops.poke(A.address)
    await visits.until(lambda: len(begun_s) == 5)
    await loops.aclose()

    rests_s = [after - before for before, after in pairwise(begun_s)]
    assert rests_s[1:] == pytest.approx([2.0, 2.0, 1.2])


@in_virtual_time
async def test_while_the_loop_is_late_a_visit_is_given_up_later() -> None:
    """All that a visit waits for is there as soon as the loop looks."""
    visits, loop = Visits(), asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)

    async def answers() -> None:
        for _ in range(5):  # turns, each of which takes four times as long as a visit may
            loop.pass_time(4.0)
            await asyncio.sleep(0.01)

    visits.behave = {A.address: answers, B.address: lambda: asyncio.sleep(HOUR_S)}
    async with running(visits, timeout_s=1.0, interval_s=HOUR_S) as loops:
        loops.set_endpoints([A])
        await asyncio.sleep(60.0)
        assert (visits.made, visits.failures) == ({A.address: 1}, [])
        loops.set_endpoints([B])
        await asyncio.sleep(1.5)

    assert visits.failures == [(B.address, "timed out")]


@in_virtual_time
async def test_of_many_new_endpoints_few_are_visited_in_one_turn_of_the_loop() -> None:
    """All get there: those that leave before their turn keep nobody from theirs."""
    visits, many = Visits(), [Endpoint(f"10.0.1.{number}:8000") for number in range(100)]
    most = num_before = 0
    async with running(visits, interval_s=HOUR_S) as loops:
        loops.set_endpoints(many)
        for turn in range(40):
            if turn == 2:
                loops.set_endpoints(many[50:])
            await asyncio.sleep(0)
            most, num_before = max(most, len(visits.made) - num_before), len(visits.made)

    assert visits.made.keys() >= {each.address for each in many[50:]}
    assert len(visits.made) < len(many)
    assert most <= 8


async def test_a_refused_connection_is_unreachable_and_a_timeout_is_not() -> None:
    visits = Visits()
    client, nowhere = PodClient(), URL(f"http://127.0.0.1:{unused_port()}/")

    async def dial() -> None:
        await client.get(nowhere, max_bytes=1)

    visits.behave[A.address] = dial
    visits.behave[B.address] = lambda: asyncio.sleep(HOUR_S)
    async with running(visits, timeout_s=0.2) as loops:
        for endpoint, expected in ((A, True), (B, False)):
            visits.unreachable.clear()
            loops.set_endpoints([endpoint])
            await visits.until(lambda: bool(visits.unreachable))
            assert visits.unreachable[0] is expected


async def test_a_poke_during_a_visit_is_not_lost() -> None:
    """The answer under way may be older than what the poke is about."""
    visits = Visits()
    async with running(visits, interval_s=HOUR_S) as loops:
        visits.behave[A.address] = lambda: loops.poke(A.address)
        loops.set_endpoints([A])
        await visits.until(lambda: visits.made.get(A.address, 0) == 2)


async def test_a_malformed_url_is_reported_once() -> None:
    def begin(client: PodClient, endpoint: Endpoint) -> Visit:
        URL(base_url(endpoint))
        raise AssertionError("this URL should not parse")

    visits = Visits()
    visits.begin = begin  # type: ignore[method-assign]
    async with running(visits) as loops:
        loops.set_endpoints([Endpoint("x", url="http://[::1")])
        await visits.until(lambda: len(visits.failures) == 1)


# --- how long to rest ---------------------------------------------------------------------------


@given(st.integers(0, 2**40))
def test_a_rest_after_failures_doubles_up_to_the_limit(seed: int) -> None:
    for num_failures in (1, 2, 4, 10, 10_000):
        rest_s = choose_backoff_s(
            num_failures, interval_s=0.05, max_backoff_s=1.0, rng=Random(seed)
        )
        whole_s = min(0.05 * 2.0 ** min(num_failures, 9), 1.0)
        assert whole_s / 2 <= rest_s <= whole_s


@in_virtual_time
async def test_an_interval_that_shrinks_shortens_the_rest_that_has_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While many pods join, it is a hundred times as long as when all of them are calm."""
    visits, interval_s = Visits(), [HOUR_S]
    loop = asyncio.get_running_loop()
    async with running(visits) as loops:
        monkeypatch.setattr(loops, "interval_s", lambda: interval_s[0])
        loops.set_endpoints([A])
        await visits.until(lambda: visits.made.get(A.address, 0) == 2)
        began_s, interval_s[0] = loop.time(), 5.0
        await visits.until(lambda: visits.made[A.address] == 3)

    assert 4.9 < loop.time() - began_s < 5.1


@in_virtual_time
async def test_a_failure_is_followed_by_a_visit_within_the_limit_however_long_the_interval() -> (
    None
):
    """It is that of all pods, and many of them may wait longer for the budget."""
    loop, visits, made_s = asyncio.get_running_loop(), Visits(), list[float]()

    def fail() -> None:
        made_s.append(loop.time())
        raise ResponseError("no")

    visits.behave[A.address] = fail
    async with running(visits, interval_s=HOUR_S) as loops:
        loops.set_endpoints([A])
        loops.poke(A.address)
        await visits.until(lambda: len(made_s) == 4)

    # The first rest is the random phase.
    assert all(later - before < 1.0 for before, later in pairwise(made_s[1:]))


async def test_a_visit_may_ask_for_a_longer_rest() -> None:
    visits = Visits()
    visits.behave[A.address] = lambda: HOUR_S
    async with running(visits) as loops:
        loops.set_endpoints([A, B])
        await visits.until(lambda: visits.made.get(B.address, 0) >= 20)

    # The first visit sets the phase, from the second on its wish counts.
    assert visits.made[A.address] == 2
