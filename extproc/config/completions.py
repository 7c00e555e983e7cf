"""The section `completions`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from extproc.config.base import Section


class CompletionsConfig(Section):
    """How the router learns that a request has ended."""

    source: Literal["auto", "access_log", "response_phases", "scrape"] = Field(
        "auto",
        description="`access_log`: Envoy's gRPC access log; `response_phases`: the ext_proc stream "
        "stays open until the response has ended; `scrape`: the pods' own counts; `auto`: the "
        "access log once one has connected, the pods' counts before that.",
    )
    scrape_grace_s: float = Field(
        0.5,
        ge=0,
        le=600,
        description="Seconds that a request gets to reach its pod before the pod's counts may "
        "declare it ended, where they are the only source.",
    )
    lost_after_s: float = Field(
        10.0,
        ge=0,
        le=86_400,
        description="The same where there is another source, in case that one misses an end.",
    )
    max_age_s: float = Field(
        3600.0,
        gt=0,
        le=604_800,
        description="Seconds after which an unfinished request is counted as ended.",
    )
