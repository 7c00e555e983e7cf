"""The section `outliers`."""

from __future__ import annotations

from pydantic import Field

from extproc.config.base import Section


class OutliersConfig(Section):
    """Ejection of pods that fail where others do not, judged by Envoy's access log."""

    enabled: bool = Field(True, description="Eject pods. Live.")
    consecutive_failures: int = Field(
        5, ge=1, le=1_000_000, description="Failures in a row that eject a pod. Live."
    )
    min_requests: int = Field(
        20,
        ge=1,
        le=1_000_000,
        description="Requests to a pod within 30 s below which its failure rate is not judged. "
        "Live.",
    )
    min_excess_ratio: float = Field(
        0.3,
        gt=0,
        le=1,
        description="A pod is ejected when its failure rate (0 to 1) is this far above that of the "
        "other pods with requests of the same model and path. Live.",
    )
    base_ejection_s: float = Field(
        30.0,
        gt=0,
        le=86_400,
        description="Seconds of a pod's first ejection; the second lasts twice as long, the third "
        "three times, and so on. Live.",
    )
    max_ejection_s: float = Field(
        300.0, gt=0, le=86_400, description="Seconds of the longest ejection. Live."
    )
    max_ejected_ratio: float = Field(
        0.5, ge=0, le=1, description="Largest share of the pods ejected at once. Live."
    )
