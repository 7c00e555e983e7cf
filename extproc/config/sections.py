"""The sections that have no part of their own: one class each, in the order of the file."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from extproc.config.base import HostPort, Section
from extproc.config.otherpolicies import ShadowConfig, TrialConfig
from extproc.routing.policies import BUILT_IN


class AdminConfig(Section):
    """The HTTP port for people and Prometheus."""

    address: HostPort = Field(
        "127.0.0.1:9090",
        description="`host:port` of the live page, metrics and debugging; loopback by default.",
    )
    metrics_address: HostPort | None = Field(
        None,
        description="`host:port` that serves `/metrics` alone, for a Prometheus on another host. "
        "None means metrics are served on `address` only.",
    )
    max_decisions: int = Field(
        1000,
        ge=0,
        le=1_000_000,
        description="Decisions kept, with their outcomes, for `/debug/decisions` and "
        "`extproc watch --request`.",
    )
    max_adapter_labels: int = Field(
        200,
        ge=0,
        le=100_000,
        description="Adapters with a metric label of their own. The rest count as `other`.",
    )
    slo_ttft_s: float = Field(
        1.0,
        gt=0,
        le=3600,
        description="Seconds from a request's arrival to the first byte of the response's body "
        "within which it counts as answered in time (live page, metrics). Live.",
    )


class ScrapeConfig(Section):
    """How often pods are asked for their metrics and models."""

    interval_s: float = Field(
        0.05,
        ge=0.01,
        le=60,
        description="Seconds between two scrapes of a pod. A pod whose reports say what the router "
        "expects is scraped less often, down to once in 2 s "
        "([how a router looks at pods](knowledge.md#how-often-pods-are-read)). While the router is "
        "late, every pod is; no report gets older than half of `expiry_s` by that.",
    )
    budget: float = Field(
        0.05,
        ge=0.001,
        le=1,
        description="Cores (CPU seconds a second) that the scrapes of all pods and their lists of "
        "models may take. If they would take more, all pods wait longer, by the factor "
        "`extproc_scrape_stretch`. Live.",
    )
    timeout_s: float = Field(1.0, gt=0, le=60, description="Seconds that a scrape may take.")
    expiry_s: float = Field(
        2.0,
        gt=0,
        le=600,
        description="Seconds after which a pod's last report is no longer trusted, counted from "
        "when the next one is due. Live.",
    )
    max_page_bytes: int = Field(
        8 * 1024 * 1024, ge=1024, le=2**30, description="Bytes of the largest metrics page read."
    )
    models_interval_s: float = Field(
        1.0, ge=0.05, le=600, description="Seconds between two requests for a pod's /v1/models."
    )


class PolicyConfig(Section):
    """The policy that chooses a pod for each request."""

    name: str = Field(
        "least_harm",
        description=", ".join(f"`{name}`" for name in BUILT_IN)
        + ", the name of an entry point in the group `extproc.policies`, or `module:attribute`. "
        "Live.",
    )
    fallback: str = Field(
        "least_pending",
        description="The built-in policy that routes a request when the policy raises an error or "
        "makes a choice that is not allowed. Empty: such requests get a 503 with the code "
        "`policy_failed`. Live.",
    )
    args: dict[str, Any] = Field(
        default_factory=dict,
        description="Keyword arguments of the policy, e.g. `threshold` for `founding` (requests of "
        "one adapter on one pod). Live.",
    )
    trial: TrialConfig | None = Field(
        None, description="Another policy, tried on a share of the requests. Live."
    )
    shadow: ShadowConfig | None = Field(
        None, description="Another policy, asked about some decisions afterwards. Live."
    )

    @field_validator("fallback")
    @classmethod
    def _is_built_in(cls, name: str) -> str:
        if name and name not in BUILT_IN:
            raise ValueError(f"is {name!r}; allowed: {', '.join(BUILT_IN)}, or empty")
        return name


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
        description="Priority of each objective, by name. A request names its objective in "
        "`x-llm-d-inference-objective`, if `request.trusted_headers` has `objective`. An "
        "objective that is not listed has the priority of the InferenceObjective of its name, "
        "else 0. Requests with a priority below 0 are sheddable. A priority of the request's "
        "route takes precedence. Live.",
    )
    sheddable_max_waiting: int = Field(
        5,
        ge=0,
        le=1_000_000,
        description="A pod with more requests waiting in its engine gets no sheddable requests. "
        "Live.",
    )
    sheddable_max_kv_usage_ratio: float = Field(
        0.8,
        ge=0,
        le=1,
        description="A pod that uses a larger share of its KV cache gets no sheddable requests. "
        "Live.",
    )


class QueueConfig(Section):
    """Requests that are held until there is room for them. `request.max_hold_s` limits the time."""

    order: Literal["in_time", "first_come"] = Field(
        "in_time",
        description="Order of a tenant's requests. `in_time`: the earliest objective first, which "
        "is by arrival where all have the same. While there are more than leave within twice the "
        "objective, or if one is declared, those that can still be in time come first, and each "
        "eighth place is for the others. `first_come`: the oldest first. Live.",
    )
    fair: bool = Field(
        True,
        description="Whether tenants take turns, by the tokens that each has received (VTC). Live.",
    )
    ageing_s: float = Field(
        10.0,
        ge=0.1,
        le=3600,
        description="Seconds of waiting that count as one step of priority, for requests without "
        "an objective. Live.",
    )
    slot_hold_s: float = Field(
        10.0,
        ge=0,
        le=3600,
        allow_inf_nan=False,
        description="Seconds for which an adapter slot is kept for a request of a higher priority, "
        "or of the tenant whose turn it is. Requests of lower priorities let that request "
        "go first for as long. 0 keeps no slot. Live.",
    )
    slot_turn_s: float | None = Field(
        None,
        ge=0,
        le=3600,
        allow_inf_nan=False,
        description="Seconds for which an adapter keeps its slot while a request for another "
        "adapter waits as long. null: three times what a change costs there, which is a mean "
        "response and a load, as learned. 0: as long as the adapter has requests. Live.",
    )
    max_requests: int = Field(
        20_000,
        ge=0,
        le=1_000_000,
        description="Requests held at a time. Further requests get 429. Live.",
    )
    max_bytes: int = Field(
        256 * 1024 * 1024,
        ge=0,
        le=2**40,
        description="Bytes of the bodies of held requests, where the gateway has the router keep "
        "them (full duplex). Further requests get 429. Live.",
    )


class OutliersConfig(Section):
    """Ejection of pods that fail where other pods do not, judged by Envoy's access log."""

    enabled: bool = Field(True, description="Eject pods. Live.")
    consecutive_failures: int = Field(
        5, ge=1, le=1_000_000, description="Failures in a row that eject a pod. Live."
    )
    min_requests: int = Field(
        20,
        ge=1,
        le=1_000_000,
        description="A pod with fewer requests within 30 s is not judged by failure rate. Live.",
    )
    min_excess_ratio: float = Field(
        0.3,
        gt=0,
        le=1,
        description="A pod is ejected when its failure rate (0 to 1) exceeds that of the other "
        "pods by so much, for the same model and path. Live.",
    )
    base_ejection_s: float = Field(
        30.0,
        gt=0,
        le=86_400,
        description="Seconds of a pod's first ejection. The second lasts twice as long, the third "
        "three times, and so on. Live.",
    )
    max_ejection_s: float = Field(
        300.0, gt=0, le=86_400, description="Seconds of the longest ejection. Live."
    )
    max_ejected_ratio: float = Field(
        0.5, ge=0, le=1, description="Largest share of the pods ejected at once. Live."
    )


