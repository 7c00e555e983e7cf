"""The section `destination`."""

from __future__ import annotations

from pydantic import Field

from extproc.config.base import Section


class DestinationConfig(Section):
    """How the choice is sent to Envoy."""

    num_fallbacks: int = Field(
        0,
        ge=0,
        le=16,
        description="Addresses sent after the first, for clusters in override-host mode only: in "
        "original-dst mode Envoy takes no list, and every request would get 503. Live.",
    )
    num_alternates: int = Field(
        2,
        ge=0,
        le=2,
        description="Addresses sent in the metadata `extproc.alternates` when there are no "
        "fallbacks. In original-dst mode Envoy dials them if the first one refuses. Live.",
    )
    eds_cluster: str = Field(
        "pods", description="Resource name under which endpoint discovery (EDS) lists the pods."
    )
    emit_scores: bool = Field(
        False,
        description="Also send each address's rank as a score, in the metadata `extproc.pick` / "
        "`x-gateway-destination-endpoint-scores`.",
    )
