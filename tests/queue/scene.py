"""A queue with a policy that has so much room, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from extproc.queue import Destinations, HoldQueue, QueueSettings, Ticket, Waiting
from extproc.queue.waiting import NOBODY
from extproc.tenancy import Claim
from extproc.types import EndpointView, Pick, Reason, Rejection, RequestInfo, Wait
from tests.builders import pick

REST_S = 1.0
"""Longer than the rest after any offer of these tests."""


@dataclass
class Scene:
    """A queue, a policy that has room for so many, and what came of it."""

    settings: QueueSettings = field(default_factory=QueueSettings)
    room: int = 0
    stuck: frozenset[str] = frozenset()  # models that get no endpoint
    is_busy: bool = False  # a request that is not held comes whenever room is freed
    until_s: float = inf
    reason: str = "room"  # for which those wait that get no endpoint
    looked: list[str] = field(default_factory=list)
    woken: list[str] = field(default_factory=list)
    sent: list[str] = field(default_factory=list)
    now: float = 0.0
    endpoints: Sequence[EndpointView] = ()
    holders: Callable[[str], Collection[str] | None] = lambda _model: None
    calls: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._waiting = NOBODY
        self.queue = HoldQueue(self.settings, at=self.calls.append, on_change=self._change)
        self.tickets: dict[str, Ticket] = {}

    def _change(self, waiting: Waiting) -> None:
        self._waiting = waiting

    @property
    def waiting(self) -> Waiting:
        """Who waits, as other routers are told now."""
        return self._waiting

    def hold(self, name: str, model: str = "", **fields: Any) -> Rejection | None:
        """Hold a request that arrives now, as told by fields of its ticket and its claim."""
        ttft_s = fields.pop("ttft_s", None)
        rest_s, num_bytes = fields.pop("rest_s", 0.0), fields.pop("num_bytes", 0)
        give_up_s, goal_s = fields.pop("give_up_s", inf), fields.pop("goal_s", ttft_s)
        adapter, subset = fields.pop("adapter", None), fields.pop("subset", None)
        reason = fields.pop("reason", "room")
        claim = Claim(ttft_s=ttft_s, **fields)
        request = RequestInfo(
            model or name,
            adapter,
            request_id=name,
            subset=subset,
            arrived_at_s=self.now,
            claim=claim,
        )
        ticket = Ticket(
            request,
            lambda: self.woken.append(name),
            give_up_s,
            deadline_s=inf if goal_s is None else self.now + goal_s,
            rest_s=rest_s,
            num_bytes=num_bytes,
            kind=request.model,
            again_s=self.until_s,
            reason=reason,
        )
        self.tickets[name] = ticket
        return self.queue.add(ticket, now=self.now)

    def look(self, ticket: Ticket, now: float) -> Pick | Rejection | Wait:
        self.looked.append(ticket.request.request_id)
        if not self.room or ticket.request.model in self.stuck:
            return Wait(self.until_s, self.reason)
        self.room -= 1
        self.sent.append(ticket.request.request_id)
        return pick(id=ticket.request.request_id)

    def free(self, room: int = 1, *, after_s: float = REST_S) -> list[str]:
        """Let so much room become free a while later; return who was sent."""
        self.now += after_s
        self.room, before = room, len(self.sent)
        if self.is_busy:
            self.queue.charge(RequestInfo("m", arrived_at_s=self.now))
        self.queue.freed(self.now)
        self.queue.offer(self.look, now=self.now, destinations=self.destinations)
        return self.sent[before:]

    @property
    def destinations(self) -> Destinations:
        return Destinations(self.endpoints, self.holders)

    @property
    def held(self) -> list[str]:
        return [ticket.request.request_id for ticket in self.queue]

    def result(self, name: str) -> Pick | Rejection | None:
        return self.tickets[name].result


def reasons(*results: Pick | Rejection | None) -> list[tuple[int, Reason]]:
    return [(each.status, each.reason) for each in results if isinstance(each, Rejection)]


def slow(**fields: Any) -> Scene:
    """Return a scene that one request leaves each second, and in which none waits."""
    scene = Scene(**fields)
    for number in range(3):
        scene.hold(f"before {number}")
    scene.free(0)
    for _ in range(3):
        scene.free(1)
    scene.sent.clear()
    scene.looked.clear()
    scene.woken.clear()
    return scene
