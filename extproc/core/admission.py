"""Whether a request may be dispatched now, given the candidates and nothing else.

The one rule here is a cap: an endpoint with as many unfinished requests as `max_pending` gets no
more. When that leaves nobody, the request is shed with 429.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from extproc.core.rejections import saturated
from extproc.core.types import EndpointView, Rejection, RequestInfo


@dataclass(frozen=True, slots=True)
class AdmissionSettings:
    """What admission is configured with.

    Attributes:
        max_pending: Unfinished requests per endpoint, own and others'; None for no cap.
        retry_after_s: Sent with a 429.
    """

    max_pending: int | None = None
    retry_after_s: int = 1


def admit(
    candidates: Sequence[EndpointView], request: RequestInfo, settings: AdmissionSettings
) -> Sequence[EndpointView] | Rejection:
    """The candidates that may take one more request, or a Rejection (429) if there are none."""
    cap = settings.max_pending
    if cap is None:
        return candidates
    free = [view for view in candidates if view.num_pending < cap]
    if free:
        return free
    return saturated(request.model, settings.retry_after_s)
