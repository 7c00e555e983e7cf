"""The rules of two papers, which count what was sent since each endpoint's last report.

**LMetric**: the product of two loads, without a weight between them. Source: "LMetric" (OSDI 2026,
arXiv 2603.15202): the least of (uncached prompt tokens queued, the request's own included) x (batch
size, queue included). It knows no adapters; the terms for loads and slots are this project's: a
cold adapter costs as many prompt tokens as could be computed while it is loaded. As shipped it
knows each endpoint's queue; here the queue is the last report's waiting requests at the mean prompt
length, and what was sent since; the batch is our own unfinished requests.

**S-LoRA's orders of admission**, moved from its engine to the router's queue. Source: S-LoRA (MLSys
2024) section 5.2 and Appendix B; its code, `slora/server/router/` `req_queue.py` (first come first
served), `abort_req_queue.py` (early abort). There the queue is in the engine. A vLLM engine serves
its queue in order of arrival. So the router holds requests, and an endpoint gets one at a time,
once it has room: no request waits there, and fewer than `max_running` run. For S-LoRA room is KV
for the whole response, whose length it knows; a policy does not, so it has a limit instead. The
router's queue decides which request is next, in the order that the policy sets. Early abort differs
from the code, which compares arrivals with admissions and then turns from the oldest to the newest:
see `extproc.queue.tenantorder.newest_in_time`.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from dataclasses import dataclass, field
from math import inf

from extproc.lab.opponents.ties import least
from extproc.queue import QueueSettings
from extproc.types import Choice, EndpointView, RequestInfo, Snapshot, Wait

_BYTES_PER_TOKEN = 4
_SMOOTHING = 0.02
"""Weight of one request in the mean prompt length: about the last fifty count."""


class SinceReport:
    """Amounts sent per endpoint since its last report."""

    def __init__(self) -> None:
        self._sent: defaultdict[str, deque[tuple[float, float]]] = defaultdict(deque)
        self._totals: defaultdict[str, float] = defaultdict(float)

    def record(self, address: str, amount: float, *, now: float) -> None:
        """Record that `amount` is sent to `address` now."""
        self._sent[address].append((now, amount))
        self._totals[address] += amount

    def amount(self, view: EndpointView) -> float:
        """Return the amount sent to this endpoint since its last report was taken."""
        sent, reported_at_s = self._sent[view.address], view.reported_at_s
        if reported_at_s is not None:
            while sent and sent[0][0] <= reported_at_s:
                self._totals[view.address] -= sent.popleft()[1]
        if not sent:
            self._totals[view.address] = 0.0  # forget rounding errors
        return self._totals[view.address]


@dataclass(slots=True)
class LMetric:
    """(prompt tokens queued) x (batch).

    Args:
        load_tokens: Prompt tokens that loading an adapter costs. 100 ms at 0.035 ms
            a token (8B on an H100) are about 3,000.
        slot_tokens: The same for an adapter that would find every slot in use.
    """

    load_tokens: float = 3_000
    slot_tokens: float = 30_000
    _mean_tokens: float = field(default=0.0, init=False)
    _sent: SinceReport = field(default_factory=SinceReport, init=False)

    def choose(self, snapshot: Snapshot, request: RequestInfo, *, rng: random.Random) -> Choice:
        """Choose the least product."""
        own = request.body_bytes / _BYTES_PER_TOKEN
        self._mean_tokens += _SMOOTHING * (own - self._mean_tokens) if self._mean_tokens else own
        cost = {view.address: self._cost(view, request, own) for view in snapshot.endpoints}
        chosen = least(snapshot.endpoints, lambda view: cost[view.address], rng)
        self._sent.record(chosen.address, own, now=snapshot.now)
        return Choice((chosen,), "product")

    def _cost(self, view: EndpointView, request: RequestInfo, own: float) -> float:
        tokens = view.num_waiting * self._mean_tokens + self._sent.amount(view) + own
        adapter = request.adapter
        if adapter is not None and adapter not in view.pending_by_adapter:
            if adapter not in view.gpu_adapters:
                tokens += self.load_tokens
            if view.max_loras is not None and view.num_active_adapters >= view.max_loras:
                tokens += self.slot_tokens
        return tokens * (view.num_pending + 1)


class SloraRoom:
    """The endpoint with the fewest requests, of those that have room in S-LoRA's sense.

    Args:
        order: Of the queue, `first_come` or `in_time`.
        max_running: Unfinished requests at one endpoint; 0 for no limit but its own.

    Attributes:
        queue: Has no turns and no ageing, as S-LoRA's.
        aborts: Requests that would be late are refused.
    """

    def __init__(self, order: str = "first_come", max_running: int = 0) -> None:
        self.queue = QueueSettings(order, fair=False, ageing_s=inf)
        self.aborts = order == "in_time"
        self._max_running = max_running
        self._sent = SinceReport()

    def choose(
        self, snapshot: Snapshot, request: RequestInfo, *, rng: random.Random
    ) -> Choice | Wait:
        """Choose an endpoint with room, or wait for a report or an end of a request."""
        views = [view for view in snapshot.endpoints if self._has_room(view)]
        if not views:
            return Wait(inf, "room")
        view = least(views, lambda view: view.num_pending, rng)
        self._sent.record(view.address, 1, now=snapshot.now)
        return Choice((view,), self.queue.order)

    def _has_room(self, view: EndpointView) -> bool:
        if self._max_running and view.num_pending >= self._max_running:
            return False
        return view.num_waiting + self._sent.amount(view) < 1
