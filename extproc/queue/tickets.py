"""Held requests: a request as the queue sees it, its level, and how many there are."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable
from enum import StrEnum
from math import inf
from typing import Any

from msgspec import Struct

from extproc.phrases import FOR_ADAPTER, FOR_POD, held
from extproc.rejections import (
    adapter_unavailable,
    late,
    no_endpoints,
    saturated,
    shutting_down,
)
from extproc.types import Pick, Reason, Rejection, RequestInfo


class QueueSettings(Struct, frozen=True):
    """Settings of the queue.

    Attributes:
        order: Of one flow: `in_time` or `first_come` (`tenantorder`).
        fair: Flows have turns, by the service that each got.
        ageing_s: So much waiting counts as one step of priority.
        slot_hold_s: For which a slot is kept for a request that waits, and those of lower
            priorities let it go first; 0 for not at all.
        slot_turn_s: For which an adapter keeps its slot while another one's request waits as long;
            None for what follows from its costs, 0 for as long as it has requests.
        max_requests: Held at a time.
        max_bytes: Of their bodies, where those have to be kept.
    """

    order: str = "in_time"
    fair: bool = True
    ageing_s: float = 10.0
    slot_hold_s: float = 10.0
    slot_turn_s: float | None = None
    max_requests: int = 20_000
    max_bytes: int = 256 * 1024 * 1024


class Ticket(Struct, eq=False):
    """One held request and, in the end, its result.

    Attributes:
        request: With adapter and claim.
        wake: Called once there is a result; must not ask for it from within the call.
        give_up_s: When it is refused, if it is still held by then: its result is looked for.
        deadline_s: By when its first token is wanted; infinite for whenever.
        held_at_s: When its hold began.
        rest_s: From its dispatch to its first token on an idle endpoint, by estimate.
        num_bytes: Of its body, kept as long as it is held.
        kind: The properties that it shares with requests that its policy answers alike; None for
            none.
        again_s: When its policy is asked again at the latest.
        reason: The policy's reason for the hold, a slug.
        result: None as long as it is held.
        error: The error that its policy raised.
        arrived_at_s: Of the request, like all that follows: each offer looks at that of all.
        priority: Before ageing.
        flow: Whose turns it counts for (`Claim.flow`).
        late_s: From when on it cannot have its first token in time.
        is_refusable: It is refused once it is late: somebody has set it an objective.
    """

    request: RequestInfo
    wake: Callable[[], None]
    give_up_s: float
    deadline_s: float = inf
    held_at_s: float = 0.0
    rest_s: float = 0.0
    num_bytes: int = 0
    again_s: float = inf
    reason: str = ""
    kind: Hashable = None
    result: Pick | Rejection | None = None
    error: Exception | None = None
    arrived_at_s: float = 0.0
    priority: int = 0
    flow: str = ""
    late_s: float = inf
    is_refusable: bool = False

    def __post_init__(self) -> None:
        request, claim = self.request, self.request.claim
        self.arrived_at_s, self.priority, self.flow = (
            request.arrived_at_s,
            claim.priority,
            claim.flow,
        )
        self.late_s = self.deadline_s - self.rest_s
        self.is_refusable = claim.ttft_s is not None

    def fail(self, error: Exception) -> None:
        """Have `resume` raise what its policy raised."""
        self.error = error


# Strict priorities among held requests, with ageing.


def level(ticket: Ticket, now: float, ageing_s: float = inf) -> int:
    """Return its priority, one higher for each `ageing_s` (above 0) that it has waited.

    A request that is wanted by some time does not age: that time sets its order. One of a priority
    below 0 stays below 0, as it is dropped first when other requests would fail.

    Without ageing (inf) the lowest may wait for ever. With priorities from p (0 or more) to q, a
    ticket is at q or above after (q - p) * ageing_s. A ticket that arrives (q - p + 1) * ageing_s
    or more after it is at a lower level for as long as both are held. So, whatever the order within
    a level, it waits for no more requests than those held when it arrived and those that arrive
    within that time after it.
    """
    priority = ticket.priority
    if ticket.deadline_s < inf:
        return priority
    waited_s = max(0.0, now - ticket.arrived_at_s)
    aged = priority + int(waited_s // ageing_s)
    return aged if priority >= 0 else min(aged, -1)


# How much is held, and whether one more request is.


class Occupancy:
    """Counts of what is held.

    Attributes:
        num_by_claim: Requests by route and priority.
        num_bytes: Of their bodies, that are kept.
    """

    def __init__(self) -> None:
        self.num_by_claim: Counter[tuple[str, int]] = Counter()
        self.num_bytes = 0
        self._bytes_by_claim: Counter[tuple[str, int]] = Counter()
        # By priority and flow, in order of their holds; and the bytes of each.
        self._flows: defaultdict[tuple[int, str], dict[Ticket, None]] = defaultdict(dict)
        self._bytes: Counter[tuple[int, str]] = Counter()

    def add(self, ticket: Ticket) -> None:
        """Count a request."""
        self._flows[ticket.priority, ticket.flow][ticket] = None
        self._count(ticket, 1)

    def remove(self, ticket: Ticket) -> None:
        """Count a request no longer."""
        held = self._flows[ticket.priority, ticket.flow]
        del held[ticket]
        if not held:
            del self._flows[ticket.priority, ticket.flow]
        self._count(ticket, -1)

    def _count(self, ticket: Ticket, sign: int) -> None:
        """Count a request, or no longer; forget what comes to nothing, as clients choose keys."""
        claim, num_bytes = ticket.request.claim, sign * ticket.num_bytes
        self.num_bytes += num_bytes
        counts: tuple[tuple[Counter[Any], Any, int], ...] = (
            (self.num_by_claim, (claim.route, claim.priority), sign),
            (self._bytes_by_claim, (claim.route, claim.priority), num_bytes),
            (self._bytes, (ticket.priority, ticket.flow), num_bytes),
        )
        for counter, key, num in counts:
            counter[key] += num
            if not counter[key]:
                del counter[key]

    def is_route_full(self, ticket: Ticket) -> bool:
        """Return whether its route's own bounds leave no room for it."""
        claim = ticket.request.claim
        return any(
            most is not None and more + _of_route(counter, claim.route) > most
            for most, more, counter in (
                (claim.max_held, 1, self.num_by_claim),
                (claim.max_held_bytes, ticket.num_bytes, self._bytes_by_claim),
            )
        )

    def below_zero(self) -> list[Ticket]:
        """Return those of priorities below 0."""
        return [ticket for (each, _), held in self._flows.items() if each < 0 for ticket in held]

    def to_displace(
        self, ticket: Ticket, *, num: int, num_bytes: int, is_fair: bool
    ) -> list[Ticket] | None:
        """Return the held requests that make way for a newcomer where the queue is full: of the
        lowest priority, always the newest of the flow that holds most. None where that would be the
        newcomer.

        Takes 0.1 us for each flow.

        Args:
            num: Requests too many, with the newcomer.
            num_bytes: Likewise.
            is_fair: Flows count; without, only requests of lower priorities make way.
        """
        found, by_bytes = list[Ticket](), num_bytes > 0
        for priority in sorted({each for each, _ in self._flows if each <= ticket.priority}):
            flows = {flow: held for (each, flow), held in self._flows.items() if each == priority}
            newest = {flow: reversed(held) for flow, held in flows.items()}
            sizes = {f: self._bytes[priority, f] if by_bytes else len(h) for f, h in flows.items()}
            own = sizes.get(ticket.flow, 0) + (ticket.num_bytes if by_bytes else 1)
            while sizes[most := max(sizes, key=sizes.__getitem__)]:
                if priority == ticket.priority and not (is_fair and sizes[most] > own):
                    return None
                last = next(newest[most])
                sizes[most] -= last.num_bytes if by_bytes else 1
                found.append(last)
                num, num_bytes = num - 1, num_bytes - last.num_bytes
                if num <= 0 and num_bytes <= 0:
                    return found
        return None


