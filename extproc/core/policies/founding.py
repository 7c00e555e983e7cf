"""The founding rule: follow the adapter, without flapping.

Among the endpoints where the adapter is loaded and its pending requests are below a threshold, the
one with the MOST pending requests for it; if there is none, the one with the fewest active
adapters, then the least pending in total. The rule of the first Gateway API inference-extension
proof of concept (kubernetes-sigs/gateway-api-inference-extension, commit 11a80776, 2024).
"""

from __future__ import annotations

import random

from extproc.core.policies.ranking import least
from extproc.core.types import Choice, EndpointView, RequestInfo, Snapshot

DEFAULT_THRESHOLD = 16
"""Requests. A batch of 16 still decodes at nearly the speed of one on an 8B-class model (H100:
10.5 ms a step and 0.044 ms more per sequence), so packing up to here costs next to nothing."""


class Founding:
    """The founding rule.

    Args:
        threshold: Pending requests of one adapter on one endpoint from which on it spills, at
            least 1.
    """

    def __init__(self, threshold: int = DEFAULT_THRESHOLD) -> None:
        if threshold < 1:
            raise ValueError(f"threshold is {threshold}; allowed: 1 or more requests")
        self.threshold = threshold

    def choose(self, snapshot: Snapshot, request: RequestInfo, *, rng: random.Random) -> Choice:
        """Choose by adapter; the base model goes where the least is pending."""
        adapter, endpoints = request.adapter, snapshot.endpoints
        if adapter is None:
            return Choice((least(endpoints, _num_pending, rng),), "base")
        loaded = [view for view in endpoints if view.has_loaded(adapter)]
        below = [view for view in loaded if view.pending(adapter) < self.threshold]
        if below:
            return Choice((least(below, lambda view: -view.pending(adapter), rng),), "affinity")
        emptiest = least(endpoints, lambda v: (v.num_active_adapters, v.num_pending), rng)
        return Choice((emptiest,), "spill" if loaded else "cold")


def _num_pending(view: EndpointView) -> int:
    return view.num_pending
