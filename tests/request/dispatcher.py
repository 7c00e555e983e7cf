"""A dispatcher for tests of the stream: answers what the test says and keeps what it was asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from extproc.openai import Spelling, models_body
from extproc.queue import Ticket
from extproc.rejections import model_not_found
from extproc.request import messages as m
from extproc.request.interfaces import StreamSettings
from extproc.request.listbudget import Lists
from extproc.request.stream import Stream
from extproc.types import ModelCard, Outcome, Pick, Rejection, RequestInfo, Wait
from tests.builders import pick

PICK = pick()


@dataclass
class FakeDispatcher:
    """Answers every request with `result`, once it has been asked for in vain `num_waits` times.

    A wait as a result holds it for as long as that stays.
    """

    result: Pick | Rejection | Wait = PICK
    cards: Sequence[ModelCard] = ()
    num_waits: int = 0
    uses_prefix_hashes: bool = False
    lists: Lists = field(default_factory=Lists)
    routed: list[RequestInfo] = field(default_factory=list)
    finished: list[tuple[Pick, Outcome, float]] = field(default_factory=list)
    rejections: list[Rejection] = field(default_factory=list)
    rejected_headers: list[Mapping[str, str]] = field(default_factory=list)
    moved: list[tuple[Pick, str, float]] = field(default_factory=list)
    subsets: list[frozenset[str] | None] = field(default_factory=list)
    num_looks: int = 0
    num_gone: int = 0
    hold_s: float | None = None  # held with a ticket for so long, from its arrival on
    tickets: list[Ticket] = field(default_factory=list)
    held_bytes: list[int] = field(default_factory=list)
    left: list[Ticket] = field(default_factory=list)
    targets: Mapping[str, str] = field(default_factory=dict)
    declared: Sequence[str] = ()
    asked_targets: list[tuple[str, str]] = field(default_factory=list)
    spelling: Spelling = field(default_factory=lambda: Spelling(lambda _name: None))

    @property
    def may_rewrite(self) -> bool:
        return bool(self.targets or self.declared or self.spelling.joins)

    def concerns(self, model: str) -> bool:
        is_spelled = self.spelling.full(self.spelling.listed(model)) != model
        return model in self.targets or model in self.declared or is_spelled

    def is_declared(self, model: str) -> bool:
        return model in self.declared

    def target_of(self, model: str, hinted: str) -> str:
        self.asked_targets.append((model, hinted))
        return self.targets.get(model, hinted or model)

    def route(
        self, request: RequestInfo, *, now: float, wake: Callable[[], None], num_bytes: int
    ) -> Pick | Rejection | Ticket:
        self.routed.append(request)
        self.num_looks += 1
        if self.hold_s is None and not self.num_waits and not isinstance(self.result, Wait):
            return self.result
        give_up_s = self.result.until_s if isinstance(self.result, Wait) else now
        if self.hold_s is not None:
            give_up_s = request.arrived_at_s + self.hold_s
        self.tickets.append(Ticket(request, wake, give_up_s))
        self.held_bytes.append(num_bytes)
        return self.tickets[-1]

    def resume(self, ticket: Ticket, *, now: float) -> Pick | Rejection | Ticket:
        self.num_looks += 1
        is_over = self.hold_s is None and self.num_looks > self.num_waits
        if is_over and not isinstance(self.result, Wait):
            return self.result
        ticket.give_up_s = max(ticket.give_up_s, now)
        return ticket.result or ticket

    def gone(self, ticket: Ticket | None, *, now: float) -> None:
        self.num_gone += 1
        if ticket is not None:
            self.left.append(ticket)

    def finish(self, pick: Pick, outcome: Outcome, *, now: float) -> None:
        self.finished.append((pick, outcome, now))

    def served(self, pick: Pick, address: str, *, now: float) -> None:
        self.moved.append((pick, address, now))

    def rejected(self, rejection: Rejection, headers: Mapping[str, str]) -> None:
        self.rejections.append(rejection)
        self.rejected_headers.append(headers)

    def outage(self, subset: frozenset[str] | None, *, now: float) -> Rejection | None:
        self.subsets.append(subset)
        return self.result if isinstance(self.result, Rejection) else None

    def models_body(
        self, subset: frozenset[str] | None, tenant: str, *, now: float
    ) -> bytes | Rejection:
        self.subsets.append(subset)
        return self.result if isinstance(self.result, Rejection) else models_body(self.cards)

    def model(
        self, name: str, subset: frozenset[str] | None, tenant: str, *, now: float
    ) -> ModelCard | Rejection:
        self.subsets.append(subset)
        return next((card for card in self.cards if card.id == name), model_not_found(name))


@dataclass
class Exchange:
    """One stream and what it was told, a moment later each time."""

    dispatcher: FakeDispatcher
    stream: Stream
    now: float = 0.0

    def tell(self, *events: m.Event) -> list[m.Command]:
        """Deliver events in order; all that they were answered with."""
        commands: list[m.Command] = []
        for event in events:
            self.now += 1.0
            commands += self.stream.handle(event, now=self.now)
        return commands


def begin(
    result: Pick | Rejection | Wait = PICK, cards: Sequence[ModelCard] = (), **settings: Any
) -> Exchange:
    """A new stream, configured with `settings`."""
    dispatcher = FakeDispatcher(result, cards)
    return Exchange(dispatcher, Stream(dispatcher, StreamSettings(**settings), lambda: None))