def _of_route(by_claim: Counter[tuple[str, int]], route: str) -> int:
    return sum(num for (each, _), num in by_claim.items() if each == route)


# How holds end, and what is said of those that end with a refusal.


class HoldEnd(StrEnum):
    """How the hold of a request ended, or why it did not begin: a closed set, a metric's label."""

    PICKED = "picked"
    LATE = "late"
    EXPIRED = "expired"
    FULL = "full"
    ROUTE_FULL = "route_full"
    DISPLACED = "displaced"
    SHED = "shed"  # of a priority below 0, when one of 0 or above was refused
    NO_WAIT = "no_wait"
    SHUTTING_DOWN = "shutting_down"  # this router stops
    SATURATED = "saturated"  # when it was asked for again, every endpoint was at its cap
    NO_ENDPOINTS = "no_endpoints"  # likewise, none was ready
    LEFT = "left"  # its client did


_WHY = {
    HoldEnd.LATE: "Its first token would come late",
    HoldEnd.EXPIRED: "It was held for the longest time allowed",
    HoldEnd.FULL: "The queue is full",
    HoldEnd.ROUTE_FULL: "Its route has as many requests held as allowed",
    HoldEnd.DISPLACED: "The queue is full, and its place went to a request of a higher "
    "priority, or of a tenant that holds fewer",
    HoldEnd.SHED: "A request of priority 0 or above waited in vain, so those below 0 are refused "
    "too",
    HoldEnd.NO_WAIT: "Requests of its route do not wait",
    HoldEnd.SHUTTING_DOWN: "The router stops",
}


def end_of(result: Pick | Rejection) -> HoldEnd:
    """Return how a request ended that was asked for again."""
    if isinstance(result, Pick):
        return HoldEnd.PICKED
    return HoldEnd.SATURATED if result.reason is Reason.SATURATED else HoldEnd.NO_ENDPOINTS


def refusal(
    end: HoldEnd, ticket: Ticket, *, num_held: int, service_s: float, retry_after_s: int, now: float
) -> Rejection:
    """Return the answer to a request that is not held, or no longer.

    Args:
        service_s: Mean time from one dispatch to the next; 0 for unknown.
    """
    pace = f", about {_number(1 / service_s)} leave a second" if service_s else ""
    own = (
        f"; it was {held(now - ticket.held_at_s, ticket.reason)}" if now > ticket.held_at_s else ""
    )
    why, model = f"{_WHY[end]}: {num_held} held{pace}{own}.", ticket.request.client_model
    if end is HoldEnd.SHUTTING_DOWN:
        return shutting_down(model, why)
    if ticket.reason == FOR_POD:  # it is not too much that was asked for
        return no_endpoints(model, why)
    if end is HoldEnd.EXPIRED and ticket.reason == FOR_ADAPTER:
        return adapter_unavailable(model, why=why)
    if end is HoldEnd.LATE:
        return late(model, retry_after_s, why)
    return saturated(model, retry_after_s, why, is_expired=end is HoldEnd.EXPIRED)


def _number(number: float) -> str:
    return f"{number:.0f}" if number >= 10 else f"{number:.2g}"
