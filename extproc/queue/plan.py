"""The next request, of all that are held.

From the outside in: levels (`tickets.level`), then in a level the flow that was served least
(`fairness`), in a flow the configured order (`tenantorder`). A flow has the requests of one tenant,
over all adapters and routes without a share of their own (`Claim.flow`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from heapq import heappop, heapreplace
from itertools import groupby
from math import inf
from operator import itemgetter

from extproc.costs import BYTES_PER_TOKEN
from extproc.queue.fairness import TokenCounters, cost
from extproc.queue.tenantorder import LATE_EVERY, OrderFacts, first_come, in_time
from extproc.queue.tickets import QueueSettings, Ticket, level
from extproc.types import RequestInfo

EXPECTED_OUTPUT_TOKENS = 128
"""Of a response, as a tenant is charged for it until its end."""
_BYTE_COST, _OUTPUT_COST = cost(1 / BYTES_PER_TOKEN, 0.0), cost(0.0, EXPECTED_OUTPUT_TOKENS)
OUTPUTS_OF_MEAN = 64
"""About so many responses make the mean output."""


class QueuePlan:
    """The order of the tickets that it is given.

    Attributes:
        settings: In force.
        counters: The service of each flow, by priority.
        newest_s: When the newest request arrived, held or not.
    """

    def __init__(self, settings: QueueSettings) -> None:
        self.settings = settings
        self.counters: defaultdict[int, TokenCounters] = defaultdict(TokenCounters)
        self._mean_output_tokens = float(EXPECTED_OUTPUT_TOKENS)
        self._num_in_time = 0  # that were sent since one that could not be
        self.newest_s = -inf

    def hold(self, ticket: Ticket) -> None:
        """Count a ticket that is held from now on."""
        self.newest_s = max(self.newest_s, ticket.arrived_at_s)
        self.counters[ticket.priority].hold(ticket.flow)

    def release(self, ticket: Ticket) -> None:
        """Count a ticket that is not held any more."""
        self.counters[ticket.priority].release(ticket.flow)

    def served(self, priority: int, flow: str) -> float:
        """Return what a flow has got."""
        return self.counters[priority].counter(flow)

    def charge(self, request: RequestInfo) -> None:
        """Count the service that a request gets."""
        claim, arrived_at_s = request.claim, request.arrived_at_s
        if arrived_at_s > self.newest_s:
            self.newest_s = arrived_at_s
        self.counters[claim.priority].add(claim.flow, tokens_of(request))

    def settle(self, request: RequestInfo, output_tokens: float) -> None:
        """Count the output of a charged request, as far as it differs from the usual one.

        It is compared with the mean, not with the charge. If all were refunded something, a tenant
        that has been lifted to the other counters meanwhile would stay behind them. No more is
        refunded than was charged: nobody's requests, however they end, lift its next ones.
        """
        claim, num = request.claim, request.num_sequences
        more = output_tokens - num * self._mean_output_tokens
        self._mean_output_tokens += more / num / OUTPUTS_OF_MEAN
        more = max(more, -num * EXPECTED_OUTPUT_TOKENS)
        self.counters[claim.priority].add(claim.flow, cost(0.0, more) / claim.weight)

    def sent(self, ticket: Ticket, now: float) -> None:
        """Count a place that a ticket got."""
        self._num_in_time = 0 if ticket.late_s < now else self._num_in_time + 1

    def charge_elsewhere(self, flow: str, priority: int, tokens: float) -> None:
        """Count the service of another router, at a priority that has been seen here.

        Routers order by the service of all of them. Late reports make the difference between two
        flows larger by as much as is under way. Without reports each router is fair by itself, and
        a flow that waits at more routers than another gets more. Outputs are reported as expected.
        """
        if priority in self.counters:
            self.counters[priority].add(flow, tokens)

    def make(
        self, tickets: Iterable[Ticket], now: float, service_s: float
    ) -> tuple[Iterator[Ticket], list[Ticket]]:
        """Return the tickets in order, each found once it is wanted, and those that step back.

        Args:
            service_s: Mean time from one dispatch to the next; 0 for unknown.
        """
        flows: defaultdict[tuple[int, str], list[Ticket]] = defaultdict(list)
        ageing_s, back = self.settings.ageing_s, list[Ticket]()
        for ticket in tickets:
            is_young = now - ticket.arrived_at_s < ageing_s  # most are: half the time
            own = ticket.priority if is_young else level(ticket, now, ageing_s)
            flows[-own, self._name(ticket)].append(ticket)
        heap = sorted(
            (back_by, self._served_in(flow[0]), name) for (back_by, name), flow in flows.items()
        )
        for back_by, group in groupby(heap, itemgetter(0)):
            first, *others = list(group)
            is_least_served = bool(others) and first[1] < others[0][1]
            facts = OrderFacts(
                now, service_s * (1 + len(others)), self._num_in_time >= LATE_EVERY - 1
            )
            for each in (first, *others):
                key = back_by, each[-1]
                flows[key], late = self._ordered(flows[key], facts)
                # Other flows would take the turn of the one that got least, again and again.
                if each is first and is_least_served and len(late) == len(flows[key]):
                    late = [ticket for ticket in late if ticket.is_refusable]
                back += late
        return self._least_served_first(
            heap, {key: iter(flow) for key, flow in flows.items()}
        ), back

    def _least_served_first(
        self, heap: list[tuple[int, float, str]], flows: Mapping[tuple[int, str], Iterator[Ticket]]
    ) -> Iterator[Ticket]:
        """Yield the tickets of all levels, in one always the next of the flow that was served
        least; what has been charged meanwhile counts at once.

        Args:
            heap: A level below 0, what a flow of it got, its name.
        """
        while heap:
            back_by, _, name = heap[0]
            ticket = next(flows[back_by, name], None)
            if ticket is None:
                heappop(heap)
            else:
                yield ticket
                heapreplace(heap, (back_by, self._served_in(ticket), name))

    def adapters(self, tickets: Iterable[Ticket], now: float) -> list[str]:
        """Return the adapters that tickets need, each once, by level, turns and arrival.

        Args:
            tickets: In order of arrival.
        """

        def place(ticket: Ticket) -> tuple[int, float, str]:
            back_by = -level(ticket, now, self.settings.ageing_s)
            return back_by, self._served_in(ticket), self._name(ticket)

        names = [ticket.request.adapter for ticket in sorted(tickets, key=place)]
        return [name for name in dict.fromkeys(names) if name is not None]

    def _served_in(self, ticket: Ticket) -> float:
        """Return what the flow of a ticket has got."""
        return self.served(ticket.priority, self._name(ticket))

    def _name(self, ticket: Ticket) -> str:
        """Return whose turns it waits for; those of all are the same without fairness."""
        return ticket.flow if self.settings.fair else ""

    def _ordered(self, flow: list[Ticket], facts: OrderFacts) -> tuple[list[Ticket], list[Ticket]]:
        """Return a flow in order, and those of it that should be given up."""
        if self.settings.order == "in_time":
            return in_time(flow, facts)
        return first_come(flow), [
            ticket for ticket in flow if ticket.is_refusable and ticket.late_s < facts.now
        ]


def tokens_of(request: RequestInfo) -> float:
    """Return what a request counts for once it is served: weighted tokens over its weight."""
    return (
        _BYTE_COST * request.body_bytes + _OUTPUT_COST * request.num_sequences
    ) / request.claim.weight
