"""The next request, of all that are held.

From the outside in: levels (`tickets.level`), then in a level the flow that was served least
(`fairness`), in a flow the configured order (`orders`). A flow has the requests of one tenant, over
all adapters and routes without a share of their own (`Claim._flow`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from heapq import heapify, heappop, heapreplace, nsmallest

from extproc.costs import BYTES_PER_TOKEN
from extproc.queue.fairness import TokenCounters, cost
from extproc.queue.orders import LATE_EVERY, Scene, first_come, in_time
from extproc.queue.tickets import QueueSettings, Ticket, by_level
from extproc.tenancy import Share
from extproc.types import RequestInfo

EXPECTED_OUTPUT_TOKENS = 128
"""Of a response, as a tenant is charged for it until its end."""
OUTPUTS_OF_MEAN = 64
"""About so many responses make the mean output."""
MAX_TOLD_PRIORITIES = 64
"""With so many counted, none is counted anew for flows that wait at other routers alone."""

_Flows = dict[str, list[Ticket]]


class Plan:
    """The order of the tickets that it is given.

    Attributes:
        counters: The service of each flow, by priority.
    """

    def __init__(self, settings: QueueSettings) -> None:
        self._settings = settings
        self.counters: defaultdict[int, TokenCounters] = defaultdict(TokenCounters)
        self._mean_output_tokens = float(EXPECTED_OUTPUT_TOKENS)
        self._num_in_time = 0  # that were sent since one that could not be
        self._told: Collection[tuple[int, str]] = ()  # priorities and flows, held elsewhere alone

    def configure(self, settings: QueueSettings, held: Iterable[Ticket]) -> None:
        """Apply other settings; what each flow was served is forgotten if turns begin or end."""
        if settings.fair != self._settings.fair:
            told = self._told
            self.hold_told(())
            self._settings = settings
            self.counters.clear()
            for ticket in held:
                self.hold(ticket)
            self.hold_told(told)
        self._settings = settings

    def hold(self, ticket: Ticket) -> None:
        """Count a ticket that is held from now on."""
        if self._settings.fair:
            self.counters[ticket.priority].hold(ticket.flow)

    def release(self, ticket: Ticket) -> None:
        """Count a ticket that is not held any more."""
        if self._settings.fair:
            self.counters[ticket.priority].release(ticket.flow)

    def hold_told(self, flows: Collection[tuple[int, str]]) -> None:
        """Have exactly these flows, which wait at other routers, be active from now on.

        Else their reported service there would lift them above those that wait here.
        """
        is_few = len(self.counters) < MAX_TOLD_PRIORITIES
        flows = [each for each in flows if is_few or each[0] in self.counters]
        before, self._told = self._told, flows
        if self._settings.fair:
            for priority, flow in flows:
                self.counters[priority].hold(flow)
            for priority, flow in before:
                self.counters[priority].release(flow)

    def served(self, priority: int, flow: str) -> float:
        """Return what a flow has got."""
        return self.counters[priority].counter(flow)

    def charge(self, request: RequestInfo) -> None:
        """Count the service that a request gets."""
        if self._settings.fair:
            claim = request.claim
            self.counters[claim.priority].add(claim._flow, _charged_tokens(request))

    def settle(self, request: RequestInfo, output_tokens: float) -> None:
        """Count the output of a charged request, as far as it differs from the usual one.

        It is compared with the mean, not with the charge. If all were refunded something, a tenant
        that has been lifted to the other counters meanwhile would stay behind them. No more is
        refunded than was charged: nobody's requests, however they end, lift its next ones.
        """
        claim, num = request.claim, request.num_sequences
        if self._settings.fair:
            more = output_tokens - num * self._mean_output_tokens
            self._mean_output_tokens += more / num / OUTPUTS_OF_MEAN
            more = max(more, -num * EXPECTED_OUTPUT_TOKENS)
            self.counters[claim.priority].add(claim._flow, cost(0.0, more) / claim._weight)

    def sent(self, ticket: Ticket, now: float) -> None:
        """Count a place that a ticket got."""
        self._num_in_time = 0 if ticket.late_s < now else self._num_in_time + 1

    def charge_told(self, share: Share) -> None:
        """Count the service of another router, at a priority that has been seen here.

        Routers order by the service of all of them. Late reports make the difference between two
        flows larger by as much as is under way. Without reports each router is fair by itself, and
        a flow that waits at more routers than another gets more. Outputs are reported as expected.
        """
        if self._settings.fair and share.priority in self.counters:
            self.counters[share.priority].add_foreign(share.flow, share.tokens)

    def make(
        self, tickets: Iterable[Ticket], now: float, service_s: float
    ) -> tuple[list[_Flows], list[Ticket]]:
        """Return the flows of each level, in order, and those that step back.

        Args:
            service_s: Mean time from one dispatch to the next; 0 for unknown.
        """
        levels, given_up = [], []
        for level in by_level(tickets, now, self._settings.ageing_s):
            flows = self._flows(level)
            scene = Scene(now, service_s * len(flows), self._num_in_time >= LATE_EVERY - 1)
            late_by_flow = {}
            for name, flow in flows.items():
                flows[name], late_by_flow[name] = self._ordered(flow, scene)
            given_up += self._given_up(flows, late_by_flow)
            levels.append(flows)
        return levels, given_up

    def _given_up(self, flows: _Flows, late_by_flow: _Flows) -> list[Ticket]:
        """Return those to give up. Late requests stay if their flow was served less than every
        other and has none in time: other flows would take its turn, again and again.
        """
        if len(flows) > 1:
            served = ((self._served_in(flow, name), name) for name, flow in flows.items())
            (least, name), (next_least, _) = nsmallest(2, served)
            late = late_by_flow[name]
            if least < next_least and len(late) == len(flows[name]):
                late_by_flow[name] = [each for each in late if each.is_refusable]
        return [each for late in late_by_flow.values() for each in late]

    def _served_in(self, flow: list[Ticket], name: str) -> float:
        return self.served(flow[0].priority, name)

    def adapters(self, tickets: Iterable[Ticket], now: float) -> Iterator[str]:
        """Yield the adapters that tickets need, each once, the next in order of arrival first.

        Nothing may be charged meanwhile, so a flow whose turn it is has all turns until its end.

        Args:
            tickets: In order of arrival.
        """
        found = set[str]()
        for level in by_level(tickets, now, self._settings.ageing_s):
            flows = self._flows(level)
            for _, name in sorted(
                (self._served_in(flow, name), name) for name, flow in flows.items()
            ):
                for adapter in dict.fromkeys([each.request.adapter for each in flows[name]]):
                    if adapter is not None and adapter not in found:
                        found.add(adapter)
                        yield adapter

    def in_order(self, levels: Iterable[_Flows]) -> Iterator[Ticket]:
        """Yield the tickets of all levels; what has been charged meanwhile counts at once."""
        for flows in levels:
            if len(flows) == 1:
                yield from next(iter(flows.values()))
            else:
                yield from self._by_turns(flows)

    def _by_turns(self, flows: _Flows) -> Iterator[Ticket]:
        """Yield always the next ticket of the flow that was served least."""
        rest = {name: iter(flow) for name, flow in flows.items()}
        counters = {name: self.counters[flow[0].priority] for name, flow in flows.items()}
        heap = [(counter.counter(name), name) for name, counter in counters.items()]
        heapify(heap)
        while heap:
            before, name = heap[0]
            ticket = next(rest[name], None)
            if ticket is None:
                heappop(heap)
                continue
            yield ticket
            served = counters[name].counter(name)
            if served != before:
                heapreplace(heap, (served, name))

    def _flows(self, level: list[Ticket]) -> _Flows:
        if not self._settings.fair:
            return {"": level}
        flows: defaultdict[str, list[Ticket]] = defaultdict(list)
        for ticket in level:
            flows[ticket.flow].append(ticket)
        return flows

    def _ordered(self, flow: list[Ticket], scene: Scene) -> tuple[list[Ticket], list[Ticket]]:
        """Return a flow in order, and those of it that should be given up."""
        if self._settings.order == "in_time":
            return in_time(flow, scene)
        return first_come(flow), [
            ticket for ticket in flow if ticket.is_refusable and ticket.late_s < scene.now
        ]


def share_of(request: RequestInfo) -> Share:
    """Return what a request counts for once it is served."""
    claim = request.claim
    return Share(claim._flow, claim.priority, _charged_tokens(request))


def _charged_tokens(request: RequestInfo) -> float:
    outputs = EXPECTED_OUTPUT_TOKENS * request.num_sequences
    return cost(request.body_bytes / BYTES_PER_TOKEN, outputs) / request.claim._weight
