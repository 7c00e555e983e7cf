"""The way through the order of the waiting requests, in one offer or several.

An offer asks for one request after the other, for alike ones once, until `MAX_SENT` got an endpoint
or `MAX_LOOKS` none. The next offer goes on behind them, and asks for the first ones again if room
was freed. A flow is asked for `FLOW_LOOKS` times in vain, and again once all other flows had
theirs. A request that was asked for in vain holds up other requests (`precedence`), and has a slot
kept (`reservations`). Requests that have stepped back hold up nobody. They are looked at once a
second, or where free room can be for no other request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from math import inf

from extproc.phrases import FOR_POD, FOR_ROOM, FOR_SLOT, FOR_TURN
from extproc.queue.elsewhere import Elsewhere, Waiting
from extproc.queue.precedence import AGAIN_RATIO, HOLD_UP_S, First, Precedence, Reach
from extproc.queue.reservations import Reservations
from extproc.queue.tickets import QueueSettings, Ticket, level
from extproc.types import Pick, Rejection, RequestInfo, Wait

MAX_LOOKS = 16
"""Requests that one offer asks for in vain, half of them the first in order."""
FLOW_LOOKS = MAX_LOOKS // 4
"""Of those, how many one flow has before all other flows had theirs: clients may make as many kinds
of requests as they like.
"""
MAX_SENT = 256
"""Requests that one offer gives an endpoint: other work comes in between, and pods get no more new
connections at once than they can accept.
"""
BACK_LOOK_S = 1.0
"""From one look at a request that has stepped back to the next, give or take a half."""
QUIET_S = 0.25
"""After the newest request: no further one is waited for."""
Look = Callable[[Ticket, float], Pick | Rejection | Wait]
Settle = Callable[[Ticket, Pick | Rejection, float], None]
_Flow = tuple[int, str]  # its priority and its name


class Sweep:
    """Asks for one request after the other, and knows how far that went.

    Attributes:
        next_s: When the first is to be looked at again.
        reservations: Of slots.
        elsewhere: Requests that wait at other routers.

    Args:
        served: As `Precedence` wants it.
    """

    def __init__(self, settings: QueueSettings, served: Callable[[int, str], float]) -> None:
        self._settings = settings
        self.next_s, self._newest_s = inf, -inf
        self.reservations = Reservations(settings, served)
        self._precedence, self._reach = Precedence(served), Reach()
        self.elsewhere = Elsewhere()
        self._urgent = 0  # where those of priority 0 and above wait that are held
        # Flows by the kinds that were asked for in vain, since all of a flow's had been asked for.
        self._in_vain: dict[object, _Flow] = {}
        self._looks: Counter[_Flow] = Counter()  # in vain, in this round of the flows
        self._back: Collection[Ticket] = ()
        self._spread = 0.0
        # When flows began to hold up others, by for how long each time.
        self._since_s: dict[tuple[_Flow, float], float] = {}

    def configure(self, settings: QueueSettings) -> None:
        """Apply other settings; no request lets another go first until the next offer."""
        self._settings = settings
        self.reservations.configure(settings)
        self._precedence.begin()
        self.reservations.drop()

    def note(self, ticket: Ticket) -> None:
        """Have an offer made when a request is to be looked at."""
        late_s = ticket.late_s if ticket.is_refusable else inf
        self.next_s = min(self.next_s, ticket.look_s, late_s)

    def came(self, arrived_at_s: float) -> None:
        """Count a request, held or not."""
        self._newest_s = max(self._newest_s, arrived_at_s)

    def go(
        self,
        tickets: Iterable[Ticket],
        back: Sequence[Ticket],
        look: Look,
        settle: Settle,
        *,
        now: float,
        is_freed: bool,
        reach: Reach,
    ) -> int:
        """Go through the order; return how many requests were asked for in vain.

        Args:
            tickets: In order; those that have a result are passed over.
            back: Those of them that have stepped back, and hold up nobody.
            settle: Takes what was found, before the next ticket is taken.
            is_freed: The first in order are asked for again.
            reach: Of requests, as things are now.
        """
        before, self._back = self._back, set(back)
        for ticket in back:
            if ticket not in before:
                ticket.look_s = self._back_look_s(now)
        num_again = MAX_LOOKS // 2 if is_freed else 0
        vain = dict[object, float]()
        self.next_s, num_sent = inf, 0
        self._precedence.begin()
        self.reservations.begin()
        self._look_around(reach)
        self._urgent = 0
        since_s = self._since_s.items()
        self._since_s = {key: at_s for key, at_s in since_s if now < at_s + AGAIN_RATIO * key[1]}
        passed_over, looks = list[Ticket](), self._looks
        for ticket in self._in_rounds(tickets, passed_over):
            if ticket.result is not None:
                continue
            urgent = self._note_urgent(ticket)
            adapter = self._adapter(ticket)
            is_back = now < ticket.look_s and ticket in self._back
            if is_back and not (is_freed and self._is_for_anybody(ticket, now)):
                self.note(ticket)
                continue
            kind, is_again = _kind(ticket), len(vain) < num_again
            is_again = is_again or self.reservations.is_free(adapter, reach.slots_of)
            if kind in vain or (kind in self._in_vain and not is_again):
                self._put_off(ticket, vain.get(kind, inf), now)
                self._hold_up_others(ticket, now)
                continue
            flow = _flow(ticket)
            if not is_again and looks.get(flow, 0) >= FLOW_LOOKS:
                passed_over.append(ticket)
                continue
            if len(vain) >= MAX_LOOKS or num_sent >= MAX_SENT:
                self.next_s = now
                self._urgent = -1  # wherever those wait that are behind
                break
            where = level(ticket, now, self._settings.ageing_s)
            behind_until_s = self.behind_until_s(ticket.request, where, now)
            if behind_until_s > now:
                self._put_off(ticket, behind_until_s, now)
                continue
            result = look(ticket, now)
            if isinstance(result, Wait):
                vain[kind] = result.until_s
                self._in_vain[kind] = flow
                looks[flow] += 1
                self._keep(ticket, result, now)
            else:
                num_sent += 1
                self._urgent = urgent
                self._since_s.pop((flow, HOLD_UP_S), None)
                self._since_s.pop((flow, self._settings.slot_hold_s), None)
                if adapter is not None:
                    self.reservations.drop(adapter)
                settle(ticket, result, now)
        else:
            self.reservations.end()
        return len(vain)

    def begin_hold(self, ticket: Ticket, reach: Reach, now: float) -> None:
        """Have a newcomer that was asked for in vain, for a slot, go first from now on."""
        self._look_around(reach)
        ticket.vain_s = now
        self._note_urgent(ticket)
        self._hold_up_others(ticket, now)

    def forget_gone(self, held: Collection[Ticket]) -> None:
        """Forget kinds of which nobody is held any more, once they are most of those that are
        remembered: while newcomers keep coming, a sweep may never be over."""
        if len(self._in_vain) > 2 * len(held):
            kinds = {_kind(ticket) for ticket in held}
            self._in_vain = {kind: flow for kind, flow in self._in_vain.items() if kind in kinds}
            self._looks &= Counter(dict.fromkeys(self._in_vain.values(), MAX_LOOKS))

    def behind_until_s(self, request: RequestInfo, where: int, now: float) -> float:
        """Return until when a request has to let other requests go first; `now` where it need
        not.
        """
        urgent = self._urgent | self.elsewhere.urgent
        if not (self._precedence or urgent):
            return now
        claim, reach = request.claim, self._reach.of(request)
        if claim.priority < 0 and urgent & reach:
            return inf
        return self._precedence.behind_until_s(
            where, claim.priority, claim._flow, request.arrived_at_s, reach, now=now
        )

    def waiting(self, now: float) -> Waiting:
        """Return who waits here, for other routers."""
        firsts, addresses = self._precedence.firsts(), self._reach.addresses
        waiting = Waiting(addresses, self._urgent, firsts, tuple(self.reservations))
        return waiting.lasting(now)

    def hear(self, router_id: str, waiting: Waiting, reach: Reach, *, now: float) -> bool:
        """Have requests that wait at another router go first, in place of its earlier ones. Return
        whether fewer of them hold up other requests.
        """
        is_less = self.elsewhere.hear(router_id, waiting, self._settings, now=now)
        self._look_around(reach)
        return is_less

    def may_meet(self, one: Ticket, other: Ticket) -> bool:
        """Return whether two requests may go to one endpoint, as far as is known."""
        return bool(self._reach.of(one.request) & self._reach.of(other.request))

    def holds_up(self, ticket: Ticket, now: float) -> bool:
        """Return whether other requests may have to let a request go first."""
        longest_s = max(HOLD_UP_S, self._settings.slot_hold_s)
        return ticket.vain_s <= now < ticket.vain_s + longest_s

    def let_go(self, ticket: Ticket) -> None:
        """Have nobody let a request go first that has gone."""
        self._precedence.begin()
        self._urgent = 0
        adapter = self._adapter(ticket)
        if adapter is not None:
            self.reservations.drop(adapter)

    def _is_for_anybody(self, ticket: Ticket, now: float) -> bool:
        """Return whether room that was freed is also for those that have stepped back: without
        newcomers, that of a full endpoint would stay empty, and so would an idle one."""
        is_quiet = now >= self._newest_s + QUIET_S
        return is_quiet or ticket.reason == FOR_ROOM or self._reach.has_idle(ticket.request)

    def _in_rounds(self, tickets: Iterable[Ticket], passed_over: list[Ticket]) -> Iterator[Ticket]:
        """Yield the tickets, and those that were passed over again, until there are none."""
        while True:
            yield from tickets
            self._looks.clear()
            flows = set(map(_flow, passed_over))
            self._in_vain = {kind: flow for kind, flow in self._in_vain.items() if flow in flows}
            if not passed_over:
                return
            tickets = passed_over.copy()
            passed_over.clear()

    def _look_around(self, reach: Reach) -> None:
        """Take the endpoints as they are now."""
        self._reach, elsewhere = reach, self.elsewhere
        if elsewhere:
            elsewhere.know(reach.addresses)
        self._precedence.elsewhere = elsewhere.firsts
        self.reservations.elsewhere = elsewhere.kept

    def _keep(self, ticket: Ticket, wait: Wait, now: float) -> None:
        """Let a request wait that was asked for in vain."""
        is_back = ticket in self._back
        ticket.reason = wait.reason
        ticket.look_s = self._back_look_s(now) if is_back else wait.until_s
        self.note(ticket)
        if ticket.reason not in (FOR_POD, FOR_TURN):
            ticket.vain_s = min(ticket.vain_s, now)
        self._hold_up_others(ticket, now)

    def _hold_up_others(self, ticket: Ticket, now: float) -> None:
        """Have a request that was asked for in vain go first, and keep a slot for it."""
        settings, reach = self._settings, self._reach.of(ticket.request)
        if not reach or ticket.reason == FOR_POD or ticket in self._back:
            return
        adapter, hold_s = self._adapter(ticket), settings.slot_hold_s
        is_for_slot = ticket.reason == FOR_SLOT and hold_s > 0
        if is_for_slot and adapter is not None and ticket.vain_s <= now:
            self.reservations.add(ticket, adapter, self._reach.slots(reach), now=now)
        first = First(ticket.request.arrived_at_s, reach=reach)
        first.later_until_s = self._until_s(ticket, ticket.held_at_s, hold_s, now)
        is_first = not is_for_slot and ticket.reason != FOR_TURN
        if settings.fair and is_first:
            first.next_until_s = self._until_s(ticket, ticket.vain_s, HOLD_UP_S, now)
        if max(first.later_until_s, first.next_until_s) > now:
            self._precedence.add(level(ticket, now, settings.ageing_s), *_flow(ticket), first)

    def _until_s(self, ticket: Ticket, from_s: float, hold_s: float, now: float) -> float:
        """Return until when a request may hold up other requests, which its flow may do for so
        long.
        """
        if not from_s <= now < from_s + hold_s:
            return -inf
        since_s = self._since_s.setdefault((_flow(ticket), hold_s), now)
        return min(from_s, since_s) + hold_s

    def _adapter(self, ticket: Ticket) -> str | None:
        adapter = ticket.request.adapter
        return None if adapter is None else self._reach.served(adapter)

    def _note_urgent(self, ticket: Ticket) -> int:
        """Count where a request waits before which those below 0 may not go; return what was."""
        before = self._urgent
        if ticket.priority >= 0 and ticket.reason != FOR_POD:
            self._urgent |= self._reach.of(ticket.request)
        return before

    def _put_off(self, ticket: Ticket, until_s: float, now: float) -> None:
        """Have a request looked at again then, or before if it has a time of its own."""
        if ticket in self._back:  # not looked at for what is freed, so it needs a time
            until_s = min(until_s, self._back_look_s(now))
        ticket.look_s = until_s if ticket.look_s <= now else min(ticket.look_s, until_s)
        self.note(ticket)

    def _back_look_s(self, now: float) -> float:
        """Return when one that has stepped back is looked at next: spread evenly, by the golden
        ratio."""
        self._spread = (self._spread + 0.618034) % 1
        return now + BACK_LOOK_S * (0.5 + self._spread)


def _kind(ticket: Ticket) -> Hashable:
    """Return what stands for the policy's answer to a ticket: it alone, or all of its kind."""
    return ticket if ticket.kind is None else ticket.kind


def _flow(ticket: Ticket) -> _Flow:
    return ticket.priority, ticket.flow
