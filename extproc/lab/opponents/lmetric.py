"""LMetric: the product of two loads, without a weight between them.

Source: "LMetric" (OSDI 2026, arXiv 2603.15202): the least of (uncached prompt tokens queued, the
request's own included) x (batch size, queue included). It knows no adapters; the terms for loads
and slots are this project's: a cold adapter costs as many prompt tokens as could be computed while
it is loaded.

As shipped it knows each endpoint's queue; here the queue is the last report's waiting requests at
the mean prompt length, and what was sent since; the batch is our own unfinished requests.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from extproc.lab.opponents.recent import SinceReport
from extproc.lab.opponents.ties import least
from extproc.types import Choice, EndpointView, RequestInfo, Snapshot

_BYTES_PER_TOKEN = 4
_SMOOTHING = 0.02
"""Weight of one request in the mean prompt length: about the last fifty count."""


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
