"""An offer of room: the policy is asked for one waiting request after the other, in order.

For alike requests it is asked once. An offer ends once `MAX_SENT` got an endpoint or `MAX_ASKED`
none; the next one goes on behind those that got none, and begins with the first again if room was
freed. Of each flow, `FLOW_ASKED` are asked for in vain in a round, so that a tenant with many kinds
of requests does not keep the others from being asked for.

A request that got nothing goes before others (`waiting`), and may have a slot kept
(`reservations`). Requests that have stepped back do not. They are asked for once a second, and for
what is freed once no request comes any more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Generator, Hashable, Iterable, Iterator, Sequence
from math import inf

from extproc.phrases import FOR_POD, FOR_SLOT
from extproc.queue.destinations import ALL, Destinations
from extproc.queue.plan import QueuePlan
from extproc.queue.reservations import Reservations
from extproc.queue.tickets import Ticket
from extproc.queue.waiting import TicketLine, Waiting
from extproc.types import RequestInfo, Wait

MAX_ASKED = 16
"""Requests that one offer asks for in vain, half of them the first in order."""
FLOW_ASKED = MAX_ASKED // 4
"""Of those, of one flow: clients may make as many kinds of requests as they like."""
MAX_SENT = 256
"""Requests that one offer gives an endpoint: other work comes in between, and pods get no more new
connections at once than they can accept.
"""
LATE_AGAIN_S = 1.0
"""From the time when those that have stepped back are asked for to the next."""
QUIET_S = 0.25
"""After the newest request: no further one is waited for."""
_Flow = tuple[int, str]  # its priority and its name


class Offers:
    """Makes offers, and knows how far they went.

    Attributes:
        next_s: When the first is to be asked for again.
        reservations: Of slots.
        line: The requests that go before others.

    Args:
        plan: Knows what each flow has got, and the settings.
    """

    def __init__(self, plan: QueuePlan) -> None:
        self._plan = plan
        self.next_s, self._back_s = inf, -inf
        self.reservations, self.line = Reservations(plan), TicketLine()
        self._destinations = Destinations()
        self._back: Collection[Ticket] = ()
        # In this offer: the kinds that were asked for in vain, by when to ask again; and requests.
        self._unplaced: dict[Hashable, float] = {}
        self._num_sent = 0
        # Flows by the kinds that were asked for in vain, since all of a flow's had been asked for.
        self._unplaced_flows: dict[Hashable, _Flow] = {}
        self._num_asked: Counter[_Flow] = Counter()  # in vain, in this round of the flows

    def begin_anew(self) -> None:
        """Have no request let another go first until the next offer, as settings are others."""
        self.reservations.clear()
        self.line.begin()

    def hold(self, ticket: Ticket, now: float) -> None:
        """Hold a newcomer that its policy was asked for."""
        self._ask_by(ticket, ticket.again_s, now)

    def let_go(self, ticket: Ticket) -> None:
        """Have nobody let a request go first that has gone, until the next offer."""
        self.line.begin()
        self.reservations.drop(self._adapter(ticket))

    @property
    def num_unplaced(self) -> int:
        """How many kinds the last offer asked for in vain."""
        return len(self._unplaced)

    def make(
        self,
        tickets: Iterable[Ticket],
        back: Sequence[Ticket],
        *,
        num_held: int,
        now: float,
        is_freed: bool,
        destinations: Destinations,
    ) -> Iterator[Ticket]:
        """Make an offer: yield each ticket that is to be asked for. Say what came of it, by `sent`
        or `not_placed`, before the next one is taken.

        Args:
            tickets: In order; those that have a result are passed over.
            back: Those of them that have stepped back, and hold up nobody.
            is_freed: The first in order are asked for again.
            destinations: Of requests, as things are now.
        """
        # As newcomers keep coming, no round may ever be over.
        if len(self._unplaced_flows) > 2 * num_held:
            self._unplaced_flows.clear()
        if not self._back:
            self._back_s = now + LATE_AGAIN_S
        self.next_s, self._back, self._unplaced, self._num_sent = inf, set(back), {}, 0
        self._take_in(destinations)
        self.line.begin()
        self.reservations.begin()
        # Without newcomers, what is freed would stay empty.
        is_for_late = now >= self._back_s or (is_freed and now >= self._plan.newest_s + QUIET_S)
        rest: Iterable[Ticket] | None = tickets
        while rest:
            rest = yield from self._round(rest, now, is_freed=is_freed, is_for_late=is_for_late)
        if rest is None:
            self.next_s = now
            self.line.add(0, ALL, now)  # wherever those wait that are behind
            return
        self.reservations.end()
        if now >= self._back_s:
            self._back_s = now + LATE_AGAIN_S
        if back:
            self.next_s = min(self.next_s, self._back_s)

    def _round(
        self, tickets: Iterable[Ticket], now: float, *, is_freed: bool, is_for_late: bool
    ) -> Generator[Ticket, None, list[Ticket] | None]:
        """Yield the tickets that are to be asked for in a round of the flows. Return those for
        which there were too many of their flow; None where it is enough for one offer.

        Args:
            is_for_late: Those that have stepped back are asked for, too.
        """
        passed_over, is_free = list[Ticket](), self.reservations.is_free
        for ticket in tickets:
            if ticket.result is not None:
                continue
            if not is_for_late and ticket in self._back:
                self._go_first(ticket)
                continue
            kind, flow = _kind(ticket), (ticket.priority, ticket.flow)
            is_again = is_freed and len(self._unplaced) < MAX_ASKED // 2
            is_again = is_again or is_free(self._adapter(ticket), self._destinations.slots_of)
            if kind in self._unplaced or (kind in self._unplaced_flows and not is_again):
                self._wait(ticket, self._unplaced.get(kind, inf), now)
            elif not is_again and self._num_asked[flow] >= FLOW_ASKED:
                passed_over.append(ticket)
            elif len(self._unplaced) >= MAX_ASKED or self._num_sent >= MAX_SENT:
                return None
            elif (until_s := self.behind_until_s(ticket.request, now)) > now:
                self._ask_by(ticket, until_s, now)
            else:
                yield ticket
        self._num_asked.clear()
        flows = {(ticket.priority, ticket.flow) for ticket in passed_over}
        self._unplaced_flows = {
            kind: flow for kind, flow in self._unplaced_flows.items() if flow in flows
        }
        return passed_over

    def sent(self, ticket: Ticket) -> None:
        """Count a ticket that has a result."""
        self._num_sent += 1
        self.reservations.drop(self._adapter(ticket))

    def not_placed(self, ticket: Ticket, wait: Wait, now: float) -> None:
        """Have a ticket go on waiting, and all of its kind."""
        kind, flow = _kind(ticket), (ticket.priority, ticket.flow)
        self._unplaced[kind], self._unplaced_flows[kind] = wait.until_s, flow
        self._num_asked[flow] += 1
        ticket.reason, ticket.again_s = wait.reason, now
        self._wait(ticket, wait.until_s, now)

    def _wait(self, ticket: Ticket, until_s: float, now: float) -> None:
        """Have a request go first that got nothing, keep a slot for it, and ask again by then."""
        is_back, reason = ticket in self._back, ticket.reason
        self._ask_by(ticket, inf if is_back else until_s, now)
        reach = self._go_first(ticket)
        adapter = self._adapter(ticket)
        if reason == FOR_SLOT and adapter is not None and reach and not is_back:
            self.reservations.add(ticket, adapter, self._destinations.slots(reach), now=now)

    def _go_first(self, ticket: Ticket) -> int:
        """Have a request go before those of lower priorities; return where it may go."""
        reach = self._destinations.of(ticket.request)
        priority, until_s = ticket.priority, ticket.held_at_s + self._plan.settings.slot_hold_s
        if ticket in self._back:
            priority, until_s = min(0, priority), -inf  # before those below 0 alone
        if ticket.reason != FOR_POD:
            self.line.add(priority, reach, until_s)
        return reach

    def _ask_by(self, ticket: Ticket, until_s: float, now: float) -> None:
        """Have a request asked for again then, or before if it has a time of its own."""
        ticket.again_s = until_s if ticket.again_s <= now else min(ticket.again_s, until_s)
        late_s = ticket.late_s if ticket.is_refusable else inf
        self.next_s = min(self.next_s, ticket.again_s, late_s)

    # --- who goes first ----------------------------------------------------------------------

    def behind_until_s(self, request: RequestInfo, now: float) -> float:
        """Return until when a request has to let others go first; `now` where it need not."""
        line = self.line
        is_any = line.own or line.from_peers
        return line.until_s(request, self._destinations.of(request), now) if is_any else now

    def hear(
        self, router_id: str, waiting: Waiting, destinations: Destinations, *, now: float
    ) -> bool:
        """Have requests that wait at another router go first, in place of its earlier ones. Return
        whether fewer of them hold up other requests.
        """
        self._take_in(destinations)
        return self.line.hear(router_id, waiting, now + self._plan.settings.slot_hold_s)

    def may_meet(self, one: Ticket, other: Ticket) -> bool:
        """Return whether two requests may go to one endpoint, as far as is known."""
        return bool(self._destinations.of(one.request) & self._destinations.of(other.request))

    def _take_in(self, destinations: Destinations) -> None:
        """Take the endpoints as they are now."""
        self._destinations = destinations
        self.line.know(destinations.addresses)

    def _adapter(self, ticket: Ticket) -> str | None:
        adapter = ticket.request.adapter
        return None if adapter is None else self._destinations.served(adapter)


def _kind(ticket: Ticket) -> Hashable:
    """Return what stands for the policy's answer to a ticket: it alone, or all of its kind."""
    return ticket if ticket.kind is None else ticket.kind
