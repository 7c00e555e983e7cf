"""The section `peers`."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from extproc.address import MAX_PORT
from extproc.config.base import HostPort, IpPort, OneOf


class PeersConfig(OneOf):
    """The other replicas of this router, from exactly one source, which may list this one too."""

    ONE_OF = ("service", "dns", "static")

    service: str | None = Field(
        None,
        pattern=r"^[a-z0-9.-]{1,253}$",
        description="Kubernetes Service of the router: its ready endpoints are the replicas.",
    )
    namespace: str | None = Field(
        None, description="Namespace of `service`; none means the router's own, as for `discovery`."
    )
    kubeconfig: Path | None = Field(
        None, description="As in `discovery.kubernetes`, for `service` alone."
    )
    dns: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9_.-]{1,253}$",
        description="Name whose `A` and `AAAA` records are the replicas.",
    )
    static: tuple[HostPort, ...] | None = Field(None, description="`ip:port` of each replica.")
    port: int | None = Field(
        None,
        ge=1,
        le=MAX_PORT,
        description="Port of the replicas' gRPC services, with `service` and `dns`; none means "
        "the port of `server.address`.",
    )
    interval_s: float = Field(
        5.0, ge=0.1, le=3600, description="Seconds between two lookups of `dns`."
    )
    nameservers: tuple[IpPort, ...] = Field(
        (),
        description="`ip:port` of the DNS servers for `dns`; none means those in /etc/resolv.conf.",
    )
    key_file: Path | None = Field(
        None,
        description="File with the key that replicas share, of at least 32 characters. Each "
        "replica proves that it has the key, and a router without it is no peer. During a change "
        "of keys the file has two lines: either key is accepted, and the first one is used as "
        "proof. None: every router that listens at an address of the source is trusted; with "
        "`server.tls.client_ca_file`, every client.",
    )
    ca_file: Path | None = Field(
        None,
        description="PEM file with the CAs that replicas' certificates must be signed by, where "
        "`server.tls` is set. None means its `client_ca_file`, or else its own certificate.",
    )
    tls_name: str | None = Field(
        None, description="Name that replicas' certificates must have; none accepts any."
    )
    tls_verify: bool = Field(
        True,
        description="Whether replicas' certificates are checked. Turn it off where each replica "
        "signs its own.",
    )
    max_queued_bytes: int = Field(
        16 * 1024 * 1024,
        ge=1024,
        le=2**30,
        description="Bytes of access log entries kept for replicas that are not accepting them.",
    )
    hold_s: float = Field(
        10.0,
        ge=0,
        le=600,
        description="Seconds for which entries are kept for a replica that is not connected yet.",
    )
