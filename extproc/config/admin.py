"""The section `admin`."""

from __future__ import annotations

from pydantic import Field

from extproc.config.base import HostPort, Section


class AdminConfig(Section):
    """The HTTP port for people and Prometheus."""

    address: HostPort = Field(
        "127.0.0.1:9090",
        description="`host:port` of the live page, metrics and debugging; loopback by default.",
    )
    metrics_address: HostPort | None = Field(
        None,
        description="`host:port` that serves `/metrics` alone, for a Prometheus elsewhere; none "
        "means metrics are served on `address` only.",
    )
    max_decisions: int = Field(
        1000,
        ge=0,
        le=1_000_000,
        description="Decisions kept for `/debug/decisions` and `extproc watch`.",
    )
    max_adapter_labels: int = Field(
        200,
        ge=0,
        le=100_000,
        description="Adapters with a metric label of their own; the rest count as `other`.",
    )
    slo_ttft_s: float = Field(
        1.0,
        gt=0,
        le=3600,
        description="Seconds from a request's arrival to the first byte of the response's body "
        "within which it counts as answered in time (live page, metrics). Live.",
    )
