"""Picks of one router, counted by another: from pool to pool, over a real link."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import pytest

from extproc.fleet.peerpicks import UNKNOWN_POD, PeerPick
from extproc.fleet.pool import Pool
from extproc.gen import peers_pb2
from extproc.observe.observers import Observers
from extproc.observe.telemetry import Telemetry
from extproc.peers.adapterpeers import AdapterPeers
from extproc.peers.links import BEGIN_INTERVAL_S, Links, PeersService
from extproc.peers.relay import Relay
from extproc.peers.telling import FLUSH_S, MAX_WAITING, Hearing, Telling
from extproc.phrases import FOR_SLOT
from extproc.queue import QueueSettings, Ticket
from extproc.queue.plan import share_of
from extproc.routing.router import Router
from extproc.tenancy import Claim, Share
from extproc.types import Wait
from tests.builders import Clock, address, endpoint, pick, request, routing
from tests.service.peered import Peered, linking
from tests.waiting import eventually
from tests.wire.fake_call import FakeCall


class Teller(Peered):
    """A router as far as it picks and tells; `peers` are the addresses that it dials."""

    def __init__(self, router_id: str, *peers: str, is_alone: bool = False) -> None:
        super().__init__(router_id, None if is_alone else {"static": list(peers)})
        self.id = router_id

    def pick(self, id: int, number: int = 1) -> str:
        made = pick(f"{self.id}-{id}", number, info=request("a", body_bytes=100))
        self.pool.flights.start(made, now=time.monotonic())
        return made.id

    def end(self, pick_id: str) -> None:
        assert self.pool.flights.finish(pick_id, now=time.monotonic()) is not None

    def counts(self) -> list[tuple[int, int, int]]:
        """Of each endpoint: ours, others', and both for the adapter."""
        views = self.pool.snapshot(now=time.monotonic()).endpoints
        return [(each.num_in_flight, each._num_told, each.pending("a")) for each in views]


@asynccontextmanager
async def linked(
    before: Callable[[Teller, Teller], None] = lambda near, far: None,
) -> AsyncIterator[tuple[Teller, Teller]]:
    """`aa`, which dials, and `bb`, which listens; `before` is called before they are linked."""
    async with linking(Teller("bb"), partial(Teller, "aa"), before) as (near, far):
        yield near, far
        for each in (near, far):
            assert not any(each.observers.num_errors.values())


async def test_each_router_counts_the_others_picks_until_they_end() -> None:
    async with linked() as (near, far):
        first, second = near.pick(1, 1), near.pick(2, 2)
        own = far.pick(1, 2)
        await eventually(lambda: far.counts() == [(0, 1, 1), (1, 1, 2)])
        await eventually(lambda: near.counts() == [(1, 0, 1), (1, 1, 2)])
        near.end(first)
        far.end(own)
        await eventually(lambda: far.counts() == [(0, 0, 0), (0, 1, 1)])
        await eventually(lambda: near.counts() == [(0, 0, 0), (1, 0, 1)])
        near.end(second)
        await eventually(lambda: far.counts() == [(0, 0, 0)] * 2)


