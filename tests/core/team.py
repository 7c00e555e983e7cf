"""Routers that tell each other their picks and ask the one that leads, without a network."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from extproc.core.following import (
    Answer,
    Asking,
    Elsewhere,
    Following,
    FollowingSettings,
    Question,
    Withdrawal,
)
from extproc.core.leading import Leading, LeadingSettings
from extproc.core.picker import Picker
from extproc.core.pickids import pick_ids, router_of
from extproc.core.policies.controls import LeastPending
from extproc.core.pool import Pool, PoolSettings
from extproc.core.queue import Ticket
from extproc.core.router import Router
from extproc.core.told import ToldPick
from extproc.core.types import Choice, Pick, Rejection, RequestInfo, Snapshot, Wait
from tests.builders import address, cards, endpoint, report, request

NUM_PODS = 3
TIMEOUT_S = 0.02
EXPIRY_S = 600.0


class Policy:
    """Takes the pod with the fewest requests; holds those whose path says so until `is_open`."""

    def __init__(self) -> None:
        self.is_open = True

    def choose(
        self, snapshot: Snapshot, request: RequestInfo, *, rng: random.Random
    ) -> Choice | Wait:
        if request.path == "/held" and not self.is_open:
            return Wait(snapshot.now + 0.03)
        return LeastPending().choose(snapshot, request, rng=rng)


@dataclass(eq=False)
class Client:
    """One request, as its stream sees it; `result` is what it got."""

    asking: Asking
    request: RequestInfo
    result: Pick | Rejection | None = None
    ticket: Ticket | None = None
    is_gone: bool = False
    is_woken: bool = False
    until_s: float = 0.0


@dataclass(eq=False)
class Member:
    """One router; a leader, too, if nobody else is `before` it."""

    id: str
    team: Team
    pods: range
    clients: list[Client] = field(default_factory=list)
    before: str | None = None

    def __post_init__(self) -> None:
        self.pool = Pool(PoolSettings(report_expiry_s=EXPIRY_S))
        self.pool.set_endpoints(endpoint(number) for number in self.pods)
        for number in self.pods:
            self.pool.record_report(address(number), report(), taken_at_s=0.0)
            self.pool.record_models(address(number), cards("a"), now=0.0)
        self.pool.flights.observer = self
        self.policy, next_id = Policy(), pick_ids(self.id)
        picker = Picker(self.policy, "p", rng=random.Random(self.id), next_id=next_id)
        self.router = Router(self.pool, picker, max_hold_s=self.team.max_hold_s)
        settings = FollowingSettings(TIMEOUT_S, max_asked=self.team.max_asked)
        self.following = Following(self, next_id, self.router.max_hold_s, settings)
        self.leading = Leading(self.router, settings=LeadingSettings())
        self.settled: list[str] = []
        self.leading.on_settled = self.settled.append

    # --- the way to the others -----------------------------------------------------------------

    def leader(self) -> str | None:
        return self.before

    def ask(self, leader: str, question: Question) -> bool:
        return self.team.send(self.id, leader, question)

    def withdraw(self, leader: str, withdrawal: Withdrawal) -> None:
        self.team.send(self.id, leader, withdrawal)

    def started(self, pick: Pick, address: str, *, at_s: float) -> None:
        told = ToldPick(pick.id, address, pick.request.adapter, pick.request.body_bytes, 0.0)
        self.team.tell(self.id, told)

    def ended(self, pick_id: str, *, now: float, has_run: bool) -> None:
        self.team.tell(self.id, pick_id)

    # --- what comes ----------------------------------------------------------------------------

    def receive(self, sender: str, message: object) -> None:
        now, told = self.team.now, self.pool.told
        match message:
            case ToldPick():
                told.start(message, now=now)
            case str():
                told.finish(message, now=now)
            case Question():
                self._answer(sender, self.leading.ask(message, now=now))
            case Withdrawal():
                self.leading.withdraw(message.pick_id, now=now)
            case Answer():
                self.following.hear(sender, message, now=now)

    def look(self) -> None:
        """Look at everything that is held and due."""
        self.router.offer(now=self.team.now)
        self.look_at(list(self.leading._held))

    def look_at(self, pick_ids: list[str]) -> None:
        for pick_id in pick_ids:
            self._answer(router_of(pick_id), self.leading.look(pick_id, now=self.team.now))

    def look_at_settled(self) -> None:
        settled, self.settled[:] = self.settled[:], []
        self.look_at(settled)

    def _answer(self, sender: str, answer: Answer | None) -> None:
        if answer is not None:
            self.team.send(self.id, sender, answer)

    def meet(self, other: str) -> None:
        self.pool.told.begin(other, now=self.team.now)
        for flight in self.pool.flights:
            self.started(flight.pick, flight.tracked.endpoint.address, at_s=self.team.now)

    def miss(self, other: str) -> None:
        self.pool.told.forget(other, now=self.team.now)
        self.leading.forget(other, now=self.team.now)
        self.following.forget(other)

    # --- requests ------------------------------------------------------------------------------

    def request(self, path: str = "/now", **fields: object) -> Client:
        made: list[Client] = []
        defaults = {"path": path, "arrived_at_s": self.team.now}
        info = request(None, model="a", **{**defaults, **fields})
        made.append(Client(Asking(self.following, lambda: self._wake(made[0])), info))
        self.clients.append(made[0])
        self.route(made[0])
        return made[0]

    def _wake(self, client: Client) -> None:
        client.is_woken = True

    def route(self, client: Client) -> None:
        """Do what a stream does when it is woken."""
        client.is_woken = False
        if client.result is not None or client.is_gone:
            return
        result = self._result(client)
        if isinstance(result, Elsewhere | Ticket):
            client.until_s = result.until_s
        if isinstance(result, Elsewhere):
            return
        client.asking.settle(result.id if isinstance(result, Pick) else "")
        client.ticket = result if isinstance(result, Ticket) else None
        client.result = None if isinstance(result, Ticket) else result

    def _result(self, client: Client) -> Pick | Rejection | Elsewhere | Ticket:
        now, wake = self.team.now, partial(self._wake, client)
        if client.ticket is not None:
            return self.router.resume(client.ticket, now=now)
        return self.router.route(client.request, now=now, wake=wake, asking=client.asking)

    def leave(self, client: Client) -> None:
        client.is_gone = True
        client.asking.settle()
        if client.ticket is not None:
            self.router.leave(client.ticket, now=self.team.now)

    def end(self, client: Client) -> None:
        if isinstance(client.result, Pick):
            self.pool.flights.finish(client.result.id, now=self.team.now)

    def told(self) -> int:
        return self.pool.told.num_in_flight


class Team:
    """Routers `aa`, `bb`, ...: all ask `aa` while they are linked to it.

    Messages wait until they are delivered, in order for each pair.
    """

    def __init__(
        self, num: int = 2, *, max_hold_s: float = 1.0, max_asked: int = 100, pods: int = NUM_PODS
    ) -> None:
        self.now, self.max_hold_s, self.max_asked = 1.0, max_hold_s, max_asked
        self.ways: dict[tuple[str, str], deque[object]] = {}
        self.cut: set[frozenset[str]] = set()
        self.num_questions: Counter[str] = Counter()
        ids = [2 * letter for letter in "abcdef"[:num]]
        self.members = {each: Member(each, self, range(1, pods + 1)) for each in ids}
        for one in ids:
            for other in ids:
                if one < other:
                    self.join(one, other)

    def join(self, one: str, other: str) -> None:
        self.cut.discard(frozenset((one, other)))
        self.ways[one, other], self.ways[other, one] = deque(), deque()
        for near, far in ((one, other), (other, one)):
            self.members[far].meet(near)
        if "aa" in (one, other):
            self.members[max(one, other)].before = "aa"

    def part(self, one: str, other: str) -> None:
        """Cut a link: what was under way is lost."""
        self.cut.add(frozenset((one, other)))
        del self.ways[one, other], self.ways[other, one]
        if "aa" in (one, other):
            self.members[max(one, other)].before = None
        for near, far in ((one, other), (other, one)):
            self.members[near].miss(far)

    def send(self, near: str, far: str, message: object) -> bool:
        way = self.ways.get((near, far))
        if way is None:
            return False
        way.append(message)
        self.num_questions[near] += isinstance(message, Question)
        return True

    def tell(self, near: str, message: object) -> None:
        for far in self.members:
            self.send(near, far, message)

    def deliver(self, near: str, far: str, num: int = 1) -> None:
        for _ in range(num):
            if self.ways.get((near, far)):
                message = self.ways[near, far].popleft()
                self.members[far].receive(near, message)

    def run(self) -> None:
        """Deliver everything, and let clients that are woken ask again."""
        while self._step():
            pass

    def _step(self) -> bool:
        woken = [
            partial(member.route, client)
            for member in self.members.values()
            for client in member.clients
            if client.is_woken
        ]
        under_way = [partial(self.deliver, *way) for way, waiting in self.ways.items() if waiting]
        settled = [each.look_at_settled for each in self.members.values() if each.settled]
        steps: list[Callable[[], None]] = [*woken, *settled, *under_way]
        for step in steps:
            step()
        return bool(steps)

    def pass_time(self, seconds: float) -> None:
        """Let time pass: what is due is looked at, and whoever waits too long asks again."""
        self.now += seconds
        for member in self.members.values():
            member.look()
            for client in member.clients:
                if client.until_s <= self.now:
                    member.route(client)
