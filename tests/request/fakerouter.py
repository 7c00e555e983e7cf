"""A router for tests of the stream: answers what the test says and keeps what it was asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from extproc.learned.evidence import Evidence, StreamEnd
from extproc.openai import LISTED, Spelling
from extproc.queue import Ticket
from extproc.rejections import model_not_found
from extproc.request import messages as m
from extproc.request.interfaces import Decided, StreamParts, StreamSettings
from extproc.request.listbudget import Lists
from extproc.request.lostrewrites import LostRewrites
from extproc.request.sessions import SessionSources
from extproc.request.stream import Stream
from extproc.routing.rewrites import Drawn, Rewrites, Rule
from extproc.types import ModelCard, Outcome, Pick, Rejection, RequestInfo, Wait
from tests.builders import models_body, pick

PICK = pick()
IN_HEADER = SessionSources("header:x-session")


@dataclass
class FakeRouter:
    """Answers every request with `result`, once it has been asked for in vain `num_waits` times.

    A wait as a result holds it for as long as that stays.
    """

    result: Pick | Rejection | Wait = PICK
    cards: Sequence[ModelCard] = ()
    num_waits: int = 0
    uses_cached_bytes: bool = False
    lists: Lists = field(default_factory=Lists)
    routed: list[RequestInfo] = field(default_factory=list)
    finished: list[tuple[Pick, Outcome, float]] = field(default_factory=list)
    verdicts: list[tuple[Evidence, int]] = field(default_factory=list)
    rejections: list[Rejection] = field(default_factory=list)
    rejected_headers: list[Mapping[str, str]] = field(default_factory=list)
    moved: list[tuple[Pick, str, float]] = field(default_factory=list)
    subsets: list[frozenset[str] | None] = field(default_factory=list)
    num_passes: int = 0  # of a list, before the last one
    num_made: int = 0
    num_looks: int = 0
    num_left: int = 0
    decisions: list[Pick | Rejection | Ticket] = field(default_factory=list)
    ends: list[Outcome] = field(default_factory=list)
    hold_s: float | None = None  # held with a ticket for so long, from its arrival on
    tickets: list[Ticket] = field(default_factory=list)
    held_bytes: list[int] = field(default_factory=list)
    tickets_left: list[Ticket] = field(default_factory=list)
    targets: Mapping[str, str] = field(default_factory=dict)
    declared: Sequence[str] = ()
    asked_targets: list[tuple[str, str]] = field(default_factory=list)
    spelling: Spelling = LISTED
    lost_rewrites: LostRewrites = field(default_factory=LostRewrites)
    decides: Decided | None = None
    drawn: int = 0  # the number of every target
    refused: list[int] = field(default_factory=list)  # by their numbers

    def stream(
        self,
        settings: StreamSettings | None = None,
        wake: Callable[[], None] = lambda: None,
        envoy: str = "",
    ) -> Stream:
        """A stream that calls this router."""
        return Stream(self.parts(), settings or StreamSettings(), wake, envoy)

    def parts(self) -> StreamParts:
        """This router and all else that a stream calls."""
        rewrites = AskedRewrites(self.asked_targets, self.spelling, self.drawn, self.refused)
        rewrites.configure(
            [Rule(name, (name,), ((to, None),)) for name, to in self.targets.items()]
        )
        rewrites.declare(self.declared)
        parts = StreamParts(self, self, rewrites, self, self.lists, self, lambda: 0.0, self.decides)
        return replace(parts, lost_rewrites=self.lost_rewrites)

    def asked(self, now: float) -> None:
        pass

    def decided(
        self, result: Pick | Rejection | Ticket, seconds: float | None, *, now: float
    ) -> None:
        self.decisions.append(result)

    def ended(self, pick: Pick, outcome: Outcome) -> None:
        self.ends.append(outcome)

    def left(self) -> None:
        self.num_left += 1

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

    def leave(self, ticket: Ticket, *, now: float) -> None:
        self.tickets_left.append(ticket)

    def finish(self, pick: Pick, end: StreamEnd, *, now: float) -> bool:
        self.verdicts.append((end.verdict, end.num_bytes))
        self.finished.append((pick, end.outcome, now))
        return len(self.finished) == 1

    def served(self, pick: Pick, address: str, *, now: float) -> None:
        if address != pick.address:
            self.moved.append((pick, address, now))

    def rejected(self, rejection: Rejection, headers: Mapping[str, str]) -> None:
        self.rejections.append(rejection)
        self.rejected_headers.append(headers)

    def outage(self, subset: frozenset[str] | None, *, now: float) -> Rejection | None:
        self.subsets.append(subset)
        return self.result if isinstance(self.result, Rejection) else None

    def make_body(
        self, subset: frozenset[str] | None, tenant: str, *, now: float
    ) -> Iterator[bytes | Rejection]:
        self.subsets.append(subset)
        for _ in range(self.num_passes):
            self.num_made += 1
            yield b""
        yield self.result if isinstance(self.result, Rejection) else models_body(self.cards)

    def find(
        self, name: str, subset: frozenset[str] | None, tenant: str, *, now: float
    ) -> ModelCard | Rejection:
        self.subsets.append(subset)
        return next((card for card in self.cards if card.id == name), model_not_found(name))


class AskedRewrites(Rewrites):
    """Rules that keep what they were asked."""

    def __init__(
        self, asked: list[tuple[str, str]], spelling: Spelling, drawn: int, refused: list[int]
    ) -> None:
        super().__init__(rng=Random(1), spelling=spelling)
        self._asked, self._drawn, self._refused = asked, drawn, refused

    def draw(self, model: str, hinted: str = "") -> Drawn:
        self._asked.append((model, hinted))
        return super().draw(model, hinted)._replace(number=self._drawn)

    def refused(self, number: int) -> None:
        self._refused.append(number)


@dataclass
class Exchange:
    """One stream and what it was told, a moment later each time."""

    router: FakeRouter
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
    router = FakeRouter(result, cards)
    return Exchange(router, router.stream(StreamSettings(**settings)))
