"""The configuration: one YAML file, checked before anything starts.

A section is a file here. Every field has a unit in its name or description, a default, a range and
a sentence that says what it is for; `docs/configuration.md` is generated from them. Fields marked
*live* take effect while the service runs, as soon as the file changes and is valid; the others need
a restart.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from extproc.config.admin import AdminConfig
from extproc.config.admission import AdmissionConfig
from extproc.config.base import Section
from extproc.config.completions import CompletionsConfig
from extproc.config.destination import DestinationConfig
from extproc.config.discovery import DiscoveryConfig
from extproc.config.log import LogConfig
from extproc.config.outliers import OutliersConfig
from extproc.config.peers import PeersConfig
from extproc.config.pods import PodsConfig
from extproc.config.policy import PolicyConfig
from extproc.config.request import RequestConfig
from extproc.config.scrape import ScrapeConfig
from extproc.config.server import ServerConfig
from extproc.config.tracing import TracingConfig

__all__ = ["Config"]


class Config(Section):
    """The whole file."""

    preset: Literal["founding"] | None = Field(
        None,
        description="`founding`: the founding policy, one destination, buffered bodies; goes with "
        "`extproc envoy --preset founding`.",
    )
    server: ServerConfig = Field(
        default_factory=ServerConfig, description="The gRPC services that Envoy calls."
    )
    admin: AdminConfig = Field(default_factory=AdminConfig, description="HTTP for people.")
    discovery: DiscoveryConfig = Field(description="Where the list of pods comes from.")
    pods: PodsConfig = Field(
        default_factory=PodsConfig, description="Properties that all pods share."
    )
    scrape: ScrapeConfig = Field(
        default_factory=ScrapeConfig, description="How often pods are asked for their state."
    )
    policy: PolicyConfig = Field(
        default_factory=PolicyConfig, description="The policy that chooses. Live."
    )
    admission: AdmissionConfig = Field(
        default_factory=AdmissionConfig, description="When requests are refused. Live."
    )
    outliers: OutliersConfig = Field(
        default_factory=OutliersConfig, description="Pods that fail where others do not. Live."
    )
    request: RequestConfig = Field(
        default_factory=RequestConfig, description="How requests are read."
    )
    destination: DestinationConfig = Field(
        default_factory=DestinationConfig, description="How Envoy is told of the choice."
    )
    completions: CompletionsConfig = Field(
        default_factory=CompletionsConfig,
        description="How the router learns that a request has ended.",
    )
    peers: PeersConfig | None = Field(None, description="The other replicas of this router.")
    tracing: TracingConfig = Field(default_factory=TracingConfig, description="Spans.")
    log: LogConfig = Field(default_factory=LogConfig, description="The log on standard error.")

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
