"""The section `discovery.dns`. Part of `extproc.config`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from extproc.config.base import Address, Section
from extproc.core.address import MAX_PORT


class DnsConfig(Section):
    """Pods by a name: docker-compose services, headless Services, Consul and the like."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9_.-]{1,253}$",
        description="Name to ask for, by the system's search list; for `srv` with service and "
        "protocol, as `_http._tcp.vllm`. `/etc/hosts` is not read. The answer must have all pods: "
        "servers that give a random few make them come and go.",
    )
    type: Literal["a", "srv"] = Field(
        "a", description="`a`: A and AAAA records, with `port`; `srv`: SRV records, port included."
    )
    port: int | None = Field(
        None, ge=1, le=MAX_PORT, description="Port of every pod; with `a`, and there only."
    )
    family: Literal["auto", "ipv4", "ipv6", "both"] = Field(
        "auto",
        description="`auto`: IPv4, or IPv6 where there is none; a pod with one of each is not "
        "taken for two. `both`: every address is a pod.",
    )
    interval_s: float = Field(
        5.0,
        ge=0.1,
        le=3600,
        description="Seconds between two lookups, whatever the records' TTL: Docker's says 600.",
    )
    timeout_s: float = Field(
        3.0, gt=0, le=60, description="Seconds that an answer may take, repetitions included."
    )
    empty_after_s: float = Field(
        30.0,
        ge=0,
        le=86_400,
        description="Seconds for which the last pods are kept when the name has no addresses or "
        "does not exist. Without any answer they are kept for good.",
    )
    nameservers: tuple[Address, ...] = Field(
        (),
        description="`ip:port` of the servers to ask; none means /etc/resolv.conf. With servers "
        "given the name is taken as complete.",
    )

    @model_validator(mode="after")
    def _port_with_a_alone(self) -> DnsConfig:
        if (self.type == "a") == (self.port is None):
            raise ValueError("type a needs a port, type srv takes none: SRV records have one")
        return self
