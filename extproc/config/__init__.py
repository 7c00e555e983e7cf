"""The configuration: one YAML file, checked before anything starts.

A large section has a file of its own; the rest are in `sections`. `configured` makes the settings
of each part of them. Every field has a unit in its
name or description, a default, a range and a sentence that describes it; `docs/configuration.md` is
generated from them. Fields whose description ends with "Live." take effect as soon as the file has
changed and is valid; changes of other fields need a restart.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from extproc.config.adapters import AdaptersConfig
from extproc.config.base import Section
from extproc.config.discovery import DiscoveryConfig
from extproc.config.peers import PeersConfig
from extproc.config.pods import PodsConfig
from extproc.config.request import RequestConfig
from extproc.config.routes import MAX_ROUTES, CanariesConfig, RouteConfig, check_routes
from extproc.config.sections import (
    AdminConfig,
    AdmissionConfig,
    CompletionsConfig,
    DestinationConfig,
    LogConfig,
    OutliersConfig,
    PolicyConfig,
    QueueConfig,
    ScrapeConfig,
    TracingConfig,
)
from extproc.config.server import ServerConfig
from extproc.request.controlheaders import MODEL_REWRITE, names_of

__all__ = ["Config"]


def _section(kind: type[Section]) -> Any:
    """A field for a section that may be left out, described by the section's own docstring."""
    return Field(default_factory=kind, description=kind.__doc__)


class Config(Section):
    """The whole file."""

    preset: Literal["founding"] | None = Field(
        None,
        description="`founding`: the founding policy, one destination and buffered bodies. Use it "
        "with `extproc envoy --preset founding`.",
    )
    server: ServerConfig = _section(ServerConfig)
    admin: AdminConfig = _section(AdminConfig)
    discovery: DiscoveryConfig = Field(description=DiscoveryConfig.__doc__)
    pods: PodsConfig = _section(PodsConfig)
    adapters: AdaptersConfig = _section(AdaptersConfig)
    scrape: ScrapeConfig = _section(ScrapeConfig)
    policy: PolicyConfig = _section(PolicyConfig)
    admission: AdmissionConfig = _section(AdmissionConfig)
    routes: tuple[RouteConfig, ...] = Field(
        (),
        max_length=MAX_ROUTES,
        description=f"{RouteConfig.__doc__} Live.",
    )
    canaries: CanariesConfig = _section(CanariesConfig)
    queue: QueueConfig = _section(QueueConfig)
    outliers: OutliersConfig = _section(OutliersConfig)
    request: RequestConfig = _section(RequestConfig)
    destination: DestinationConfig = _section(DestinationConfig)
    completions: CompletionsConfig = _section(CompletionsConfig)
    peers: PeersConfig | None = Field(None, description=PeersConfig.__doc__)
    tracing: TracingConfig = _section(TracingConfig)
    log: LogConfig = _section(LogConfig)

    @model_validator(mode="before")
    @classmethod
    def _preset_names_its_policy(cls, fields: Any) -> Any:
        """Name the founding policy where the preset asks for it and `policy` names none."""
        if not isinstance(fields, dict) or fields.get("preset") != "founding":
            return fields
        policy = fields.get("policy", {})
        return (
            {**fields, "policy": {"name": "founding", **policy}}
            if isinstance(policy, dict)
            else fields
        )

    @model_validator(mode="after")
    def _groups_are_known(self) -> Config:
        discovery, groups = self.discovery, self.pods.groups
        kubernetes = discovery.kubernetes
        if groups and (discovery.dns or (kubernetes and kubernetes.service)):
            source = "dns" if discovery.dns else "kubernetes.service"
            raise ValueError(f"pods.groups: discovery.{source} does not know a pod's group")
        for each in discovery.static or ():
            if each.group and each.group not in groups:
                known = ", ".join(groups) or "none"
                raise ValueError(
                    f"discovery.static: {each.address} is in the group {each.group}, which "
                    f"pods.groups does not have; allowed: {known}"
                )
        return self

    @model_validator(mode="after")
    def _ranks_fit(self) -> Config:
        groups = [group.over(self.pods) for group in self.pods.groups.values()]
        limits = [each.max_lora_rank for each in (self.pods, *groups)]
        for name, rank in self.adapters.ranks.items():
            if all(limit is not None and limit < rank for limit in limits):
                raise ValueError(f"adapters.ranks: {name} has {rank}, more than any max_lora_rank")
        return self

    @model_validator(mode="after")
    def _routes_are_apart(self) -> Config:
        check_routes(self.routes, self.adapters.declared)
        return self

    @model_validator(mode="after")
    def _models_can_be_rewritten(self) -> Config:
        mode = self.request.assumed_body_mode
        if mode not in ("none", "streamed") or self.request.allow_mode_override:
            return self
        needs = [f"routes: {each.name} has targets" for each in self.routes if each.targets]
        needs += [
            f"routes: {each.name} has an adapter with a version"
            for each in self.routes
            if each.adapter is not None and each.adapter.version
        ]
        versions = (each.name for each in self.adapters.declared if each.version)
        needs += [f"adapters.declared: {name} has a version" for name in versions]
        if not names_of(self.request.trusted_headers).isdisjoint(MODEL_REWRITE):
            needs.append("request.trusted_headers: has model_rewrite")
        if needs:
            raise ValueError(
                f"{needs[0]}, but `model` cannot be rewritten in a body that comes {mode} "
                "(request.assumed_body_mode), unless request.allow_mode_override is true"
            )
        return self

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