class DestinationConfig(Section):
    """How the choice is sent to Envoy."""

    num_fallbacks: int = Field(
        0,
        ge=0,
        le=16,
        description="Addresses sent after the first, for clusters in override-host mode only. In "
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
        description="Also send each address's rank as a score, in the metadata namespace "
        "`extproc.pick`, key `x-gateway-destination-endpoint-scores`.",
    )


class CompletionsConfig(Section):
    """How the router learns that a request has ended."""

    source: Literal["auto", "access_log", "response_phases", "scrape"] = Field(
        "auto",
        description="`access_log`: Envoy's gRPC access log. `response_phases`: the ext_proc stream "
        "stays open until the response has ended. `scrape`: the pods' own counts. `auto`: the "
        "access log of an Envoy while it reaches the routers, else the pods' counts "
        "(docs/several-routers.md).",
    )
    scrape_grace_s: float = Field(
        0.5,
        ge=0,
        le=600,
        description="Seconds that a request has to reach its pod before the pod's counts may "
        "declare it ended. It applies where the counts are the only source.",
    )
    lost_after_s: float = Field(
        300.0,
        ge=0,
        le=86_400,
        description="Where another source reports ends, the pods' counts end a request once its "
        "pod has served one that came so many seconds later, in case that source missed an end.",
    )
    max_age_s: float = Field(
        3600.0,
        gt=0,
        le=604_800,
        description="Seconds after which an unfinished request is counted as ended.",
    )


class TracingConfig(Section):
    """Spans by OpenTelemetry (`pip install '.[otel]'`)."""

    enabled: bool = Field(
        False,
        description="Send a span for each decision, as a child of Envoy's. OpenTelemetry's "
        "environment variables, e.g. OTEL_EXPORTER_OTLP_ENDPOINT, set the destination.",
    )
    sample_ratio: float = Field(
        1.0,
        ge=0,
        le=1,
        description="Share of decisions that are traced, where Envoy has not already decided it.",
    )


class LogConfig(Section):
    """The log on standard error."""

    level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Lowest level that is written."
    )
    json_lines: bool = Field(True, description="One JSON object per line; plain text otherwise.")
