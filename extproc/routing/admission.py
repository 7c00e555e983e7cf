"""Admission: whether a request may be dispatched now, given the candidates.

Three rules. An adapter goes to no endpoint whose largest rank is below its own: without another
one, 503. A cap: an endpoint with `max_pending` unfinished requests gets no more; those that other
routers tell of count unless its last report is newer and does not show them. And sheddable requests
(those with a priority below 0) go only to endpoints that have room by their own report.
When no endpoint is left by these two, the request is shed with 429.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache

from msgspec import Struct

from extproc.rejections import rank_too_high, saturated
from extproc.routing.modelroutes import as_fnmatch
from extproc.types import EndpointView, Rejection, RequestInfo

# The ranks of adapters, as the operator states them.
#
# No engine reports them, and the adapters' files are where only the engines read them. vLLM lists
# an adapter once it has loaded it, which proves that it fits; a server that lists adapters without
# loading them, as llm-d's simulator does, proves nothing.

_Patterns = tuple[tuple[str, int], ...]

MAX_REMEMBERED = 4096
"""Adapters whose rank by pattern is kept: a hundred patterns take 0.1 ms, more than a decision."""


class Ranks(Struct, frozen=True):
    """Ranks by adapter.

    Attributes:
        by_name: Of single adapters.
        by_pattern: (pattern, rank), for all other adapters; the first that matches counts. `*`
            stands for anything, all else for itself.
    """

    by_name: Mapping[str, int] = {}
    by_pattern: _Patterns = ()

    @classmethod
    def of_rules(cls, rules: Mapping[str, int]) -> Ranks:
        """Return the ranks by name or, with a `*`, by pattern; patterns in their order."""
        by_pattern = tuple((name, rank) for name, rank in rules.items() if "*" in name)
        return cls({name: rank for name, rank in rules.items() if "*" not in name}, by_pattern)

    def of(self, adapter: str) -> int | None:
        """Return the rank of an adapter; None for unknown."""
        rank = self.by_name.get(adapter)
        if rank is not None or not self.by_pattern:
            return rank
        return _first_match(self.by_pattern, adapter)


@lru_cache(MAX_REMEMBERED)
def _first_match(by_pattern: _Patterns, adapter: str) -> int | None:
    return next((rank for each, rank in by_pattern if fnmatchcase(adapter, as_fnmatch(each))), None)


class AdmissionSettings(Struct, frozen=True):
    """Settings of admission.

    Attributes:
        sheddable_max_waiting: With more requests waiting, an endpoint gets no sheddable ones.
        sheddable_max_kv_usage_ratio: The same with more of its KV cache in use, 0 to 1.
    """

    max_pending: int | None = None  # unfinished requests per endpoint, ours and others'
    retry_after_s: int = 1  # sent with a 429
    sheddable_max_waiting: int = 5
    sheddable_max_kv_usage_ratio: float = 0.8
    ranks: Ranks = Ranks()


def fitting(
    usable: Sequence[EndpointView], request: RequestInfo, settings: AdmissionSettings
) -> Sequence[EndpointView] | Rejection:
    """Return the endpoints that take the adapter's rank, or a Rejection (503) if none does.

    A rank or a limit that is unknown excludes nothing.
    """
    rank = None if request.adapter is None else settings.ranks.of(request.adapter)
    if rank is None or not usable:
        return usable
    limits = [view.max_lora_rank or rank for view in usable]
    if max(limits) < rank:
        return rank_too_high(request.client_model, rank, max(limits))
    return [view for view, limit in zip(usable, limits, strict=True) if limit >= rank]


def admit(
    candidates: Sequence[EndpointView], request: RequestInfo, settings: AdmissionSettings
) -> Sequence[EndpointView] | Rejection:
    """Return the candidates that may get one more request, or a Rejection (429) if none may."""
    cap, is_sheddable = settings.max_pending, request.claim.priority < 0
    if cap is None and not is_sheddable:
        return candidates
    free = [
        view
        for view in candidates
        if (cap is None or view.num_pending + view.num_foreign - view.num_unseen < cap)
        and not (is_sheddable and _is_loaded(view, settings))
    ]
    if free:
        return free
    return saturated(request.client_model, settings.retry_after_s)


def _is_loaded(view: EndpointView, settings: AdmissionSettings) -> bool:
    """Return whether its report says so; without one it is not known to be loaded."""
    return (
        view.num_waiting > settings.sheddable_max_waiting
        or view.kv_usage_ratio > settings.sheddable_max_kv_usage_ratio
    )
