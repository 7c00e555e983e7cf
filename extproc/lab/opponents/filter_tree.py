"""The filter tree of the Gateway API Inference Extension's first release.

Source: kubernetes-sigs/gateway-api-inference-extension v0.1.0,
`pkg/ext-proc/scheduling/{scheduler,filter}.go`, the branch for critical requests. "Least X" keeps
every endpoint within the lowest n-th part of the range; what is left at the end is drawn from.

Its "active" adapters were the scraped ones, as `ScrapesOnly` shows; the snapshot's are fresher.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from extproc.types import Choice, EndpointView, RequestInfo, Snapshot

_Views = Sequence[EndpointView]


@dataclass(slots=True)
class FilterTree:
    """The v0.1 tree.

    Args:
        queue_threshold: Waiting requests from which on an endpoint's queue is not low.
    """

    queue_threshold: int = 50

    def choose(self, snapshot: Snapshot, request: RequestInfo, *, rng: random.Random) -> Choice:
        """Choose by the tree."""
        endpoints: _Views = snapshot.endpoints
        adapter = request.adapter
        low = [view for view in endpoints if view.num_waiting < self.queue_threshold]
        if low:
            active = [view for view in low if _is_active(view, adapter)]
            left: _Views = active or [view for view in low if _has_room(view)] or low
            reason = "affinity" if active else "room"
        else:
            shortest = _least(endpoints, lambda view: view.num_waiting)
            cheap = [v for v in shortest if _is_active(v, adapter) or _has_room(v)]
            left, reason = cheap or shortest, "busy"
        left = _least(left, lambda view: view.num_waiting)
        left = _least(left, lambda view: view.kv_usage_ratio)
        return Choice((rng.choice(left),), reason)


def _is_active(view: EndpointView, adapter: str | None) -> bool:
    return adapter is not None and adapter in view.pending_by_adapter


def _has_room(view: EndpointView) -> bool:
    return view.num_active_adapters < (view.max_loras or 0)


def _least(views: _Views, value: Callable[[EndpointView], float]) -> _Views:
    values = [value(view) for view in views]
    low, high = min(values), max(values)
    limit = low + (high - low) / len(views)
    return [view for view, own in zip(views, values, strict=True) if own <= limit]
