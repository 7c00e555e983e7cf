"""S-LoRA's orders of admission, moved from its engine to the gateway.

Source: S-LoRA (MLSys 2024) section 5.2 and Appendix B; its code, `slora/server/router/`
`req_queue.py` (first come first served), `abort_req_queue.py` (early abort; without its abort it is
last come first served under overload), `cluster_req_queue.py` (clusters of adapters).

There the queue is in the engine. A vLLM engine serves its queue in order of arrival, so the queue
is kept here and an endpoint gets one request at a time, once it has room: no request waits there,
and fewer than `max_running` run. For S-LoRA room is KV for the whole response, whose length it
knows; a policy does not, so it has a limit instead.

- `fcfs`, `lcfs`: the oldest goes first, the newest goes first.
- `abort`: requests that would miss their first token are dropped; then the newest goes first if at
  least as many requests come as are admitted, else the oldest. The code compares moving averages,
  whole numbers with 0.7 for the newest, per fetch of several requests; here one is admitted at a
  time and counts arrivals per admission, with 0.1 for the newest. With 0.7 chance decides, and the
  oldest go first too often for what S-LoRA's authors measured.
- `cluster_size`: if this many adapters run at an endpoint, requests for them go first.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Literal

from extproc.core.policies.ranking import least
from extproc.core.types import Choice, EndpointView, RequestInfo, Snapshot, Wait
from extproc.sim.opponents.recent import SinceReport

Order = Literal["fcfs", "lcfs", "abort"]

_FORGET_S = 5.0
"""A held request that has not asked again this long after its time has no client any more."""


@dataclass(slots=True)
class _Held:
    adapter: str | None
    arrived_at_s: float
    due_s: float


@dataclass(slots=True)
class SloraQueue:
    """A queue at the gateway in one of S-LoRA's orders.

    Args:
        order: See above.
        cluster_size: Adapters of a cluster; 0 for no clusters.
        max_running: Unfinished requests at one endpoint; 0 for no limit but its own.
        ttft_s: Objective for the first token; S-LoRA's is 6 s.
        margin_s: Time that a request still needs once it is admitted, as in the code.
        weight: Of the newest count in the moving average of requests that come per admission.
        again_s: The n-th in order asks again after n times this.
    """

    order: Order = "fcfs"
    cluster_size: int = 0
    max_running: int = 0
    ttft_s: float = 6.0
    margin_s: float = 0.5
    weight: float = 0.1
    again_s: float = 0.1
    _held: dict[tuple[str, float], _Held] = field(default_factory=dict, init=False)
    _sent: SinceReport = field(default_factory=SinceReport, init=False)
    _num_added: int = field(default=0, init=False)  # since the last admission
    _added: float = field(default=1.0, init=False)  # moving average of that

    def choose(
        self, snapshot: Snapshot, request: RequestInfo, *, rng: random.Random
    ) -> Choice | Wait:
        """Choose an endpoint with room if the request is first in order, else wait."""
        now, key = snapshot.now, (request.request_id, request.arrived_at_s)
        if key not in self._held:
            self._held[key] = _Held(request.adapter, request.arrived_at_s, now)
            self._num_added += 1
        if self.order == "abort" and now - request.arrived_at_s + self.margin_s >= self.ttft_s:
            del self._held[key]
            return Wait(inf, "abort")
        self._held[key].due_s = now
        place = self._place(self._held[key], snapshot.endpoints, now)
        views = [view for view in snapshot.endpoints if self._has_room(view)]
        if place or not views:
            self._held[key].due_s = now + self.again_s * max(1, place)
            return Wait(self._held[key].due_s, "queue")
        del self._held[key]
        self._added, self._num_added = self._recently_added, 0
        view = least(views, lambda view: view.num_pending, rng)
        self._sent.record(view.address, 1, now=now)
        return Choice((view,), self.order)

    def _has_room(self, view: EndpointView) -> bool:
        if self.max_running and view.num_pending >= self.max_running:
            return False
        return view.num_waiting + self._sent.amount(view) < 1

    def _place(self, own: _Held, views: Sequence[EndpointView], now: float) -> int:
        """Return how many requests go before it."""
        running = {
            adapter
            for view in views
            if self.cluster_size and view.num_active_adapters >= self.cluster_size
            for adapter in view.pending_by_adapter
        }
        is_overloaded = self.order == "abort" and self._recently_added >= 1
        takes_newest = self.order == "lcfs" or is_overloaded
        sign = -1 if takes_newest else 1

        def key(held: _Held) -> tuple[bool, float]:
            return bool(running) and held.adapter not in running, sign * held.arrived_at_s

        mine = key(own)
        self._held = {k: held for k, held in self._held.items() if held.due_s + _FORGET_S > now}
        return sum(key(held) < mine for held in self._held.values())

    @property
    def _recently_added(self) -> float:
        return self.weight * self._num_added + (1 - self.weight) * self._added
