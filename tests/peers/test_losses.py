"""Three routers over links that lose what they tell: two seconds later all counts are true."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.observe.observers import Observers
from extproc.peers.links import Links
from extproc.peers.peering import TICK_S
from extproc.peers.updates import UpdateSender
from extproc.types import RequestInfo
from tests.builders import Clock, address, fill, pick, request, routing
from tests.peers.scene import Later, Wire, kinds, served

NUM_PODS = 3
Counts = dict[str, tuple[int, dict[str, int]]]
"""Of each pod: sequences that other routers sent there, and requests of all by adapter."""


class Member:
    """A router that picks, tells and counts.

    Attributes:
        running: The pods and the requests of its picks.
    """

    def __init__(self, router_id: str, clock: Clock, later: Later) -> None:
        self.id, self._clock, self._num = router_id, clock, 0
        self.running: dict[str, tuple[int, RequestInfo]] = {}
        observers = Observers()
        sender = UpdateSender(Links(), call_later=later, clock=clock, observers=observers)
        router = routing(observer=sender, on_change=sender.waits)
        self.pool = fill(router.pool, *range(1, NUM_PODS + 1), adapters="ab")
        self.service = served(router, sender, router_id, observers, clock)

    def start(self, number: int, info: RequestInfo) -> None:
        self._num += 1
        made = pick(f"{self.id}-{self._num}", number, info=info)
        self.running[made.id] = number, info
        self.pool.flights.start(made, now=self._clock())

    def end(self, id: str, *, has_run: bool) -> None:
        del self.running[id]
        self.pool.flights.finish(id, now=self._clock(), has_run=has_run)

    def counts(self) -> Counts:
        views = self.pool.snapshot(now=self._clock()).endpoints
        return {each.address: (each.num_told, dict(each.pending_by_adapter)) for each in views}


class Fleet:
    """Three routers, a link between every two, and 100 requests a second.

    Attributes:
        lost_ratio: Of the messages with sums.
        num_lost: Of those, so far.
        cut: The link over which nothing passes; what was sent waits, as TCP has it.
    """

    def __init__(self, seed: int) -> None:
        self._rng, self._clock = random.Random(seed), Clock()
        self._later = Later(self._clock)
        self.members = [Member(id, self._clock, self._later) for id in ("aa", "bb", "cc")]
        self.links = [Wire(*two) for two in combinations(self.members, 2)]
        self.lost_ratio, self.num_lost = 0.0, 0
        self.cut: Wire | None = None
        self._tick()

    def live(self, seconds: float) -> None:
        """Let requests come and go."""
        until_s = self._clock() + seconds
        while self._clock() < until_s:
            self._later.run(self._rng.expovariate(200.0))
            self._act(self._rng.choice(self.members))
            self._pass_on()
        self._later.run(0.1)  # of what has happened last, all has been told
        self._pass_on()

    def kill(self) -> None:
        """Have the last router end, without a word."""
        del self.members[-1]
        while len(self.links) > 1:
            self.links.pop().cut()

    def truth(self, member: Member) -> Counts:
        """What the router would count that knew all."""
        told, adapters = Counter[int](), {n: Counter[str]() for n in range(1, NUM_PODS + 1)}
        for each in self.members:
            for number, info in each.running.values():
                told[number] += 0 if each is member else info.num_sequences
                adapters[number].update([info.adapter] if info.adapter else ())
        return {address(n): (told[n], dict(names)) for n, names in adapters.items()}

    def are_true(self) -> bool:
        """Return whether every router's counts are."""
        return all(each.counts() == self.truth(each) for each in self.members)

    def _act(self, member: Member) -> None:
        running = member.running
        if running and self._rng.random() < len(running) / 30:
            member.end(self._rng.choice([*running]), has_run=self._rng.random() < 0.9)
        else:
            adapter, num = self._rng.choice(("a", "b", None)), self._rng.choice((1, 1, 3))
            member.start(self._rng.randint(1, NUM_PODS), request(adapter, num_sequences=num))

    def _pass_on(self) -> None:
        for each in self.links:
            if each is not self.cut:
                each.pump(self._is_lost)

    def _is_lost(self, message: bytes) -> bool:
        is_lost = self._rng.random() < self.lost_ratio and kinds([message]) == ["sums"]
        self.num_lost += is_lost
        return is_lost

    def _tick(self) -> None:
        for each in self.members:
            each.service.tick()
        self._later(TICK_S, self._tick)


def one_percent(fleet: Fleet) -> None:
    fleet.lost_ratio = 0.01


def ten_percent(fleet: Fleet) -> None:
    fleet.lost_ratio = 0.1


def all_of_it(fleet: Fleet) -> None:
    fleet.lost_ratio = 1.0


def a_cut(fleet: Fleet) -> None:
    fleet.cut = fleet.links[0]


@pytest.mark.parametrize("trouble", [one_percent, ten_percent, all_of_it, a_cut])
@given(seed=st.integers(0, 2**32))
@settings(max_examples=3, deadline=None)
def test_two_seconds_after_three_of_trouble_all_counts_are_true(
    trouble: Callable[[Fleet], None], seed: int
) -> None:
    fleet = Fleet(seed)
    fleet.live(1.5)
    assert fleet.are_true()
    trouble(fleet)
    fleet.live(3.0)
    assert fleet.num_lost or (fleet.cut is not None and not fleet.are_true())
    fleet.lost_ratio, fleet.cut = 0.0, None
    fleet.live(1.9)

    assert fleet.are_true()


@given(seed=st.integers(0, 2**32))
@settings(max_examples=3, deadline=None)
def test_two_seconds_after_a_router_is_killed_the_others_count_each_other_exactly(
    seed: int,
) -> None:
    fleet = Fleet(seed)
    fleet.live(1.5)
    assert all(
        fleet.members[-1].running and each.counts() == fleet.truth(each) for each in fleet.members
    )
    fleet.kill()
    fleet.live(1.9)

    assert fleet.are_true()
    assert [each.pool.peer_picks.num_routers for each in fleet.members] == [1, 1]
