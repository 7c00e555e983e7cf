"""The section `admission`."""

from __future__ import annotations

from pydantic import Field

from extproc.config.base import Section


class AdmissionConfig(Section):
    """When requests are refused with 429."""

    max_pending_per_endpoint: int | None = Field(
        None,
        ge=1,
        le=10_000_000,
        description="Unfinished requests per pod; none means no limit. Live.",
    )
    retry_after_s: int = Field(
        1, ge=0, le=3600, description="Seconds in the Retry-After header of a 429. Live."
    )
    priorities: dict[str, int] = Field(
        default_factory=dict,
        description="Priority of each objective, by name; a request names its objective in "
        "`x-llm-d-inference-objective`, if `request.trusted_headers` has `objective`. Objectives "
        "not listed have that of the InferenceObjective of their name, else 0; requests below 0 "
        "are sheddable. A priority of the request's route counts before all. Live.",
    )
    sheddable_max_waiting: int = Field(
        5,
        ge=0,
        le=1_000_000,
        description="Requests waiting in a pod's engine above which the pod gets no sheddable "
        "requests. Live.",
    )
    sheddable_max_kv_usage_ratio: float = Field(
        0.8,
        ge=0,
        le=1,
        description="Share of a pod's KV cache in use above which the pod gets no sheddable "
        "requests. Live.",
    )
