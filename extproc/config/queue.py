"""The section `queue`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from extproc.config.base import Section


class QueueConfig(Section):
    """Requests that are held until there is room for them. `request.max_hold_s` limits the time."""

    order: Literal["newest", "first_come", "deadline", "clusters"] = Field(
        "newest",
        description="Which of a tenant's requests is next. `newest`: those that can still have "
        "their first token in time, as many as can at the present pace and rather the newest "
        "(S-LoRA's early abort); `first_come`; `deadline`: the earliest objective first; "
        "`clusters`: requests for adapters that run (S-LoRA's adapter clustering). Live.",
    )
    fair: bool = Field(
        True,
        description="Whether tenants have turns, by the tokens that each has got (VTC). Live.",
    )
    ageing_s: float = Field(
        10.0,
        ge=0.1,
        le=3600,
        description="Seconds of waiting that count as one step of priority, for requests without "
        "an objective. Live.",
    )
    cluster_size: int = Field(
        8,
        ge=1,
        le=100_000,
        description="Adapters that run on a pod from which on `clusters` prefers their requests. "
        "Live.",
    )
    slot_hold_s: float = Field(
        10.0,
        ge=0,
        le=3600,
        allow_inf_nan=False,
        description="Seconds for which a slot is kept for a request of a higher priority, or of "
        "the tenant whose turn it is, and for which those of lower priorities that came later let "
        "it go first; 0 means that nothing is kept. Live.",
    )
    slot_turn_s: float = Field(
        2.0,
        ge=0,
        le=3600,
        allow_inf_nan=False,
        description="Seconds for which an adapter keeps its slot while a request for another one "
        "has waited as long for one, or a quarter of a second if no third one waits; 0 means as "
        "long as it has requests. Live.",
    )
    max_requests: int = Field(
        20_000, ge=0, le=1_000_000, description="Requests held at a time; others get 429. Live."
    )
    max_bytes: int = Field(
        256 * 1024 * 1024,
        ge=0,
        le=2**40,
        description="Bytes of the bodies of held requests, where the gateway has the router keep "
        "them (full duplex); others get 429. Live.",
    )
