"""Picks of one router, counted by another: from pool to pool, over a real link."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import pytest

from extproc.gen import peers_pb2
from extproc.observe.observers import Observers
from extproc.observe.telemetry import Telemetry
from extproc.peers.links import Links
from extproc.peers.peermessages import decode
from extproc.peers.updates import BEGIN_INTERVAL_S, FLUSH_S, WHOLE_S, UpdateSender
from extproc.phrases import FOR_SLOT
from extproc.pods import picksums
from extproc.pods.peerpicks import UNKNOWN_POD
from extproc.pods.picksums import MAX_ADAPTER_CHARS, MAX_FLOW_CHARS, Sums
from extproc.queue import QueueSettings, Ticket
from extproc.queue.plan import tokens_of
from extproc.routing.router import Router
from extproc.tenancy import Claim
from extproc.types import Wait
from tests.builders import Clock, address, endpoint, pick, request, routing
from tests.peers.peered import Peered, linking
from tests.peers.scene import Later, hello, served
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
        return [(each.num_in_flight, each.num_told, each.pending("a")) for each in views]


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
        shares: list[tuple[object, ...]] = []
        monkeypatch.setattr(
            far.router.queue, "charge_elsewhere", lambda *share: shares.append(share)
        )
        info = request("a", claim=Claim(tenant="t", priority=-1, weight=0.5))
        made = pick("aa-1", info=info)
        near.pool.flights.start(made, now=time.monotonic())
        near.pool.flights.move(made.id, address(2), now=time.monotonic())
        await eventually(lambda: far.counts()[1] == (0, 1, 1))

        assert [each[:2] for each in shares] == [(info.claim.flow, info.claim.priority)]
        assert shares[0][2] == pytest.approx(tokens_of(info), abs=1e-3)


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
    wait = Wait(now + 60, FOR_SLOT)
    ticket = router.hold(info, wait, now=now, wake=lambda: None)
    assert isinstance(ticket, Ticket)
    router.queue.freed(now)
    router.queue.offer(
        lambda _ticket, _now: wait, now=now, destinations=router.destinations(now=now)
    )
    return ticket


def is_behind(router: Router) -> bool:
    """Whether a newcomer of priority 0 lets another request go first."""
    now = time.monotonic()
    _, result = router.choose(request("a", arrived_at_s=now), now=now, is_new=True)
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

        assert far.pool.peer_picks.num_ignored[UNKNOWN_POD] == 1


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
        reasons = ("untold", "slow_link", "full", "unknown_pod")
        dropped = [read[1]("extproc_told_dropped_total", {"reason": each}) for each in reasons]
        assert dropped == [0] * 4


async def test_a_router_without_peers_observes_nothing() -> None:
    alone = Teller("aa", is_alone=True)

    assert alone.pool.flights._observer is None


class Near:
    """A router that tells; with a link to each router whose `call` is given."""

    def __init__(self, *calls: FakeCall) -> None:
        self.clock, self.observers = Clock(), Observers()
        self.later = Later(self.clock)
        self.sender = UpdateSender(
            Links(), call_later=self.later, clock=self.clock, observers=self.observers
        )
        router = routing(observer=self.sender, on_change=self.sender.waits)
        router.pool.set_endpoints([endpoint(1)])
        self.flights = router.pool.flights
        self.service = served(router, self.sender, "aa", self.observers, self.clock)
        for number, call in enumerate(calls):
            self.link(call, f"b{number}")
        self.later.run()

    def link(self, call: FakeCall, router_id: str) -> None:
        [method] = self.service.methods()
        method.open(call, {}).receive(hello(router_id))

    def start(self, *numbers: int) -> None:
        for number in numbers:
            self.flights.start(pick(f"aa-{number}"), now=self.clock.now)


def told_by(call: FakeCall) -> list[Sums]:
    """The updates told over a link."""
    messages = (peers_pb2.PeerMessage.FromString(each) for each in call.sent)
    return [decode(each.sums).sums for each in messages if each.HasField("sums")]


def test_a_link_begins_with_what_is_in_flight() -> None:
    call, near = FakeCall(), Near()
    near.start(1, 2)
    assert near.later.due == []  # while nobody listens
    near.link(call, "bb")
    near.later.run()

    [whole] = told_by(call)
    assert (whole.is_whole, [each.num for each in whole.places], whole.changes) == (True, [2], [])


def test_each_second_all_is_told_that_is_in_flight_then() -> None:
    call = FakeCall()
    near = Near(call)
    near.later.run(WHOLE_S / 2)
    near.start(1, 2, 3)
    near.flights.finish("aa-1", now=0.0)
    near.later.run(2 * WHOLE_S)

    first, change, *later = told_by(call)
    assert [first.is_whole, change.is_whole] == [True, False]
    assert [each.is_whole for each in later] == [True, True]
    assert [[place.num for place in each.places] for each in later] == [[2], [2]]


def test_a_router_that_links_soon_after_another_is_told_as_soon_as_it_may() -> None:
    first, second = FakeCall(), FakeCall()
    near = Near(first)
    near.link(second, "cc")
    near.later.run(BEGIN_INTERVAL_S / 2)
    assert (len(told_by(first)), len(told_by(second))) == (1, 0)
    near.later.run(BEGIN_INTERVAL_S / 2)
    assert (len(told_by(first)), len(told_by(second))) == (2, 1)
    near.later.run(WHOLE_S)

    assert (len(told_by(first)), len(told_by(second))) == (3, 2)


def test_what_a_pick_counts_for_is_told_with_a_new_one_alone() -> None:
    """One under way may have been told before the link: it would count twice."""
    call, near = FakeCall(), Near()
    info = request(claim=Claim(route="r", tenant="t", priority=2))
    near.flights.start(pick("aa-1", info=info), now=0.0)
    near.link(call, "bb")
    near.later.run()
    near.flights.start(pick("aa-2", info=info), now=0.0)
    near.later.run(FLUSH_S)

    whole, change = told_by(call)
    assert whole.places[0].place == (address(1), "a", " t", 2)
    assert (whole.changes, change.places) == ([], ())
    assert change.changes[4] == pytest.approx(1e3 * tokens_of(info), abs=1)


def test_what_comes_together_is_told_together_and_then_nothing_until_all_is() -> None:
    call = FakeCall()
    near = Near(call)
    near.later.run(FLUSH_S)
    near.start(*range(5))
    near.flights.finish("aa-0", now=near.clock.now)
    assert near.later.rests() == [0.0, pytest.approx(WHOLE_S - FLUSH_S)]
    near.later.run()

    assert len(told_by(call)) == 2
    assert near.later.rests() == [pytest.approx(WHOLE_S - FLUSH_S)]


def test_a_pick_after_a_pause_is_told_at_once_and_the_next_a_moment_later() -> None:
    near = Near(FakeCall())
    near.later.run(0.5)
    near.start(1)
    assert near.later.rests()[0] == 0.0
    near.later.run()
    near.later.run(0.0005)
    near.start(2)

    assert near.later.rests()[0] == pytest.approx(FLUSH_S - 0.0005)


def test_a_timer_that_fires_early_or_stands_still_ends_no_whole_updates() -> None:
    call = FakeCall()
    near = Near(call)
    for seconds in (0.9995, 7.0, 1.0):
        near.later.clock.now += seconds
        due, near.later.due = near.later.due, []
        for _, run in due:
            run()

    assert [each.is_whole for each in told_by(call)] == [True] * 4


def test_when_the_last_link_is_gone_no_timer_goes_on() -> None:
    near = Near(FakeCall())
    [session] = near.sender.links
    session.closed()
    near.later.run(2 * WHOLE_S)

    assert near.later.due == []


def test_a_pick_at_too_many_places_is_untold_until_there_is_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(picksums, "MAX_NAME_BYTES", 20)
    call = FakeCall()
    near = Near(call)
    near.start(1)
    near.flights.start(pick("aa-2", info=request("b")), now=0.0)
    assert near.sender.num_left_out == 1
    near.flights.finish("aa-1", now=0.0)
    near.later.run(WHOLE_S)

    assert [each.place[1] for each in told_by(call)[-1].places] == ["b"]


def test_names_that_are_too_long_or_no_text_are_not_told() -> None:
    call = FakeCall()
    near = Near(call)
    tenants = "t" * MAX_FLOW_CHARS, "a lone \ud800"
    for number, tenant in enumerate(tenants):
        claim = Claim(tenant=tenant, priority=1)
        info = request("x" * (MAX_ADAPTER_CHARS + 1), claim=claim)
        near.flights.start(pick(f"aa-{number}", info=info), now=0.0)
    info = request("y", claim=Claim(tenant="t", priority=2**31))
    near.flights.start(pick("aa-9", info=info), now=0.0)
    near.later.run(FLUSH_S)

    here = address(1)
    told = [each.place for each in told_by(call)[-1].places]
    assert told == [(here, "", "", 0), (here, "", "", 0), (here, "y", "", 0)]


class BrokenCall(FakeCall):
    """A way back that fails once it is told to."""

    is_broken = False

    def send(self, message: bytes) -> None:
        if self.is_broken:
            raise RuntimeError("no way back")


def test_a_link_that_fails_is_counted_and_no_request_notices() -> None:
    call = BrokenCall()
    near = Near(call)
    call.is_broken = True
    near.start(1)
    near.later.run(FLUSH_S)

    assert near.observers.num_errors["telling"] == 1
    assert near.flights.finish("aa-1", now=0.0) is not None
