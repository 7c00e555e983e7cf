"""The next request, of all that are held.

From the outside in: levels (`tickets.level`), then in a level the flow that was served least
(`fairness`), in a flow the configured order (`orders`). A flow has the requests of one tenant, over
all adapters and routes without a share of their own (`Claim._flow`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
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

    def configure(self, settings: QueueSettings) -> None:
        """Apply other settings."""
        self._settings = settings

    def hold(self, ticket: Ticket) -> None:
        """Count a ticket that is held from now on."""
        self.counters[ticket.priority].hold(ticket.flow)

    def release(self, ticket: Ticket) -> None:
        """Count a ticket that is not held any more."""
        self.counters[ticket.priority].release(ticket.flow)

    def served(self, priority: int, flow: str) -> float:
        """Return what a flow has got."""
        return self.counters[priority].counter(flow)

    def charge(self, request: RequestInfo) -> None:
        """Count the service that a request gets."""
        share = share_of(request)
        self.counters[share.priority].add(share.flow, share.tokens)

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
        if share.priority in self.counters:
            self.counters[share.priority].add(share.flow, share.tokens)

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
            keeps_turn = self._got_least(flows)
            for name, flow in flows.items():
                flows[name], late = self._ordered(flow, scene)
                if name == keeps_turn and len(late) == len(flow):
                    late = [each for each in late if each.is_refusable]
                given_up += late
            levels.append(flows)
        return levels, given_up

    def _got_least(self, flows: _Flows) -> str | None:
        """Return the flow that was served less than every other, if one was. Its late requests do
        not step back if it has none in time: other flows would take its turn, again and again.
        """
        served = [(self._served_in(flow, name), name) for name, flow in flows.items()]
        first, *others = nsmallest(2, served)
        return first[1] if others and first[0] < others[0][0] else None

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
            yield from next(iter(flows.values())) if len(flows) == 1 else self._by_turns(flows)

    def _by_turns(self, flows: _Flows) -> Iterator[Ticket]:
        """Yield always the next ticket of the flow that was served least."""
        rest = {name: iter(flow) for name, flow in flows.items()}
        heap = [(self._served_in(flow, name), name) for name, flow in flows.items()]
        heapify(heap)
        while heap:
            name = heap[0][1]
            ticket = next(rest[name], None)
            if ticket is None:
                heappop(heap)
            else:
                yield ticket
                heapreplace(heap, (self.served(ticket.priority, name), name))

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
    claim, outputs = request.claim, EXPECTED_OUTPUT_TOKENS * request.num_sequences
    tokens = cost(request.body_bytes / BYTES_PER_TOKEN, outputs) / claim._weight
    return Share(claim._flow, claim.priority, tokens)
