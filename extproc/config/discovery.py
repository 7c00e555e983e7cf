"""The section `discovery`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field, field_validator, model_validator

from extproc.config.base import Section
from extproc.config.dns import DnsConfig
from extproc.config.kubernetes import KubernetesConfig
from extproc.core.address import check_endpoint_address


class StaticEndpoint(Section):
    """One pod, written down."""

    address: str = Field(description="`ip:port` as Envoy dials it; for names there is `dns`.")
    name: str = Field("", description="Shown to people; the address if empty.")

    @field_validator("address")
    @classmethod
    def _can_be_dialled(cls, value: str) -> str:
        return check_endpoint_address(value)


class DiscoveryConfig(Section):
    """Where the list of pods comes from: exactly one of the sources."""

    static: tuple[StaticEndpoint, ...] | None = Field(
        None, description="The pods, listed here: `ip:port`, or `{address, name}`."
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
