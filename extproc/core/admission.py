"""Whether a request may be dispatched now, given the candidates and nothing else.

Two rules. A cap: an endpoint with as many unfinished requests as `max_pending` gets no more. And
what is sheddable (an objective with a negative priority) goes only to endpoints that have room by
their own report. When that leaves nobody, the request is shed with 429.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from extproc.core.rejections import saturated
from extproc.core.types import EndpointView, Rejection, RequestInfo


@dataclass(frozen=True, slots=True)
class AdmissionSettings:
    """What admission is configured with.

    Attributes:
        max_pending: Unfinished requests per endpoint, own and others'; None for no cap.
        retry_after_s: Sent with a 429.
        priorities: Priority of each objective by name; others have 0. Below 0 is sheddable.
        sheddable_max_waiting: With more requests waiting, an endpoint gets nothing sheddable.
        sheddable_max_kv_usage_ratio: With more of its KV cache in use, neither.
    """

    max_pending: int | None = None
    retry_after_s: int = 1
    priorities: Mapping[str, int] = field(default_factory=dict)
    sheddable_max_waiting: int = 5
    sheddable_max_kv_usage_ratio: float = 0.8


def admit(
    candidates: Sequence[EndpointView], request: RequestInfo, settings: AdmissionSettings
) -> Sequence[EndpointView] | Rejection:
    """The candidates that may take one more request, or a Rejection (429) if there are none."""
    cap, is_sheddable = settings.max_pending, False
    if settings.priorities:
        is_sheddable = settings.priorities.get(request.hints.objective, 0) < 0
    if cap is None and not is_sheddable:
        return candidates
    free = [
        view
        for view in candidates
        if (cap is None or view.num_pending < cap)
        and not (is_sheddable and _is_loaded(view, settings))
    ]
    if free:
        return free
    return saturated(request.model, settings.retry_after_s)


def _is_loaded(view: EndpointView, settings: AdmissionSettings) -> bool:
    """By its report; one that has none is not known to be loaded."""
    return (
        view.num_waiting > settings.sheddable_max_waiting
        or view.kv_usage_ratio > settings.sheddable_max_kv_usage_ratio
    )
