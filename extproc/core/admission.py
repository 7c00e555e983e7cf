"""Admission: whether a request may be dispatched now, given the candidates.

Two rules. A cap: an endpoint with `max_pending` unfinished requests gets no more. And sheddable
requests (an objective with a negative priority) go only to endpoints that have room by their own
report. When no endpoint is left, the request is shed with 429.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from extproc.core.rejections import saturated
from extproc.core.types import EndpointView, Rejection, RequestInfo


class AdmissionSettings(Struct, frozen=True):
    """Settings of admission.

    Attributes:
        priorities: Priority of each objective by name; others have 0. Below 0 is sheddable.
        sheddable_max_waiting: With more requests waiting, an endpoint gets no sheddable ones.
        sheddable_max_kv_usage_ratio: The same with more of its KV cache in use, 0 to 1.
    """

    max_pending: int | None = None  # unfinished requests per endpoint, ours and others'
    retry_after_s: int = 1  # sent with a 429
    priorities: Mapping[str, int] = {}
    sheddable_max_waiting: int = 5
    sheddable_max_kv_usage_ratio: float = 0.8


def admit(
    candidates: Sequence[EndpointView], request: RequestInfo, settings: AdmissionSettings
) -> Sequence[EndpointView] | Rejection:
    """Return the candidates that may get one more request, or a Rejection (429) if none may."""
    cap, is_sheddable = settings.max_pending, False
    if settings.priorities:
        is_sheddable = settings.priorities.get(request.hints.objective, 0) < 0
    if cap is None and not is_sheddable:
        return candidates
    free = [
        view
        for view in candidates
        if (cap is None or view.num_pending + view.num_foreign < cap)
        and not (is_sheddable and _is_loaded(view, settings))
    ]
    if free:
        return free
    return saturated(request.model, settings.retry_after_s)


def _is_loaded(view: EndpointView, settings: AdmissionSettings) -> bool:
    """Return whether its report says so; without one it is not known to be loaded."""
    return (
        view.num_waiting > settings.sheddable_max_waiting
        or view.kv_usage_ratio > settings.sheddable_max_kv_usage_ratio
    )