async def test_what_a_tenant_gets_of_one_router_the_other_hears(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with linked() as (near, far):
        shares: list[Share] = []
        monkeypatch.setattr(far.router.queue, "charge_told", shares.append)
        info = request("a", claim=Claim(tenant="t", priority=-1, _weight=0.5))
        made = pick("aa-1", info=info)
        near.pool.flights.start(made, now=time.monotonic())
        near.pool.flights.move(made.id, address(2), now=time.monotonic())
        await eventually(lambda: far.counts()[1] == (0, 1, 1))

        assert shares == [share_of(info)]


async def test_a_router_that_comes_later_is_told_what_is_in_flight() -> None:
    def under_way(near: Teller, far: Teller) -> None:
        for number in range(3000):  # more than one message has
            near.pick(number)
        near.end("aa-0")

    async with linked(under_way) as (_, far):
        await eventually(lambda: far.counts() == [(0, 2999, 2999), (0, 0, 0)])


async def test_a_router_that_leaves_is_forgotten_and_told_again_when_it_is_back() -> None:
    async with linked() as (near, far):
        near.pick(1)
        far.pick(1)
        await eventually(lambda: far.counts()[0] == (1, 1, 2))
        await eventually(lambda: near.counts()[0] == (1, 1, 2))
        dialler = near.peering._dialler
        assert dialler is not None
        addresses = list(dialler._tasks)
        dialler.set_addresses([])
        await eventually(lambda: far.counts()[0] == near.counts()[0] == (1, 0, 1))
        near.pick(2)
        dialler.set_addresses(addresses)

        await eventually(lambda: far.counts()[0] == (1, 2, 3))
        await eventually(lambda: near.counts()[0] == (2, 1, 3))


async def test_a_pick_that_another_pod_serves_is_counted_there_by_the_other() -> None:
    async with linked() as (near, far):
        moved = near.pick(1, 1)
        await eventually(lambda: far.counts() == [(0, 1, 1), (0, 0, 0)])
        near.pool.flights.move(moved, address(2), now=time.monotonic())
        await eventually(lambda: far.counts() == [(0, 0, 0), (0, 1, 1)])
        near.end(moved)
        await eventually(lambda: far.counts() == [(0, 0, 0)] * 2)


def first_in_line(router: Router) -> Ticket:
    """A request of priority 10 that a router holds for a slot."""
    now = time.monotonic()
    info = request("a", arrived_at_s=now, claim=Claim(tenant="gold", priority=10))
    ticket = router.hold(info, Wait(now + 60, FOR_SLOT), now=now, wake=lambda: None)
    assert isinstance(ticket, Ticket)
    return ticket


def is_behind(router: Router) -> bool:
    """Whether a newcomer of priority 0 lets another request go first."""
    now = time.monotonic()
    _, result = router.choose_in_turn(request("a", arrived_at_s=now), now=now)
    return isinstance(result, Wait)


async def test_who_waits_at_one_router_goes_first_at_the_other_until_it_leaves() -> None:
    async with linked() as (near, far):
        assert not is_behind(far.router)
        ticket = first_in_line(near.router)
        await eventually(lambda: is_behind(far.router))
        near.router.leave(ticket, now=time.monotonic())
        await eventually(lambda: not is_behind(far.router))


async def test_who_waited_before_a_link_is_told_and_forgotten_with_the_router() -> None:
    def before(near: Teller, far: Teller) -> None:
        far.router.queue.configure(QueueSettings(slot_hold_s=60.0))
        near.router.queue.configure(QueueSettings(slot_hold_s=60.0))
        first_in_line(near.router)

    async with linked(before) as (near, far):
        await eventually(lambda: is_behind(far.router))
        await near.peering.aclose()
        await eventually(lambda: not is_behind(far.router))


async def test_picks_of_pods_that_the_other_does_not_know_are_counted_as_such() -> None:
    async with linked() as (near, far):
        far.pool.set_endpoints([endpoint(1)])
        near.pick(1, 2)
        near.pick(2, 1)
        await eventually(lambda: far.counts() == [(0, 1, 1)])

        assert far.pool.told.num_ignored[UNKNOWN_POD] == 1


async def test_what_is_told_is_in_the_metrics() -> None:
    async with linked() as (near, far):
        read = []
        for each in (near, far):
            telemetry = Telemetry(snapshot=lambda: far.pool.snapshot(now=0.0), version="1")
            each.peering.add_metrics(telemetry)
            read.append(telemetry.registry.get_sample_value)
        near.pick(1)
        await eventually(lambda: read[1]("extproc_told_in_flight") == 1)

        assert read[0]("extproc_told_picks_total", {"direction": "out"}) == 1
        assert read[1]("extproc_told_picks_total", {"direction": "in"}) == 1
        reasons = ("busy", "slow_link", "full", "unknown_pod")
        dropped = [read[1]("extproc_told_dropped_total", {"reason": each}) for each in reasons]
        assert dropped == [0] * 4


async def test_a_router_without_peers_observes_nothing() -> None:
    alone = Teller("aa", is_alone=True)

    assert alone.pool.flights._observer is None


class Later:
    """A loop that runs what is due when the test says so."""

    def __init__(self) -> None:
        self.due: list[Callable[[], None]] = []
        self.rest_s = -1.0  # of the last that was put off

    def __call__(self, seconds: float, run: Callable[[], None]) -> None:
        self.due.append(run)
        self.rest_s = seconds

    def run(self) -> None:
        due, self.due = self.due, []
        for each in due:
            each()


def teller(
    later: Later, clock: Callable[[], float] = lambda: 0.0
) -> tuple[Pool, Telling, PeersService, Observers]:
    observers = Observers()
    telling = Telling(Links(clock), call_later=later, clock=clock, observers=observers)
    router = routing(observer=telling, on_change=telling.waits)
    router.pool.set_endpoints([endpoint(1)])
    return router.pool, telling, served(router, telling, "aa", observers, clock), observers


def served(
    router: Router,
    telling: Telling,
    router_id: str,
    observers: Observers,
    clock: Callable[[], float] = lambda: 0.0,
) -> PeersService:
    """The links of a router, which believes who calls."""
    adapters = AdapterPeers(
        router_id, router.catalog, poke=lambda _: None, look=lambda: None, clock=clock, say=None
    )
    return PeersService(
        Relay(),
        router_id,
        links=telling.links,
        listener=Hearing(router, adapters, telling, clock=clock, observers=observers),
        on_entries=lambda *_: None,
        clock=clock,
        believes_callers=True,
    )


def link(service: PeersService, call: FakeCall, router_id: bytes = b"bb") -> None:
    [method] = service.methods()
    session = method.open(call, {})
    session.receive(b"\x0a\x04\x0a\x02" + router_id)  # hello


def told_by(call: FakeCall) -> list[peers_pb2.StartedPick]:
    """The picks told over a link."""
    return [
        pick
        for message in call.sent
        for pick in peers_pb2.PeerMessage.FromString(message).picks.started
    ]


def test_a_pick_is_told_with_its_age_whether_it_is_new_or_under_way() -> None:
    later, call, clock = Later(), FakeCall(), Clock()
    pool, _, service, _ = teller(later, clock)
    pool.flights.start(pick("aa-1"), now=0.0)
    clock.now = 2.0
    link(service, call)
    later.run()
    pool.flights.start(pick("aa-2"), now=clock.now)
    clock.now = 2.5
    later.run()

    assert [(each.number, each.age_ms) for each in told_by(call)] == [(1, 2000), (2, 500)]


def test_what_a_pick_counts_for_is_told_with_a_new_one_alone() -> None:
    """One under way may have been told before the link: it would count twice."""
    later, call = Later(), FakeCall()
    pool, _, service, _ = teller(later)
    info = request(claim=Claim(route="r", tenant="t", priority=2))
    pool.flights.start(pick("aa-1", info=info), now=0.0)
    link(service, call)
    later.run()
    for number, each in ((2, info), (3, request())):
        pool.flights.start(pick(f"aa-{number}", info=each), now=0.0)
    later.run()

    assert [(each.flow, each.priority) for each in told_by(call)] == [("", 0), (" t", 2), (" ", 0)]


def test_a_router_that_links_soon_after_another_is_told_as_soon_as_it_may() -> None:
    later, first, second, clock = Later(), FakeCall(), FakeCall(), Clock()
    pool, _, service, _ = teller(later, clock)
    pool.flights.start(pick("aa-1"), now=0.0)
    link(service, first)
    later.run()
    link(service, second, b"cc")
    for _ in range(3):
        later.run()
    assert (len(told_by(first)), len(told_by(second)), len(later.due)) == (1, 0, 1)
    clock.now = BEGIN_INTERVAL_S
    later.run()

    assert (len(told_by(first)), len(told_by(second)), later.due) == (1, 1, [])


def test_while_nobody_listens_nothing_is_collected_and_no_timer_runs() -> None:
    later = Later()
    pool, _, _, _ = teller(later)
    pool.flights.start(pick("aa-1"), now=0.0)
    pool.flights.finish("aa-1", now=0.0)

    assert later.due == []


def test_what_comes_together_is_told_together_and_then_the_timer_rests() -> None:
    later, call = Later(), FakeCall()
    pool, _, service, _ = teller(later)
    link(service, call)
    later.run()
    num_before = len(call.sent)
    for number in range(5):
        pool.flights.start(pick(f"aa-{number}"), now=0.0)
    pool.flights.finish("aa-0", now=0.0)
    assert (len(later.due), len(call.sent)) == (1, num_before)
    later.run()

    assert (later.due, len(call.sent)) == ([], num_before + 1)


def test_a_pick_after_a_pause_is_told_at_once_and_the_next_a_moment_later() -> None:
    later, clock = Later(), Clock()
    pool, _, service, _ = teller(later, clock)
    link(service, FakeCall())
    later.run()
    clock.now = 5.0
    pool.flights.start(pick("aa-1"), now=5.0)
    assert later.rest_s == 0.0
    later.run()
    clock.now = 5.0005
    pool.flights.start(pick("aa-2"), now=5.0005)

    assert later.rest_s == pytest.approx(FLUSH_S - 0.0005)


def test_picks_beyond_the_most_that_wait_are_dropped_and_counted() -> None:
    later = Later()
    pool, telling, service, _ = teller(later)
    link(service, FakeCall())
    later.run()
    for number in range(MAX_WAITING + 3):
        pool.flights.start(pick(f"aa-{number}"), now=0.0)
    assert telling.num_dropped == 3
    later.run()
    pool.flights.finish("aa-0", now=0.0)

    assert telling.num_dropped == 3
    assert len(pool.flights) == MAX_WAITING + 2


def test_no_more_picks_are_kept_than_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    later, told = Later(), list[PeerPick]()
    pool, telling, service, _ = teller(later)
    link(service, FakeCall())
    later.run()

    def tell(picks: list[PeerPick], *_args: object, **_named: object) -> None:
        told.extend(picks)

    monkeypatch.setattr(telling.links, "tell", tell)
    for number in range(MAX_WAITING + 3):
        pool.flights.start(pick(f"aa-{number}"), now=0.0)
    later.run()

    assert len(told) == MAX_WAITING


def test_after_a_drop_the_others_count_what_is_in_flight_and_nothing_else() -> None:
    later, call, clock, far = Later(), FakeCall(), Clock(), routing()
    pool, _, service, _ = teller(later, clock)
    far.pool.set_endpoints([endpoint(1)])
    link(service, call)
    later.run()
    for number in range(MAX_WAITING):
        pool.flights.start(pick(f"aa-{number}"), now=0.0)
    later.run()
    clock.now = BEGIN_INTERVAL_S
    for number in range(MAX_WAITING + 3):
        pool.flights.start(pick(f"aa-{MAX_WAITING + number}"), now=1.0)
    for number in range(2 * MAX_WAITING):
        pool.flights.finish(f"aa-{number}", now=1.0)
    later.run()
    hear(call, far)

    assert far.pool.told.num_in_flight == len(pool.flights) == 3
    assert later.due == []


def hear(call: FakeCall, router: Router) -> None:
    """Count in another router's pool what was told over a link."""
    observers = Observers()
    telling = Telling(
        Links(lambda: 0.0), call_later=Later(), clock=lambda: 0.0, observers=observers
    )
    service = served(router, telling, "bb", observers)
    session = service.dialled(FakeCall(), lambda _: None)
    for message in call.sent:
        session.receive(message)


class BrokenCall(FakeCall):
    """A way back that fails once it is told to."""

    is_broken = False

    def send(self, message: bytes) -> None:
        if self.is_broken:
            raise RuntimeError("no way back")


def test_a_link_that_fails_is_counted_and_no_request_notices() -> None:
    later, call = Later(), BrokenCall()
    pool, _, service, observers = teller(later)
    link(service, call)
    later.run()
    call.is_broken = True
    pool.flights.start(pick("aa-1"), now=0.0)
    later.run()

    assert observers.num_errors["telling"] == 1
    assert pool.flights.finish("aa-1", now=0.0) is not None
