"""The section `outliers` of the configuration: when a pod that fails gets no requests."""

from __future__ import annotations

from pydantic import Field

from extproc.config.base import Section


class OutliersConfig(Section):
    """Ejecting pods that fail where others do not, by Envoy's access log."""

    is_on: bool = Field(True, description="Eject pods. Live.")
    consecutive_failures: int = Field(
        5, ge=1, le=1_000_000, description="Failures in a row that eject a pod. Live."
    )
    min_requests: int = Field(
        20,
        ge=1,
        le=1_000_000,
        description="Fewer requests than this to a pod within 30 s say nothing about its failure "
        "rate. Live.",
    )
    min_excess_ratio: float = Field(
        0.3,
        gt=0,
        le=1,
        description="A pod whose failure rate (0 to 1) is this far above the other pods' median is "
        "ejected. Live.",
    )
    base_ejection_s: float = Field(
        30.0,
        gt=0,
        le=86_400,
        description="Seconds of the first ejection; further ones last that long times their "
        "number. Live.",
    )
    max_ejection_s: float = Field(
        300.0, gt=0, le=86_400, description="Seconds of the longest ejection. Live."
    )
    max_ejected_ratio: float = Field(
        0.5, ge=0, le=1, description="At most this part of the pods is ejected. Live."
    )
