"""The section `scrape`."""

from __future__ import annotations

from pydantic import Field

from extproc.config.base import Section


class ScrapeConfig(Section):
    """How often pods are asked for their metrics and models."""

    interval_s: float = Field(
        0.05, ge=0.01, le=60, description="Seconds between two scrapes of a pod."
    )
    timeout_s: float = Field(1.0, gt=0, le=60, description="Seconds that a scrape may take.")
    expiry_s: float = Field(
        2.0,
        gt=0,
        le=600,
        description="Seconds after which a pod's last report is no longer trusted. Live.",
    )
    max_page_bytes: int = Field(
        16 * 1024 * 1024, ge=1024, le=2**30, description="Bytes of the largest metrics page read."
    )
    models_interval_s: float = Field(
        1.0, ge=0.05, le=600, description="Seconds between two requests for a pod's /v1/models."
    )
