"""Hold at the gateway: send only where an adapter need not wait, and hold the rest here.

After SkyWalker (EuroSys 2026), selective pushing: a request goes to a replica only if its queue is
empty, else it waits in the balancer. Here an endpoint is open if the request's adapter would not
have to wait for a slot: it runs there already, or a slot is free. A wrapper around any policy; the
policy chooses among the endpoints that are open.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from extproc.routing.policies import Policy
from extproc.types import Choice, EndpointView, RequestInfo, Snapshot, Wait


@dataclass(slots=True)
class Hold:
    """A policy that may wait.

    Args:
        policy: Chooses among the open endpoints.
        again_s: Seconds until a held request asks again.
    """

    policy: Policy
    again_s: float = 0.02

    def choose(
        self, snapshot: Snapshot, request: RequestInfo, *, rng: random.Random
    ) -> Choice | Wait:
        """Choose among the open endpoints, or wait."""
        views = tuple(view for view in snapshot.endpoints if _has_slot(view, request.adapter))
        if not views:
            return Wait(snapshot.now + self.again_s, "hold")
        return self.policy.choose(Snapshot(views, snapshot.now), request, rng=rng)


def _has_slot(view: EndpointView, adapter: str | None) -> bool:
    if adapter is None or adapter in view.pending_by_adapter or view.max_loras is None:
        return True
    return view.num_active_adapters < view.max_loras
