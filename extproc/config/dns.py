"""The section `discovery.dns`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from extproc.config.base import HostPort, Section
from extproc.core.address import MAX_PORT


class DnsConfig(Section):
    """Pods behind one name: docker-compose services, headless Services, Consul and the like."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9_.-]{1,253}$",
        description="Name to look up, with the system's search list; for `srv` with service and "
        "protocol, as `_http._tcp.vllm`. `/etc/hosts` is not read. Each answer must list all pods: "
        "with servers that return a random few of them, pods would come and go.",
    )
    type: Literal["a", "srv"] = Field(
        "a",
        description="`a`: A and AAAA records, with `port`; `srv`: SRV records, which have a port.",
    )
    port: int | None = Field(
        None, ge=1, le=MAX_PORT, description="Port of every pod; with `type: a` only."
    )
    family: Literal["auto", "ipv4", "ipv6", "both"] = Field(
        "auto",
        description="`auto`: IPv4, or IPv6 where there is none, so that a pod with one address of "
        "each family counts once. `both`: every address is a pod.",
    )
    interval_s: float = Field(
        5.0,
        ge=0.1,
        le=3600,
        description="Seconds between two lookups. The records' TTL is ignored: Docker's is 600.",
    )
    timeout_s: float = Field(
        3.0, gt=0, le=60, description="Seconds that a lookup may take, retries included."
    )
    empty_after_s: float = Field(
        30.0,
        ge=0,
        le=86_400,
        description="Seconds for which the last known pods are kept when the name has no addresses "
        "or does not exist. While no server answers at all, they are kept without limit.",
    )
    nameservers: tuple[HostPort, ...] = Field(
        (),
        description="`ip:port` of the DNS servers; none means those in /etc/resolv.conf. With "
        "servers listed here, the search list is not used.",
    )

    @model_validator(mode="after")
    def _port_with_a_alone(self) -> DnsConfig:
        if (self.type == "a") == (self.port is None):
            raise ValueError("type a needs a port, type srv takes none: SRV records have one")
        return self
