"""The founding rule: follow the adapter, without flapping.

Among the endpoints where the adapter is loaded and its pending requests are below a threshold, the
one with the MOST pending requests for it; if there is none, the one with the fewest active
adapters, then the least pending in total. The rule's text leaves ties of the first stage open: they
go by the order of the second, so that an adapter that is loaded but idle in many places goes to the
emptiest of them. Complete equals go by chance. The rule of the first Gateway API
inference-extension proof of concept (kubernetes-sigs/gateway-api-inference-extension, commit
11a80776, 2024).
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from extproc.core.policies.ranking import least, lowest, one_of
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
        # Written out: a method call for each endpoint is what these loops would cost.
        below = [v for v in loaded if v.pending_by_adapter.get(adapter, 0) < self.threshold]
        if not below:
            return Choice((_emptiest(endpoints, rng),), "spill" if loaded else "cold")
        busiest = lowest(below, [-v.pending_by_adapter.get(adapter, 0) for v in below])
        return Choice((_emptiest(busiest, rng),), "affinity")


def _emptiest(views: Sequence[EndpointView], rng: random.Random) -> EndpointView:
    """The fewest active adapters, then the least pending in total; of equals any."""
    fewest = lowest(views, [len(view.pending_by_adapter) for view in views])
    return one_of(lowest(fewest, [view.num_pending for view in fewest]), rng)


def _num_pending(view: EndpointView) -> int:
    return view.num_pending
