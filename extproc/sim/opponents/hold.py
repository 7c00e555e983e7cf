"""Hold at the gateway: send only to pods without a queue, and hold the rest here.

Source: SkyWalker (EuroSys 2026), selective pushing: a request goes to a replica only if its queue
is empty, else it waits in the balancer. A wrapper around any policy; the policy chooses among the
endpoints that are open.

As published an endpoint is open if no request waits there. Slot-aware, it is open if its adapter
would not have to wait for a slot: it runs there already, or a slot is free.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from extproc.core.policies import Policy
from extproc.core.types import Choice, EndpointView, RequestInfo, Snapshot, Wait
from extproc.sim.opponents.recent import SinceReport


@dataclass(slots=True)
class Hold:
    """A policy that may wait.

    Args:
        policy: Chooses among the open endpoints.
        slack: Requests that may wait at an open endpoint.
        again_s: Seconds until a held request asks again.
        is_slot_aware: See above.
    """

    policy: Policy
    slack: int = 1
    again_s: float = 0.02
    is_slot_aware: bool = False
    _sent: SinceReport = field(default_factory=SinceReport, init=False)

    def choose(
        self, snapshot: Snapshot, request: RequestInfo, *, rng: random.Random
    ) -> Choice | Wait:
        """Choose among the open endpoints, or wait."""
        is_open = self._has_slot if self.is_slot_aware else self._has_no_queue
        views = tuple(view for view in snapshot.endpoints if is_open(view, request.adapter))
        if not views:
            return Wait(snapshot.now + self.again_s, "hold")
        choice = self.policy.choose(Snapshot(views, snapshot.now), request, rng=rng)
        if isinstance(choice, Choice):
            self._sent.record(choice.endpoints[0].address, 1, now=snapshot.now)
        return choice

    def _has_no_queue(self, view: EndpointView, _adapter: str | None) -> bool:
        return view.num_waiting + self._sent.amount(view) < self.slack

    def _has_slot(self, view: EndpointView, adapter: str | None) -> bool:
        if adapter is None or adapter in view.pending_by_adapter or view.max_loras is None:
            return True
        return view.num_active_adapters < view.max_loras
