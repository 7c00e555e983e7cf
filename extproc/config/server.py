"""The section `server`."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, field_validator

from extproc.config.base import HostPort, Section, check_host_port

_UNIX = "unix:"


class TlsConfig(Section):
    """TLS of the gRPC services. The files are read again when they change."""

    cert_file: Path = Field(description="PEM file with the router's certificate chain.")
    key_file: Path = Field(description="PEM file with the certificate's private key.")
    client_ca_file: Path | None = Field(
        None,
        description="PEM file with the CAs that client certificates must be signed by. Setting it "
        "turns mutual TLS on.",
    )


class ServerConfig(Section):
    """The gRPC services that Envoy calls."""

    address: str = Field(
        "127.0.0.1:9002",
        description="`host:port` or `unix:PATH` of the gRPC services. Port 0, here and for the "
        "other listeners, means any free port; the log names it.",
    )
    tls: TlsConfig | None = Field(
        None, description="TLS for the gRPC services; none means plain text."
    )
    drain_timeout_s: float = Field(
        30.0, ge=0, le=3600, description="Seconds that requests in progress get after SIGTERM."
    )
    drain_delay_s: float = Field(
        0.0,
        ge=0,
        le=600,
        description="Seconds for which requests are still accepted after the router reports that "
        "it is not ready. Load balancers notice it in this time.",
    )
    max_stall_s: float | None = Field(
        10.0,
        ge=2,
        le=3600,
        description="Seconds for which the event loop may stand still, as in a policy of your own. "
        "Then the process writes to standard error where it stands and ends with status 1, so that "
        "it is started again. None: never.",
    )
    max_concurrent_streams: int = Field(
        16_384,
        ge=1,
        le=2**31 - 1,
        description="ext_proc streams, one per request, open at once on a connection from Envoy.",
    )
    health_address: HostPort | None = Field(
        None,
        description="`host:port` that serves gRPC health alone, always without TLS, for the "
        "kubelet's probes. None means health is served on `address` only.",
    )
    fail_open: bool = Field(
        False,
        description="Whether Envoy lets requests through where no router answers (`extproc envoy "
        "--fail-open`, a pool's `failureMode: FailOpen`). Any client then gets any adapter, or the "
        "404 of a pod without it. So no adapter with `tenants` can be declared over HTTP, and "
        "`/healthz` warns of LLMRoutes that name tenants. Our chart sets it with its own values.",
    )

    @field_validator("address")
    @classmethod
    def _is_unix_or_has_a_port(cls, value: str) -> str:
        if value.startswith(_UNIX) and value != _UNIX:
            return value
        try:
            return check_host_port(value)
        except ValueError as error:
            raise ValueError(f"{error}; or `unix:PATH`") from None
