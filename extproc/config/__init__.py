"""The configuration: one YAML file, checked before anything starts.

Every field has a unit in its name or description, a default, a range and a line that says what it
is for; `docs/configuration.md` is generated from here. Fields marked *live* are taken over while
the service runs, as soon as the file changes and is valid; the others need a restart.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from extproc.config.base import Address, check_port
from extproc.config.base import Section as _Section
from extproc.config.dns import DnsConfig
from extproc.config.kubernetes import KubernetesConfig
from extproc.config.outliers import OutliersConfig
from extproc.config.peers import PeersConfig
from extproc.config.tracing import TracingConfig
from extproc.core.address import check_endpoint_address
from extproc.core.routes import DEFAULT_INFERENCE_PATHS, RouteTable

MESSAGE_OVERHEAD_BYTES = 1024 * 1024
"""Headers and framing of an ext_proc message beside the body it carries."""


class TlsConfig(_Section):
    """TLS of a listener; files are read again when they change."""

    cert_file: Path = Field(description="PEM file with our certificate chain.")
    key_file: Path = Field(description="PEM file with its private key.")
    client_ca_file: Path | None = Field(
        None, description="PEM file with the CAs of client certificates; set means mutual TLS."
    )


class ServerConfig(_Section):
    """Where Envoy reaches us."""

    address: str = Field(
        "127.0.0.1:9002",
        pattern=r"^(unix:.+|(\[[0-9A-Fa-f:.]+\]|[^\s:/,%]+):[0-9]{1,5})$",
        description="`host:port` or `unix:PATH` of the gRPC services. Port 0, here and for the "
        "other listeners, is a free one, which is logged.",
    )
    transport: Literal["wire", "grpcio"] = Field(
        "wire", description="`wire`: our own HTTP/2 server; `grpcio`: grpc.aio, the reference."
    )
    tls: TlsConfig | None = Field(None, description="TLS for the gRPC services; none means plain.")
    drain_timeout_s: float = Field(
        30.0, ge=0, le=3600, description="Seconds that requests under way may take after SIGTERM."
    )
    drain_delay_s: float = Field(
        0.0,
        ge=0,
        le=600,
        description="Seconds between not being ready and taking no more requests, so that load "
        "balancers can notice.",
    )
    max_concurrent_streams: int = Field(
        16_384, ge=1, le=2**31 - 1, description="Requests under decision per Envoy connection."
    )
    health_address: Address | None = Field(
        None,
        description="`host:port` of gRPC health alone, always without TLS, for the kubelet's "
        "probes; none means on `address` only.",
    )

    @field_validator("address")
    @classmethod
    def _is_unix_or_has_a_port(cls, value: str) -> str:
        return value if value.startswith("unix:") else check_port(value)


class AdminConfig(_Section):
    """The HTTP port for people and Prometheus."""

    address: Address = Field("127.0.0.1:9090", description="`host:port`; loopback by default.")
    metrics_address: Address | None = Field(
        None,
        description="`host:port` of `/metrics` alone, for a Prometheus elsewhere; none means on "
        "`address` only.",
    )
    max_decisions: int = Field(
        1000, ge=0, le=1_000_000, description="Decisions kept for /debug/decisions and watchers."
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
        description="Seconds from a request's arrival to the first byte of its answer's body, "
        "within which it counts as answered in time (live page, metrics). Live.",
    )


class StaticEndpoint(_Section):
    """One pod, written down."""

    address: str = Field(description="`ip:port` as Envoy dials it; for names there is `dns`.")
    name: str = Field("", description="For people; the address if empty.")

    @field_validator("address")
    @classmethod
    def _can_be_dialled(cls, value: str) -> str:
        return check_endpoint_address(value)


class DiscoveryConfig(_Section):
    """Which pods exist: exactly one of the sources."""

    static: tuple[StaticEndpoint, ...] | None = Field(
        None, description="The pods, written down here: `ip:port`, or `{address, name}`."
    )
    file: Path | None = Field(
        None,
        description="YAML file with a list of pods (as in `static`), watched for change; `[]` is "
        "none, and an empty file changes nothing. Replace it in one step: write another, rename.",
    )
    file_interval_s: float = Field(
        0.5, gt=0, le=60, description="Seconds between looks at the file."
    )
    kubernetes: KubernetesConfig | None = Field(None, description="Pods by the Kubernetes API.")
    dns: DnsConfig | None = Field(None, description="The pods' addresses by DNS.")

    @field_validator("static", mode="before")
    @classmethod
    def _written_short(cls, value: Any) -> Any:
        if not isinstance(value, list | tuple):
            return value
        return [{"address": each} if isinstance(each, str) else each for each in value]

    @field_validator("static")
    @classmethod
    def _each_once(cls, value: tuple[StaticEndpoint, ...] | None) -> Any:
        seen = set()
        for each in value or ():
            if each.address in seen:
                raise ValueError(f"{each.address} stands twice; allowed: once")
            seen.add(each.address)
        return value

    @model_validator(mode="after")
    def _one_source(self) -> DiscoveryConfig:
        sources = {
            "static": self.static,
            "file": self.file,
            "kubernetes": self.kubernetes,
            "dns": self.dns,
        }
        if sum(source is not None for source in sources.values()) != 1:
            raise ValueError(f"give exactly one of: {', '.join(sources)}")
        return self


class PodsConfig(_Section):
    """What all pods have in common."""

    engine: Literal["vllm", "sglang"] = Field(
        "vllm", description="Engine profile: which metrics are read, by which names."
    )
    tls: bool = Field(False, description="Pods speak HTTPS.")
    ca_file: Path | None = Field(None, description="PEM file with the CAs of the pods.")
    tls_verify: bool = Field(True, description="Check the pods' certificates.")
    api_key_file: Path | None = Field(
        None, description="File with the API key that pods ask for, for our own calls alone."
    )
    max_loras: int | None = Field(
        None, ge=1, le=100_000, description="GPU adapter slots a pod, where its metrics do not say."
    )
    max_cpu_loras: int | None = Field(
        None,
        ge=1,
        le=1_000_000,
        description="Adapters in a pod's CPU cache (--max-cpu-loras); none means as GPU slots.",
    )
    max_lora_rank: int | None = Field(
        None, ge=1, le=512, description="Largest adapter rank (--max-lora-rank); for people."
    )
    orca: bool = Field(
        False,
        description="Ask for ORCA load reports with each request and read them from the access "
        "log. vLLM gives them on non-streaming answers only and pays for each, hence off.",
    )


class ScrapeConfig(_Section):
    """How often pods are asked."""

    interval_s: float = Field(
        0.05, ge=0.01, le=60, description="Seconds between two scrapes of a pod."
    )
    timeout_s: float = Field(1.0, gt=0, le=60, description="Seconds that a scrape may take.")
    expiry_s: float = Field(
        2.0,
        gt=0,
        le=600,
        description="Seconds after which a pod's last report is not trusted. Live.",
    )
    max_page_bytes: int = Field(
        16 * 1024 * 1024, ge=1024, le=2**30, description="Bytes of the largest metrics page read."
    )
    models_interval_s: float = Field(
        1.0, ge=0.05, le=600, description="Seconds between two looks at a pod's /v1/models."
    )


class PolicyConfig(_Section):
    """The rule that chooses."""

    name: str = Field(
        "founding",
        description="`founding`, `least_pending`, `round_robin`, `random`, the name of an entry "
        "point in the group `extproc.policies`, or `module:attribute`. Live.",
    )
    args: dict[str, Any] = Field(
        default_factory=dict,
        description="Keyword arguments of the rule, e.g. `threshold` (requests of one adapter on "
        "one pod) for `founding`. Live.",
    )


class AdmissionConfig(_Section):
    """When requests are shed with 429."""

    max_pending_per_endpoint: int | None = Field(
        None,
        ge=1,
        le=10_000_000,
        description="Unfinished requests per pod; none means no cap. Live.",
    )
    retry_after_s: int = Field(
        1, ge=0, le=3600, description="Seconds in the Retry-After of a 429. Live."
    )
    priorities: dict[str, int] = Field(
        default_factory=dict,
        description="Priority of each objective by name; a request names its own in "
        "`x-llm-d-inference-objective`. Not named here is 0; below 0 is sheddable. Live.",
    )
    sheddable_max_waiting: int = Field(
        5,
        ge=0,
        le=1_000_000,
        description="Requests waiting in a pod's engine above which it gets nothing sheddable. "
        "Live.",
    )
    sheddable_max_kv_usage_ratio: float = Field(
        0.8,
        ge=0,
        le=1,
        description="Part of a pod's KV cache in use above which it gets nothing sheddable. Live.",
    )


class RequestConfig(_Section):
    """How requests are read."""

    max_body_bytes: int = Field(
        16 * 1024 * 1024,
        ge=1,
        le=2**30,
        description="Bytes of the largest request body; the gRPC receive limit follows it.",
    )
    max_bytes_in_memory: int | None = Field(
        None,
        ge=1,
        le=2**40,
        description="Bytes of all request bodies in memory at once, and of answers not yet sent. "
        "Above it large uploads wait, and what still does not fit gets 429. None means a quarter "
        "of the memory that the process may use (cgroup, else resource limits, else the machine), "
        "512 MiB at most.",
    )
    early_decision_bytes: int = Field(
        256 * 1024,
        ge=1,
        le=2**30,
        description="Bytes of a streamed body from which on its prefix may decide.",
    )
    paths: tuple[str, ...] = Field(
        tuple(DEFAULT_INFERENCE_PATHS),
        min_length=1,
        description="Inference paths that are served: in full, as `/v1/completions`, without a "
        "trailing slash; not `/v1/models`, which the router answers.",
    )
    session_header: str | None = Field(
        None,
        pattern=r"^[a-z0-9-]+$",
        description="Header (lower case) whose value keeps a client on one pod; allows stored "
        "responses.",
    )
    max_hold_s: float = Field(
        60.0,
        ge=0,
        le=3600,
        description="Seconds that a rule may hold a request; keep it 5 s under Envoy's "
        "max_message_timeout.",
    )
    max_sessions: int = Field(
        10_000, ge=1, le=10_000_000, description="Sessions remembered, least recently used go."
    )
    allow_mode_override: bool = Field(
        False, description="Envoy's filter has allow_mode_override: we may ask for the body."
    )
    assumed_body_mode: Literal[
        "none", "streamed", "buffered", "buffered-partial", "full-duplex-streamed"
    ] = Field("buffered", description="For data planes that do not send protocol_config.")
    model_namespace: str = Field(
        "extproc.request", description="Metadata namespace of a model that Envoy read itself."
    )
    model_key: str = Field("model", description="Metadata key of it.")
    honours_subset: bool = Field(
        True,
        description="Choose among the endpoints that the gateway names in `envoy.lb.subset_hint`, "
        "where it does.",
    )

    @field_validator("paths")
    @classmethod
    def _can_be_routed(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        RouteTable(value)
        return value

    @model_validator(mode="after")
    def _one_body_fits(self) -> RequestConfig:
        least_bytes = self.max_body_bytes + MESSAGE_OVERHEAD_BYTES
        if self.max_bytes_in_memory is not None and self.max_bytes_in_memory < least_bytes:
            raise ValueError(
                f"max_bytes_in_memory: {self.max_bytes_in_memory}; allowed: at least "
                f"{least_bytes}, the largest body and what comes with it"
            )
        return self


class DestinationConfig(_Section):
    """What Envoy is told."""

    num_fallbacks: int = Field(
        0,
        ge=0,
        le=16,
        description="Addresses after the first; only override-host clusters take any. Live.",
    )
    num_alternates: int = Field(
        2,
        ge=0,
        le=2,
        description="Where there are no fallbacks: addresses told beside the destination, in the "
        "metadata `extproc.alternates`. `original-dst` dials them where the first refuses. Live.",
    )
    eds_cluster: str = Field("pods", description="Resource name that endpoint discovery answers.")
    tells_scores: bool = Field(
        False,
        description="Also tell the rank of each address as a score, in the metadata "
        "`extproc.pick` / `x-gateway-destination-endpoint-scores`.",
    )


class CompletionsConfig(_Section):
    """How we learn that a request has ended."""

    source: Literal["auto", "access_log", "response_phases", "scrape"] = Field(
        "auto",
        description="`access_log`: Envoy's gRPC access log; `response_phases`: the ext_proc stream "
        "stays open to the end; `scrape`: the pods' own counts; `auto`: the access log once one "
        "has connected, the pods' counts before.",
    )
    scrape_grace_s: float = Field(
        0.5,
        ge=0,
        le=600,
        description="Seconds that a pick is given to reach its pod before the pod's counts may "
        "end it, where they are the only source.",
    )
    lost_after_s: float = Field(
        10.0, ge=0, le=86_400, description="The same where another source is in use."
    )
    max_age_s: float = Field(
        3600.0, gt=0, le=604_800, description="Seconds after which an unfinished pick is given up."
    )


class LogConfig(_Section):
    """What is written to standard error."""

    level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least level.")
    json_lines: bool = Field(True, description="One JSON object a line; else plain text.")


class Config(_Section):
    """The whole file."""

    preset: Literal["founding"] | None = Field(
        None,
        description="`founding`: the founding rule, one destination, bodies assumed BUFFERED; "
        "fits the Envoy configuration `original-dst`.",
    )
    server: ServerConfig = Field(default_factory=ServerConfig, description="gRPC services.")
    admin: AdminConfig = Field(default_factory=AdminConfig, description="HTTP for people.")
    discovery: DiscoveryConfig = Field(description="Which pods exist.")
    pods: PodsConfig = Field(default_factory=PodsConfig, description="What pods have in common.")
    scrape: ScrapeConfig = Field(default_factory=ScrapeConfig, description="Asking the pods.")
    policy: PolicyConfig = Field(default_factory=PolicyConfig, description="The rule. Live.")
    admission: AdmissionConfig = Field(
        default_factory=AdmissionConfig, description="Shedding. Live."
    )
    outliers: OutliersConfig = Field(
        default_factory=OutliersConfig, description="Pods that fail where others do not. Live."
    )
    request: RequestConfig = Field(default_factory=RequestConfig, description="Reading requests.")
    destination: DestinationConfig = Field(
        default_factory=DestinationConfig, description="What Envoy is told."
    )
    completions: CompletionsConfig = Field(
        default_factory=CompletionsConfig, description="How requests end."
    )
    peers: PeersConfig | None = Field(None, description="Other replicas of this router.")
    tracing: TracingConfig = Field(default_factory=TracingConfig, description="Spans.")
    log: LogConfig = Field(default_factory=LogConfig, description="Logging.")

    @model_validator(mode="after")
    def _preset_holds(self) -> Config:
        if self.preset == "founding":
            if self.policy.name != "founding":
                raise ValueError("preset founding: policy.name must be founding or left out")
            if self.destination.num_fallbacks:
                raise ValueError("preset founding: destination.num_fallbacks must be 0")
            if self.request.assumed_body_mode != "buffered":
                raise ValueError("preset founding: request.assumed_body_mode must be buffered")
        return self
