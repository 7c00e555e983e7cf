"""The section `discovery.kubernetes`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from extproc.config.base import Section
from extproc.core.address import MAX_PORT

_NAME = r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$"
_PORT_NAME = r"^[a-z0-9-]{1,63}$"
_Port = Annotated[int, Field(ge=1, le=MAX_PORT)]
_PortName = Annotated[str, Field(pattern=_PORT_NAME)]


class KubernetesConfig(Section):
    """Pods by the Kubernetes API: exactly one of `pod_selector`, `service`, `inference_pool`."""

    namespace: str | None = Field(
        None,
        pattern=_NAME,
        description="Namespace of the pods; none means the service account's own, or that of the "
        "kubeconfig's context.",
    )
    pod_selector: str | None = Field(
        None,
        min_length=1,
        description="Label selector of the pods, e.g. `app=vllm,tier in (a,b)`; needs `port`.",
    )
    service: str | None = Field(
        None, pattern=_NAME, description="Service whose endpoints are the pods."
    )
    inference_pool: str | None = Field(
        None,
        pattern=_NAME,
        description="InferencePool (inference.networking.k8s.io/v1) of the pods; each of its "
        "target ports on each pod is an endpoint of its own.",
    )
    port: _Port | _PortName | tuple[_Port, ...] | None = Field(
        None,
        description="With `pod_selector`: the pods' port, or a list of ports, each an endpoint of "
        "its own. With `service`: the port's name, or its number on the pods; not needed where the "
        "Service has only one port.",
    )
    kubeconfig: Path | None = Field(
        None,
        description="Kubeconfig file; none means the pod's service account, and outside a cluster "
        "`$KUBECONFIG`, then `~/.kube/config`.",
    )
    watch_s: float = Field(
        60.0,
        ge=1,
        le=3600,
        description="Seconds after which a watch is renewed: how long a connection that has died "
        "silently can go unnoticed.",
    )
    relist_s: float = Field(
        600.0, ge=1, le=86_400, description="Approximate seconds between two complete lists."
    )

    @field_validator("port", mode="before")
    @classmethod
    def _written_as_text(cls, value: Any) -> Any:
        return int(value) if isinstance(value, str) and value.isdecimal() else value

    @model_validator(mode="after")
    def _one_kind(self) -> KubernetesConfig:
        kinds = {
            "pod_selector": self.pod_selector,
            "service": self.service,
            "inference_pool": self.inference_pool,
        }
        if sum(kind is not None for kind in kinds.values()) != 1:
            raise ValueError(f"give exactly one of: {', '.join(kinds)}")
        is_number = isinstance(self.port, int) or (isinstance(self.port, tuple) and self.port)
        if self.pod_selector is not None and not is_number:
            raise ValueError("pod_selector needs port: a number, or a list of numbers")
        if self.service is not None and isinstance(self.port, tuple):
            raise ValueError("service takes one port: its name or number, or none")
        if self.inference_pool is not None and self.port is not None:
            raise ValueError("inference_pool takes no port: the pool has targetPorts")
        return self
