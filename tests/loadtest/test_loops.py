"""Open loop: when it is due, whatever became of others. Closed loop: one after the other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random

import gevent
from aiohttp import web
from gevent.pool import Group

from extproc.loadtest.locust.closedloop import ClosedLoop
from extproc.loadtest.locust.http import Server
from extproc.loadtest.locust.openloop import OpenLoop
from extproc.loadtest.locust.sending import STOPPED, Sender
from extproc.sim.engine.profiles import INSTANT
from extproc.sim.fakepod.pod import PodConfig
from extproc.workload.exchange import RequestForm, RequestRecord
from extproc.workload.requests import Arrival
from tests.loadtest.threads import handled, pod, served

PATIENCE_S = 60.0


@contextmanager
def sender(url: str, *, in_s: float = 0.0) -> Iterator[Sender]:
    made = Sender(
        Server.of(url),
        RequestForm(),
        timeout_s=PATIENCE_S,
        patience_s=None,
        started_s=time.monotonic() + in_s,
        clock=time.monotonic,
    )
    yield made
    made.close()


def arrivals(num: int, gap_s: float = 0.0) -> list[tuple[int, Arrival]]:
    return [(index, Arrival(index * gap_s, "a", 10, 3)) for index in range(num)]


def wait_for(loop: OpenLoop | ClosedLoop) -> None:
    with gevent.Timeout(PATIENCE_S):
        while not loop.is_over:
            gevent.sleep(0.01)


async def never(_: web.Request) -> web.StreamResponse:
    await asyncio.sleep(3600)
    return web.Response()


def test_an_open_loop_sends_everything_once_and_not_before_it_is_due() -> None:
    records: list[RequestRecord] = []
    share = arrivals(60, 0.005)
    with served(pod(PodConfig(adapters=["a"], profile=INSTANT))) as url, sender(url) as to:
        loop = OpenLoop(to, share, records.append)
        assert not loop.is_over
        loop.start()
        wait_for(loop)
        begun_s, firsts_s = to.take_begun(), to.take_firsts()

    assert sorted(record.index for record in records) == list(range(60))
    assert sorted(begun_s) == sorted(record.sent_s for record in records)
    assert sorted(firsts_s) == sorted(begun_s)
    assert {record.error for record in records} == {""}
    assert [r.at_s for r in sorted(records, key=lambda r: r.index)] == [a.at_s for _, a in share]
    assert all(record.delay_s >= 0 for record in records)


def test_an_open_loop_does_not_wait_for_answers() -> None:
    with served(handled(never)) as url, sender(url) as to:
        records: list[RequestRecord] = []
        loop = OpenLoop(to, arrivals(40, 0.005), records.append)
        loop.start()
        begun_s: list[float] = []
        with gevent.Timeout(PATIENCE_S):
            while len(begun_s) < 40:
                begun_s += to.take_begun()
                gevent.sleep(0.01)
        loop.stop()

    assert [record.error for record in records] == [STOPPED] * 40
    assert loop.is_over


def test_an_open_loop_that_is_late_from_the_start_still_sends_everything() -> None:
    records: list[RequestRecord] = []
    with (
        served(pod(PodConfig(adapters=["a"], profile=INSTANT))) as url,
        sender(url, in_s=-5.0) as to,
    ):
        loop = OpenLoop(to, arrivals(50), records.append)
        loop.start()
        wait_for(loop)

    assert len(records) == 50
    assert all(record.delay_s >= 5.0 for record in records)


def test_a_stopped_open_loop_sends_nothing_more() -> None:
    records: list[RequestRecord] = []
    with served(pod(PodConfig(adapters=["a"], profile=INSTANT))) as url, sender(url) as to:
        loop = OpenLoop(to, [*arrivals(5), (5, Arrival(3600.0, "a", 10, 3))], records.append)
        loop.start()
        with gevent.Timeout(PATIENCE_S):
            while len(records) < 5:
                gevent.sleep(0.01)
        loop.stop()

    assert loop.is_over
    assert len(records) == 5


def ask_by(num_users: int, loop: ClosedLoop) -> Group:
    users = Group()

    def be_a_user() -> None:
        while True:
            loop.ask()

    for _ in range(num_users):
        users.spawn(be_a_user)
    return users


def test_users_take_requests_in_order_and_each_once() -> None:
    records: list[RequestRecord] = []
    with (
        served(pod(PodConfig(adapters=["a"], profile=INSTANT))) as url,
        sender(url, in_s=0.1) as to,
    ):
        loop = ClosedLoop(to, arrivals(30), records.append, think_s=0.001, rng=Random(1))
        users = ask_by(4, loop)
        wait_for(loop)
        users.kill()

    in_order = sorted(records, key=lambda record: (record.sent_s, record.index))
    assert [record.index for record in in_order] == list(range(30))
    assert all(record.sent_s == record.at_s >= 0 for record in records)


def test_a_killed_user_s_request_is_counted_when_the_loop_stops() -> None:
    records: list[RequestRecord] = []
    with served(handled(never)) as url, sender(url) as to:
        loop = ClosedLoop(to, arrivals(9), records.append, think_s=0.0, rng=Random(1))
        users = ask_by(3, loop)
        with gevent.Timeout(PATIENCE_S):
            while len(loop._requests) < 3:
                gevent.sleep(0.01)
        gevent.sleep(0.2)
        users.kill()
        loop.stop()

    assert [record.error for record in records] == [STOPPED] * 3
    assert loop.is_over
