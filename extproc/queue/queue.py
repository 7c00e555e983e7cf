"""The queue: requests that their policy held, until there is room for them.

1. One order (`plan`): levels (priority and age), in a level the tenant that was served least, of
   its requests the configured order (`tenantorder`). Where too many wait, requests that cannot be
   in time step back: they come after those that can be, but for each eighth place, and hold up
   nobody. One with an objective of its own is refused once the queue's pace shows that it will be
   late.
2. A place goes to the first request in order that it fits (`offers`). Nobody polls: every event
   that frees room calls `freed`, and the policy is asked for one request after the other. Between
   two offers is a rest, so that they take a tenth of a core at most, requests that got an endpoint
   aside (`schedule`). Newcomers stand in line meanwhile.
3. For a request that waits for a slot, one is kept (`reservations`): by the order, and after a
   turn. Requests of lower priorities let those that wait go first (`waiting`).
4. The queue is bounded by number, bytes and time. Where it is full, the newest request of the
   lowest priority is refused, of the tenant that holds most. That may be the newcomer. Where one of
   priority 0 or above has waited for as long as it may, those below 0 that wait for the same
   endpoints are refused before it. An objective is a client's own wish, and sheds nobody.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from math import ceil

from extproc.pods.listeners import Slot
from extproc.queue.destinations import NOWHERE, Destinations
from extproc.queue.offers import Offers
from extproc.queue.plan import QueuePlan
from extproc.queue.schedule import PEER_OFFERS_FIRST_S, DispatchPace, Schedule
from extproc.queue.tickets import (
    HoldEnd,
    Occupancy,
    QueueSettings,
    Ticket,
    end_of,
    refusal,
)
from extproc.queue.waiting import NOBODY, Waiting
from extproc.types import Pick, Rejection, RequestInfo, Wait

MAX_RETRY_AFTER_S = 60
Choose = Callable[[Ticket, float], Pick | Rejection | Wait]


class HoldQueue:
    """The held requests of one router.

    Args:
        settings: To begin with.
        at: Has `offer` called at a time, instead of the time that it was called with before.
            Without it, requests wait until somebody else makes an offer.
        on_change: Called with the waiting requests, for other routers, when they have changed; None
            where nobody asks for that. They are as after the last offer. When one of them has gone,
            none holds up others until the next offer, which is made at once and asks for the first
            in order. At another router those would be overtaken meanwhile.

    Attributes:
        settings: In force.
        schedule: When `offer` is to be called.
        pace: How fast requests leave.
        occupancy: How much is held.
        reservations: Of slots, for those that wait for one.
        num_ended: Requests by how their hold ended, or why it did not begin.
        charge: Counts the service that a request gets, held before or not, for its tenant.
        settle: Counts the output of a request that has ended, in place of what it was charged.
        charge_elsewhere: Counts the service that a request gets of another router.
    """

    def __init__(
        self,
        settings: QueueSettings | None = None,
        *,
        at: Callable[[float], None] = lambda _at_s: None,
        on_change: Callable[[Waiting], None] | None = None,
    ) -> None:
        self.settings = settings or QueueSettings()
        self._plan = plan = QueuePlan(self.settings)
        self.charge, self.settle = plan.charge, plan.settle
        self.charge_elsewhere = plan.charge_elsewhere
        self.schedule = Schedule(at)
        self._on_change = on_change
        self._tickets: dict[Ticket, None] = {}
        self._is_closed = False
        self.occupancy = Occupancy()
        self._offers = Offers(self._plan)
        self.reservations = self._offers.reservations
        self._waiting = NOBODY
        self.pace = DispatchPace()
        self.num_ended: Counter[HoldEnd] = Counter(dict.fromkeys(HoldEnd, 0))

    def __len__(self) -> int:
        return len(self._tickets)

    def __iter__(self) -> Iterator[Ticket]:
        return iter(self._tickets)

    def oldest_s(self, now: float) -> float:
        """Return for how long the oldest has been held; 0 where nothing is."""
        oldest = next(iter(self._tickets), None)
        return 0.0 if oldest is None else now - oldest.held_at_s

    def configure(self, settings: QueueSettings) -> None:
        """Apply other settings; who is held already stays."""
        self.settings = self._plan.settings = settings
        self._offers.begin_anew()

    # --- in and out --------------------------------------------------------------------------

    def add(self, ticket: Ticket, *, now: float) -> Rejection | None:
        """Hold a request, or return why not."""
        end = self._refusal(ticket, now)
        if end is not None:
            self.num_ended[end] += 1
            return self._refused(ticket, end, now)
        self.pace.advance(now, is_held=True)
        self._tickets[ticket] = None
        self.occupancy.add(ticket)
        self._plan.hold(ticket)
        self._offers.hold(ticket, now)
        self._arrange()
        return None

    def close(self, *, now: float) -> None:
        """Refuse all that are held, and from now on all that would be: this router stops."""
        self._is_closed = True
        for ticket in list(self._tickets):
            self._refuse(ticket, HoldEnd.SHUTTING_DOWN, now)

    def remove(self, ticket: Ticket, *, now: float) -> None:
        """Forget a request whose client has gone, if it is held."""
        if ticket in self._tickets:
            self._drop(ticket, HoldEnd.LEFT, now)
            self._unblock(ticket, now)

    def expire(self, ticket: Ticket, *, now: float) -> None:
        """Refuse a request if it has been held for as long as it may be."""
        if ticket in self._tickets and now >= ticket.give_up_s:
            self._refuse(ticket, HoldEnd.EXPIRED, now)

    def freed(self, now: float) -> None:
        """Record that there may be room where there was none, to be offered from then on."""
        if self._tickets:
            self.schedule.freed(now)
            self._arrange()

    # --- other routers -----------------------------------------------------------------------

    def has_line(self) -> bool:
        """Return whether somebody waits, here or at another router, whom a newcomer may have to let
        go."""
        line = self._offers.line
        return bool(self._tickets or line.own or line.from_peers)

    def hear(
        self, router_id: str, waiting: Waiting, *, now: float, destinations: Destinations = NOWHERE
    ) -> None:
        """Have those that wait at another router go first, instead of those that did before."""
        if self._offers.hear(router_id, waiting, destinations, now=now):
            self.freed(now)

    def _note(self) -> None:
        """Note who waits now, if anybody wants to know."""
        if self._on_change is None:
            return
        waiting = self._offers.line.for_peers() if self._tickets else NOBODY
        if waiting != self._waiting:
            self._waiting = waiting
            self._on_change(waiting)

    # --- offers ------------------------------------------------------------------------------

    def is_due(self, now: float) -> bool:
        """Return whether those that wait are to be asked for now."""
        return bool(self._tickets) and now >= self.schedule.due_s(self._offers.next_s)

    def freed_elsewhere(self, left: Sequence[Slot], now: float) -> None:
        """Record that another router's requests have ended, and which slots adapters have left:
        that router gives the room away first."""
        until_s = now + PEER_OFFERS_FIRST_S
        for address, adapter in left:
            self.reservations.freed_elsewhere(address, adapter, until_s=until_s)
        if self._tickets:
            self.freed(until_s)

    def must_wait_until_s(self, request: RequestInfo, now: float) -> float | None:
        """Return when a newcomer is asked for that lets others go first; None if it need not."""
        offers, promised_s = self._offers, None
        if self._tickets:
            promised_s = self.schedule.promised_s(offers.next_s, now=now)
        if promised_s is not None:
            return promised_s
        until_s = offers.behind_until_s(request, now)
        return until_s if until_s > now else None

    def offer(self, choose: Choose, *, now: float, destinations: Destinations = NOWHERE) -> None:
        """Offer what room there is, in order; call it as `schedule` says, or whenever it is due.

        Args:
            choose: Asks the policy for one request at a time, and counts the pick.
            destinations: Of requests, as things are now.
        """
        self.schedule.forget()
        if self.is_due(now):
            num_held, offers = len(self._tickets), self._offers
            tickets, back = self._plan.make(self._tickets, now, self.pace.service_s)
            for ticket in back:
                if ticket.is_refusable and ticket in self._tickets:  # else it went before another
                    self._refuse(ticket, HoldEnd.LATE, now)
            is_freed = self.schedule.begin(now)
            for ticket in offers.make(
                tickets,
                back,
                num_held=num_held,
                now=now,
                is_freed=is_freed,
                destinations=destinations,
            ):
                result = choose(ticket, now)
                if isinstance(result, Wait):
                    offers.not_placed(ticket, result, now)
                else:
                    offers.sent(ticket)
                    self._settle(ticket, end_of(result), result, now)
            self.schedule.rest(num_held, offers.num_unplaced, now=now)
            self._note()
        self._arrange()

    def ask(self, ticket: Ticket, choose: Choose, *, now: float) -> None:
        """Ask for one request out of turn, if it is held."""
        if ticket not in self._tickets:
            return
        result = choose(ticket, now)
        if isinstance(result, Wait):
            ticket.reason = result.reason
        else:
            self._settle(ticket, end_of(result), result, now)

    def adapters(self, now: float, *, limit: int | None = None) -> list[str]:
        """Return the adapters that held requests need, each once, the next in order first. With a
        limit, return the first of them.

        That is by priority, by turns, and by arrival whatever `order` says: a request that waits
        for a load gives up at the end, and is not served late. The newest first would let older
        requests give up even where loads keep up with requests.
        """
        return self._plan.adapters(self._tickets, now)[:limit]

    def _settle(self, ticket: Ticket, end: HoldEnd, result: Pick | Rejection, now: float) -> None:
        if isinstance(result, Pick):
            self.charge(ticket.request)
            self._plan.sent(ticket, now)
        self._drop(ticket, end, now)
        ticket.result = result
        if isinstance(result, Pick):
            self.pace.sent()
        ticket.wake()

    def _drop(self, ticket: Ticket, end: HoldEnd, now: float) -> None:
        self.num_ended[end] += 1
        del self._tickets[ticket]
        self.occupancy.remove(ticket)
        self._plan.release(ticket)
        if not self._tickets:
            self._note()
        self.pace.advance(now, is_held=bool(self._tickets))

    def _unblock(self, ticket: Ticket, now: float) -> None:
        """Have those asked for at once that a request held up which has gone, out of turn."""
        self._offers.let_go(ticket)
        self.freed(now)

    # --- refusals ----------------------------------------------------------------------------

    def _refuse(self, ticket: Ticket, end: HoldEnd, now: float) -> None:
        if end is HoldEnd.EXPIRED and ticket.request.claim.priority >= 0:
            for other in self.occupancy.below_zero():
                if self._offers.may_meet(other, ticket):
                    self._refuse(other, HoldEnd.SHED, now)
        self._settle(ticket, end, self._refused(ticket, end, now), now)
        self._unblock(ticket, now)

    def _refused(self, ticket: Ticket, end: HoldEnd, now: float) -> Rejection:
        """Return the answer to a request that is refused."""
        return refusal(
            end,
            ticket,
            num_held=len(self._tickets),
            service_s=self.pace.service_s,
            retry_after_s=self.retry_after_s(),
            now=now,
        )

    def retry_after_s(self) -> int:
        """Return in how many seconds all that are held now will have gone, by the queue's pace."""
        return max(1, min(MAX_RETRY_AFTER_S, ceil(len(self._tickets) * self.pace.service_s)))

    def _refusal(self, ticket: Ticket, now: float) -> HoldEnd | None:
        """Return why a newcomer is not held, if it is not; it may take the place of held
        requests.
        """
        if self._is_closed:
            return HoldEnd.SHUTTING_DOWN
        if ticket.is_refusable and now > ticket.late_s:
            return HoldEnd.LATE
        if not ticket.request.claim.waits:
            return HoldEnd.NO_WAIT
        if now >= ticket.give_up_s:
            return HoldEnd.EXPIRED
        if self.occupancy.is_route_full(ticket):
            return HoldEnd.ROUTE_FULL
        num = len(self._tickets) + 1 - self.settings.max_requests
        num_bytes = self.occupancy.num_bytes + ticket.num_bytes - self.settings.max_bytes
        if num <= 0 and num_bytes <= 0:
            return None
        displaced = self.occupancy.to_displace(
            ticket, num=num, num_bytes=num_bytes, is_fair=self.settings.fair
        )
        for last in displaced or ():
            self._refuse(last, HoldEnd.DISPLACED, now)
        return HoldEnd.FULL if displaced is None else None

    def _arrange(self) -> None:
        """Have an offer made when it is due."""
        if self._tickets:
            self.schedule.arrange(self.schedule.due_s(self._offers.next_s))
