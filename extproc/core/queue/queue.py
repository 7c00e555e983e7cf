"""The queue: requests that their policy held, until there is room for them.

1. Nobody polls. What frees room says so (`freed`); then, and when a policy wanted to be asked
   again, the queue makes an *offer*: it goes through the requests in order, and the policy is asked
   for one after the other. Who got no endpoint holds up nobody behind.
2. The order: levels (priority and age), in a level the tenant that was served least, of its
   requests the configured order.
3. An offer sends at most `MAX_SENT` requests, and asks for at most `MAX_LOOKS` in vain, for alike
   ones once; the next one goes on behind them, but looks at the first ones again if more room was
   freed. Between two offers is a rest, so that they take a tenth of a core at most, those that got
   an endpoint aside; newcomers stand in line meanwhile.
4. Who can have no first token in time any more is refused, if somebody set it an objective: as soon
   as the queue's own pace says so. Others that are late are looked at once a second, so that what
   is freed is there for the next who can be in time.
5. The queue is bounded by number, bytes and time. Where it is full the one that is furthest behind
   goes, which may be the newcomer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import ceil, inf

from extproc.core.claims import Share
from extproc.core.queue.endings import End, end_of, refusal
from extproc.core.queue.levels import level
from extproc.core.queue.occupancy import Occupancy
from extproc.core.queue.orders import Scene, running_in_clusters
from extproc.core.queue.pace import Pace
from extproc.core.queue.plan import Plan, flow_of
from extproc.core.queue.precedence import HOLD_UP_S, Precedence
from extproc.core.queue.settings import QueueSettings
from extproc.core.queue.tickets import Ticket
from extproc.core.types import EndpointView, Pick, Rejection, RequestInfo, Wait

MAX_LOOKS = 16
"""Requests that one offer asks for in vain, half of them the first in order."""
MAX_SENT = 256
"""Requests that one offer gives an endpoint: others come in between, and pods get no more new
connections at once than they can accept."""
LOOK_S = 100e-6
ORDER_S = 2e-6
"""What a look, and a place in the order, take of a slow core."""
REST_RATIO = 10
"""The rest after an offer, over what it took but for those that got an endpoint."""
LATE_LOOK_S = 1.0
"""From one look at a request that is late to the next, give or take a half."""
MAX_RETRY_AFTER_S = 60


Look = Callable[[Ticket, float], Pick | Rejection | Wait]


class HoldQueue:
    """The held requests of one router.

    Attributes:
        settings: In force.
        at: Has `offer` called at a time, instead of the time that it was called with before.
        occupancy: How much is held.
        num_ended: Requests by how their hold ended, or why it did not begin.
    """

    def __init__(self, settings: QueueSettings | None = None) -> None:
        self.settings = settings or QueueSettings()
        self._plan = Plan(self.settings)
        self.at: Callable[[float], None] = _never
        self._tickets: dict[Ticket, None] = {}
        self.occupancy = Occupancy()
        self._precedence = Precedence(self._plan.served)
        self._pace = Pace()
        self._freed_s = inf  # when room that was freed may be offered
        self._in_vain: set[object] = set()  # kinds that this sweep has asked for
        self._next_s = inf  # when the first is to be looked at again
        self._rests_until_s = -inf
        self._arranged_s = inf
        self._late: set[Ticket] = set()
        self._spread = 0.0
        self.num_ended: Counter[End] = Counter(dict.fromkeys(End, 0))

    def __len__(self) -> int:
        return len(self._tickets)

    def __iter__(self) -> Iterator[Ticket]:
        return iter(self._tickets)

    @property
    def service_s(self) -> float:
        """Mean time from one dispatch out of the queue to the next; 0 while none is known."""
        return self._pace.service_s

    def oldest_s(self, now: float) -> float:
        """Return for how long the oldest has been held; 0 where nothing is."""
        oldest = next(iter(self._tickets), None)
        return 0.0 if oldest is None else now - oldest.held_at_s

    def configure(self, settings: QueueSettings) -> None:
        """Apply other settings; who is held already stays."""
        self.settings = settings
        self._plan.configure(settings, self._tickets)

    # --- in and out --------------------------------------------------------------------------

    def add(self, ticket: Ticket, *, now: float) -> Rejection | None:
        """Hold a request, or return why not."""
        end = self._refusal(ticket, now)
        if end is not None:
            return self._refused(ticket, end, now)
        self._pace.look(now, is_held=True)
        self._tickets[ticket] = None
        self.occupancy.add(ticket)
        self._plan.hold(ticket)
        self._note(ticket)
        self._arrange()
        return None

    def charge(self, request: RequestInfo) -> None:
        """Count the service that a request gets, held before or not, for its tenant."""
        self._plan.charge(request)

    def charge_told(self, share: Share) -> None:
        """Count the service that a request gets of another router."""
        self._plan.charge_told(share)

    def remove(self, ticket: Ticket, *, now: float) -> None:
        """Forget a request whose client has gone, if it is held."""
        if ticket in self._tickets:
            self.num_ended[End.LEFT] += 1
            self._drop(ticket, now)

    def expire(self, ticket: Ticket, *, now: float) -> None:
        """Refuse a request if it has been held for as long as it may be."""
        if ticket in self._tickets and now >= ticket.give_up_s:
            self._refuse(ticket, End.EXPIRED, now)

    def freed(self, now: float, *, after_s: float = 0.0) -> None:
        """Record that there may be room where there was none, to be offered after so long."""
        if self._tickets:
            self._freed_s = min(self._freed_s, now + after_s)
            self._arrange()

    def hasten(self, now: float) -> None:
        """Have room that is to be offered soon offered now: a newcomer would take it."""
        if now < self._freed_s < inf:
            self._freed_s = now

    # --- offers ------------------------------------------------------------------------------

    def is_due(self, now: float) -> bool:
        """Return whether those that wait are to be asked for now."""
        return bool(self._tickets) and now >= self._due_s()

    def is_promised(self, now: float) -> bool:
        """Return whether those that wait are to be asked for once the queue has had its rest, and
        newcomers stand in line."""
        is_wanted = now >= min(self._freed_s, self._next_s)
        return bool(self._tickets) and is_wanted and now < self._rests_until_s

    def behind_until_s(self, request: RequestInfo, *, now: float) -> float:
        """Return until when a newcomer has to let others go first; `now` if it has not."""
        if not self.settings.fair:
            return now
        priority, flow = request.claim.priority, flow_of(request)
        return self._precedence.behind_until_s(priority, priority, flow, now=now)

    def offer(self, look: Look, *, now: float, endpoints: Sequence[EndpointView] = ()) -> None:
        """Offer what room there is, in order; call it as `at` says, or whenever it is due.

        Args:
            look: Asks the policy for one request at a time, and counts the pick.
            endpoints: As they are now.
        """
        self._arranged_s = inf
        if self.is_due(now):
            num_held = len(self._tickets)
            scene = self._scene(now, endpoints)
            num_in_vain = self._sweep(self._planned(scene), look, now)
            took_s = ORDER_S * num_held + LOOK_S * num_in_vain
            self._rests_until_s = now + REST_RATIO * took_s
        self._arrange()

    def adapters(self, now: float) -> list[str]:
        """Return the adapters that held requests need, each once, the next in order first."""
        levels, _ = self._plan.make(self._tickets, self._scene(now))
        names = (ticket.request.adapter for ticket in self._plan.in_order(levels))
        return list(dict.fromkeys(name for name in names if name is not None))

    def _sweep(self, tickets: Iterable[Ticket], look: Look, now: float) -> int:
        """Go through the order; return how many requests were asked for in vain."""
        is_freed = now >= self._freed_s
        num_again = MAX_LOOKS // 2 if is_freed else 0
        self._freed_s, self._next_s = inf if is_freed else self._freed_s, inf
        before, vain = self._in_vain, dict[object, float]()
        num_sent, is_over = 0, True
        self._precedence.begin()
        for ticket in tickets:
            if ticket.result is not None:
                continue
            if ticket in self._late and now < ticket.look_s:
                self._note(ticket)
                continue
            kind = ticket.kind
            if kind in vain or (kind in before and len(vain) >= num_again):
                self._put_off(ticket, vain.get(kind, inf), now)
                continue
            if len(vain) >= MAX_LOOKS or num_sent >= MAX_SENT:
                is_over = False
                break
            behind_until_s = self._behind_until_s(ticket, now)
            if behind_until_s > now:
                self._put_off(ticket, behind_until_s, now)
                continue
            result = look(ticket, now)
            if isinstance(result, Wait):
                ticket.reason, vain[kind] = result.reason, result.until_s
                is_late = ticket in self._late
                ticket.look_s = self._late_look_s(now) if is_late else result.until_s
                self._note(ticket)
                if not is_late:
                    self._let_go_first(ticket, now)
            else:
                num_sent += 1
                self.num_ended[end_of(result)] += 1
                self._settle(ticket, result, now)
        self._in_vain = set() if is_over else before | vain.keys()
        if not is_over:
            self._next_s = now
        return len(vain)

    def _put_off(self, ticket: Ticket, until_s: float, now: float) -> None:
        """Have a request looked at again then, or before if it has a time of its own."""
        ticket.look_s = until_s if ticket.look_s <= now else min(ticket.look_s, until_s)
        self._note(ticket)

    def _let_go_first(self, ticket: Ticket, now: float) -> None:
        """Have others let a request go first that was asked for in vain, for a while."""
        ticket.vain_s = min(ticket.vain_s, now)
        until_s = ticket.vain_s + HOLD_UP_S
        if self.settings.fair and until_s > now:
            where = level(ticket, now, self.settings.ageing_s)
            self._precedence.add(where, flow_of(ticket.request), until_s)

    def _behind_until_s(self, ticket: Ticket, now: float) -> float:
        if not self.settings.fair:
            return now
        where, priority = level(ticket, now, self.settings.ageing_s), ticket.request.claim.priority
        flow = flow_of(ticket.request)
        return self._precedence.behind_until_s(where, priority, flow, now=now)

    def _note(self, ticket: Ticket) -> None:
        late_s = ticket.late_s if ticket.is_refusable else inf
        self._next_s = min(self._next_s, ticket.look_s, late_s)

    def _settle(self, ticket: Ticket, result: Pick | Rejection, now: float) -> None:
        self._drop(ticket, now)
        ticket.result = result
        if isinstance(result, Pick):
            self._pace.sent()
            self.charge(ticket.request)
        ticket.wake()

    def _drop(self, ticket: Ticket, now: float) -> None:
        del self._tickets[ticket]
        self.occupancy.remove(ticket)
        self._plan.release(ticket)
        self._pace.look(now, is_held=bool(self._tickets))

    def _planned(self, scene: Scene) -> Iterator[Ticket]:
        """Refuse those whose first token will be late; return the others in order."""
        levels, given_up = self._plan.make(self._tickets, scene)
        before, self._late = self._late, set()
        for ticket in given_up:
            if ticket.is_refusable:
                self._refuse(ticket, End.LATE, scene.now)
                continue
            self._late.add(ticket)
            if ticket not in before:
                ticket.look_s = self._late_look_s(scene.now)
        return self._plan.in_order(levels)

    def _late_look_s(self, now: float) -> float:
        """Return when one that is late is looked at next: spread evenly, by the golden ratio."""
        self._spread = (self._spread + 0.618034) % 1
        return now + LATE_LOOK_S * (0.5 + self._spread)

    def _scene(self, now: float, endpoints: Sequence[EndpointView] = ()) -> Scene:
        settings, running = self.settings, frozenset[str]()
        if settings.order == "clusters":
            running = running_in_clusters(endpoints, settings.cluster_size)
        return Scene(now, self._pace.service_s, running)

    # --- refusals ----------------------------------------------------------------------------

    def _refuse(self, ticket: Ticket, end: End, now: float) -> None:
        self._settle(ticket, self._refused(ticket, end, now), now)

    def _refused(self, ticket: Ticket, end: End, now: float) -> Rejection:
        """Count a refusal, and return the answer to it."""
        self.num_ended[end] += 1
        return refusal(
            end,
            ticket,
            num_held=len(self._tickets),
            service_s=self.service_s,
            retry_after_s=self.retry_after_s(),
            now=now,
        )

    def retry_after_s(self) -> int:
        """Return in how many seconds all that are held now will have gone, by the queue's pace."""
        return max(1, min(MAX_RETRY_AFTER_S, ceil(len(self._tickets) * self.service_s)))

    def _refusal(self, ticket: Ticket, now: float) -> End | None:
        """Return why a newcomer is not held, if it is not; it may take the place of another."""
        settings = self.settings
        if ticket.is_refusable and now > ticket.late_s:
            return End.LATE
        if not ticket.request.claim.waits:
            return End.NO_WAIT
        if now >= ticket.give_up_s:
            return End.EXPIRED
        if self.occupancy.is_route_full(ticket):
            return End.ROUTE_FULL
        while len(self._tickets) >= settings.max_requests or (
            self.occupancy.num_bytes + ticket.num_bytes > settings.max_bytes
        ):
            last = self._last_below(ticket.request.claim.priority)
            if last is None:
                return End.FULL
            self._refuse(last, End.DISPLACED, now)
        return None

    def _last_below(self, priority: int) -> Ticket | None:
        """Return the newest of the lowest priority, if that is below this one."""
        lowest = self.occupancy.lowest_priority
        if lowest is None or lowest >= priority:
            return None
        return next(t for t in reversed(self._tickets) if t.request.claim.priority == lowest)

    # --- time --------------------------------------------------------------------------------

    def _due_s(self) -> float:
        return max(min(self._freed_s, self._next_s), self._rests_until_s)

    def _arrange(self) -> None:
        """Have an offer made when it is due."""
        due_s = self._due_s() if self._tickets else inf
        if due_s < self._arranged_s:
            self._arranged_s = due_s
            self.at(due_s)


def _never(_at_s: float) -> None:
    """Without anybody who calls back, requests wait until somebody else makes an offer."""
