"""The section `discovery`."""

from __future__ import annotations

from ipaddress import IPv4Address
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidatorFunctionWrapHandler, field_validator, model_validator

from extproc.address import MAX_PORT, check_endpoint_address
from extproc.bounds import MAX_ENDPOINTS
from extproc.config.base import IpPort, OneOf, Section

_KUBERNETES_NAME = r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$"
_KubernetesName = Annotated[str, Field(pattern=_KUBERNETES_NAME)]
_PORT_NAME = r"^[a-z0-9-]{1,63}$"
_MAX_MAX_ENDPOINTS = 2_000  # as many as docs/sizing.md has figures for
_Port = Annotated[int, Field(ge=1, le=MAX_PORT)]
_PortName = Annotated[str, Field(pattern=_PORT_NAME)]


class StaticEndpoint(Section):
    """One pod."""

    address: str = Field(description="`ip:port` as Envoy dials it; for names use `dns`.")
    name: str = Field("", description="Shown to people; the address if empty.")
    group: str = Field("", description="One of `pods.groups`; empty for none.")

    @field_validator("address")
    @classmethod
    def _can_be_dialled(cls, value: str) -> str:
        return check_endpoint_address(value)


class KubernetesConfig(OneOf):
    """Pods by the Kubernetes API: exactly one of `pod_selector`, `service`, `inference_pool`."""

    ONE_OF = ("pod_selector", "service", "inference_pool")

    namespace: str | None = Field(
        None,
        pattern=_KUBERNETES_NAME,
        description="Namespace of the pods; none means the service account's own, or that of the "
        "kubeconfig's context.",
    )
    pod_selector: str | None = Field(
        None,
        min_length=1,
        description="Label selector of the pods, e.g. `app=vllm,tier in (a,b)`; needs `port`.",
    )
    service: str | None = Field(
        None, pattern=_KUBERNETES_NAME, description="Service whose endpoints are the pods."
    )
    inference_pool: tuple[_KubernetesName, ...] | None = Field(
        None,
        min_length=1,
        description="InferencePool (inference.networking.k8s.io/v1) of the pods, or a list of "
        "several. Each of its target ports on each pod is an endpoint of its own.",
    )
    port: _Port | _PortName | tuple[_Port, ...] | None = Field(
        None,
        description="With `pod_selector`: the pods' port, or a list of ports, each an endpoint of "
        "its own. With `service`: the port's name, or its number on the pods. It is not needed "
        "where the Service has only one port.",
    )
    kubeconfig: Path | None = Field(
        None,
        description="Kubeconfig file. None means the pod's service account; outside a cluster, "
        "`$KUBECONFIG`, then `~/.kube/config`.",
    )
    watch_s: float = Field(
        60.0,
        ge=1,
        le=3600,
        description="Seconds after which a watch is renewed. A connection that broke without "
        "notice is noticed within this time.",
    )
    relist_s: float = Field(
        600.0, ge=1, le=86_400, description="Approximate seconds between two complete lists."
    )
    declarations: bool = Field(
        True,
        description="Follow LLMRoutes and InferenceModelRewrites, with `service` or "
        "`inference_pool`. `false` ignores those in the cluster; set it where the Role lacks the "
        "right to list them on purpose.",
    )

    @field_validator(
        "inference_pool",
        mode="before",
        json_schema_input_type=_KubernetesName | tuple[_KubernetesName, ...] | None,
    )
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("inference_pool")
    @classmethod
    def _each_once(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        return None if value is None else tuple(dict.fromkeys(value))

    @field_validator(
        "port",
        mode="wrap",
        json_schema_input_type=_Port | str | tuple[_Port, ...] | None,  # a number as text, too
    )
    @classmethod
    def _is_one_of_its_kinds(cls, value: Any, check: ValidatorFunctionWrapHandler) -> Any:
        """Report one mistake, in place of one for each kind of value that it might have been."""
        is_number_as_text = isinstance(value, str) and value.isdecimal()
        try:
            return check(int(value) if is_number_as_text else value)
        except ValueError:
            raise ValueError(
                f"must be a port from 1 to {MAX_PORT}, a list of them, or a port's name "
                f"({_PORT_NAME})"
            ) from None

    @model_validator(mode="after")
    def _port_fits(self) -> KubernetesConfig:
        is_number = isinstance(self.port, int) or (isinstance(self.port, tuple) and self.port)
        if self.pod_selector is not None and not is_number:
            raise ValueError("pod_selector needs port: a number, or a list of numbers")
        if self.service is not None and isinstance(self.port, tuple):
            raise ValueError("service takes one port: its name or number, or none")
        if self.inference_pool is not None and self.port is not None:
            raise ValueError("inference_pool takes no port: the pool has targetPorts")
        return self


class DnsConfig(Section):
    """Pods behind one name: docker-compose services, headless Services, Consul and the like."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9_.-]{1,253}$",
        description="Name to look up, with the system's search list. For `srv` it has service and "
        "protocol, as `_http._tcp.vllm`. `/etc/hosts` is not read. Each answer must list all "
        "pods. With servers that return a random few of them, pods would come and go.",
    )
    type: Literal["a", "srv"] = Field(
        "a",
        exclude=True,  # the source can tell by `port`
        description="`a`: `A` and `AAAA` records, with `port`. `srv`: SRV records, which have "
        "a port.",
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
    nameservers: tuple[IpPort, ...] = Field(
        (),
        description="`ip:port` of the DNS servers; none means those in /etc/resolv.conf. With "
        "servers listed here, the search list is not used.",
    )

    @field_validator("name")
    @classmethod
    def _is_no_address(cls, value: str) -> str:
        try:
            IPv4Address(value)
        except ValueError:
            return value
        raise ValueError("an IP address has no records: list the pod in discovery.static")

    @model_validator(mode="after")
    def _port_with_a_alone(self) -> DnsConfig:
        if (self.type == "a") == (self.port is None):
            raise ValueError("type a needs a port, type srv takes none: SRV records have one")
        return self


class DiscoveryConfig(OneOf):
    """Where the list of pods comes from: exactly one of the sources."""

    ONE_OF = ("static", "file", "kubernetes", "dns")

    static: tuple[StaticEndpoint, ...] | None = Field(
        None, description="The pods, listed here: `ip:port`, or `{address, name, group}`."
    )
    file: Path | None = Field(
        None,
        description="YAML file with a list of pods (as in `static`), watched for changes. `[]` "
        "means no pods; an empty file changes nothing. Replace it in one step: write another file, "
        "then rename it.",
    )
    file_interval_s: float = Field(
        0.5, gt=0, le=60, description="Seconds between two checks of the file for changes."
    )
    kubernetes: KubernetesConfig | None = Field(
        None, description="The pods as the Kubernetes API lists them."
    )
    dns: DnsConfig | None = Field(None, description="The pods as DNS lists them.")
    max_endpoints: int = Field(
        MAX_ENDPOINTS,
        ge=1,
        le=_MAX_MAX_ENDPOINTS,
        description="Pods that are used. Of more, the last by address get no requests: the log, "
        "`/healthz`, a metric and an alert say so. More pods take "
        "[more of each router](sizing.md#many-pods).",
    )

    @field_validator(
        "static",
        mode="before",
        json_schema_input_type=tuple[StaticEndpoint | str | int, ...] | None,
    )
    @classmethod
    def _written_short(cls, value: Any) -> Any:
        if not isinstance(value, list | tuple):
            return value
        return [{"address": each} if isinstance(each, str | int) else each for each in value]

    @field_validator("static")
    @classmethod
    def _each_once(cls, value: tuple[StaticEndpoint, ...] | None) -> Any:
        seen = set()
        for each in value or ():
            if each.address in seen:
                raise ValueError(f"{each.address} is listed twice; allowed: once")
            seen.add(each.address)
        return value

    @property
    def source(self) -> tuple[str, Any]:
        """The name of the given source, and its value."""
        return next(iter(self.given().items()))
