"""The section `routes`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Literal

from pydantic import Field, StringConstraints, model_validator

from extproc.adapters.declared import Names
from extproc.config.adapters import AdapterConfig, DeclaredConfig
from extproc.config.base import Section
from extproc.routing.canaries import ERROR_RATE

MAX_ROUTES = 1000
MAX_PATTERNS = 100
"""Of all routes together: each is tried for a model that no route lists by name."""

_MAX_PRIORITY = 2**31 - 1
_Model = Annotated[str, StringConstraints(min_length=1, max_length=256)]
_Tenant = Annotated[str, StringConstraints(min_length=1, max_length=253)]
_Share = Annotated[float, Field(ge=0.001, le=1_000_000, allow_inf_nan=False)]


class ObjectiveConfig(Section):
    """A time limit, and the share of a route's requests that should keep it."""

    seconds: float = Field(
        ge=0.001, le=3600, allow_inf_nan=False, description="The time limit. Live."
    )
    percentile: float = Field(
        95.0,
        gt=0,
        lt=100,
        description="Percent of the requests that should keep the limit; for metrics and alerts. "
        "Live.",
    )


class ObjectivesConfig(Section):
    """How fast a route's responses should be."""

    ttft: ObjectiveConfig | None = Field(
        None,
        description="Time from a request's arrival to its first token. None leaves it to the "
        "request and the policy. Live.",
    )
    tpot: ObjectiveConfig | None = Field(
        None, description="Time per output token after the first. Live."
    )


class TargetConfig(Section):
    """A model that requests of a route are sent for."""

    model: _Model = Field(description="Name of an adapter or base model, as pods know it. Live.")
    weight: float | None = Field(
        None,
        ge=0,
        le=1_000_000,
        allow_inf_nan=False,
        description="Share of the requests, relative to the weights of the other targets. If no "
        "target has a weight, all are equal. If some have one, a target without gets nothing, as "
        "with 0. Live.",
    )


class RouteConfig(Section):
    """Models whose requests belong together, in the order in which their patterns are tried."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$",
        description="Name of the route in metrics. Letters, digits and `-_.`, at most 63. Live.",
    )
    models: tuple[_Model, ...] = Field(
        min_length=1,
        max_length=10_000,
        description="Names that clients write in `model`, and patterns in which `*` stands for "
        "anything. A name counts before all patterns, and the first pattern that matches counts. "
        f"All routes together have at most {MAX_PATTERNS} patterns. Live.",
    )
    targets: tuple[TargetConfig, ...] = Field(
        (),
        max_length=100,
        description="Models that pods read in place of the one that clients write: aliases and "
        "canaries. `models` then lists names, or `*` alone. `*` alone stands for bodies without a "
        "`model`, and for every model without a route of its own with targets. Live.",
    )
    priority: int | None = Field(
        None,
        ge=-_MAX_PRIORITY,
        le=_MAX_PRIORITY,
        description="Requests of a higher priority go first; below 0 they are sheddable. None "
        "leaves it to the objective that a request names, else 0. Live.",
    )
    objectives: ObjectivesConfig = Field(
        default_factory=ObjectivesConfig,
        description="How fast its responses should be. A trusted header of the request takes "
        "precedence. Live.",
    )
    weight: float | None = Field(
        None,
        ge=0.001,
        le=1_000_000,
        allow_inf_nan=False,
        description="Share of each tenant on this route. Its turns here are then apart from its "
        "turns elsewhere. None: a tenant's turns are shared by all routes without a weight. Live.",
    )
    tenants: dict[_Tenant, _Share] = Field(
        default_factory=dict,
        description="Shares of single tenants by their fairness id, from more than 0 to 1000000, "
        "times `weight`. A tenant that is not listed has 1. Live.",
    )
    max_held_requests: int | None = Field(
        None,
        ge=0,
        le=10_000_000,
        description="Requests held at once; none means no limit of its own. Live.",
    )
    max_held_bytes: int | None = Field(
        None,
        ge=0,
        le=2**40,
        description="Bytes of the bodies of held requests; none means no limit of its own. Live.",
    )
    max_wait_s: float | None = Field(
        None,
        ge=0,
        le=3600,
        description="Seconds for which a request is held; none means no limit of its own. Live.",
    )
    on_unavailable: Literal["wait", "reject"] = Field(
        "wait",
        description="`wait`: requests are held until a pod has room for them and has their "
        "adapter. `reject`: they get 429 at once where they would be held, and 503 where no pod "
        "has their adapter. Live.",
    )

    adapter: AdapterConfig | None = Field(
        None,
        description="Declares the route's only model as an adapter. It is loaded, and loaded again "
        "after a pod has restarted. Live.",
    )

    @model_validator(mode="after")
    def _adapter_can_be_declared(self) -> RouteConfig:
        if self.adapter is not None:
            if len(self.models) > 1:
                raise ValueError(
                    f"{self.name}: a route with an adapter must have one model, its name"
                )
            if self.targets:
                raise ValueError(f"{self.name}: a route has an adapter or targets, not both")
            self.adapter.declaration(self.models[0]).check()
        return self

    @model_validator(mode="after")
    def _models_can_match(self) -> RouteConfig:
        for model in self.models:
            if model != model.strip() or "**" in model:
                raise ValueError(
                    f"models: {model!r}: must have no blanks at its ends and no ** in it"
                )
        return self

    @model_validator(mode="after")
    def _targets_fit(self) -> RouteConfig:
        targets = self.targets
        if not targets:
            return self
        if any("*" in model for model in self.models) and self.models != ("*",):
            raise ValueError("targets: need models listed by name, or * alone")
        if any("*" in target.model for target in targets):
            raise ValueError("targets: a target must be the name of a model, without *")
        weights = [target.weight for target in targets]
        if not any(weights) and weights != [None] * len(weights):
            raise ValueError("targets: one must have a weight above 0")
        return self


class CanariesConfig(Section):
    """When a target of a route is taken back by itself."""

    error_rate: float = Field(
        ERROR_RATE,
        ge=0,
        le=0.5,
        description="A target that does worse than another one of its route gets no requests "
        "([how that is found](canary.md#taken-back-by-itself)). This is the chance that it ever "
        "happens on a route whose targets are alike. 0: no target is taken back. Live.",
    )


def check_routes(routes: Sequence[RouteConfig], declared: Iterable[DeclaredConfig] = ()) -> None:
    """Check the routes together, and with the adapters that are declared without one.

    Raises:
        ValueError: Two have the same name, or one model, or adapters that can be mistaken for each
            other; or there are too many patterns.
    """
    names: set[str] = set()
    owners: dict[str, str] = {}
    adapters = Names()
    for route in routes:
        if route.name in names:
            raise ValueError(f"routes: two are named {route.name}")
        names.add(route.name)
        for model in route.models:
            if model in owners:
                raise ValueError(
                    f"routes: {model} is in {owners[model]} and in {route.name}; allowed: once"
                )
            owners[model] = route.name
        if route.adapter is not None:
            if why := adapters.why_not(route.models[0]):
                raise ValueError(f"routes: {route.name}: {why}")
            adapters.add(route.models[0])
    listed = {route.models[0] for route in routes if route.adapter is not None}
    for each in declared:
        if each.name in listed:
            raise ValueError(f"adapters.declared: {each.name} is declared twice")
        listed.add(each.name)
        if why := adapters.why_not(each.name):
            raise ValueError(f"adapters.declared: {each.name}: {why}")
        adapters.add(each.name)
        if any(route.targets and each.name in route.models for route in routes):
            raise ValueError(f"adapters.declared: {each.name} is an adapter, and a route's targets")
    if sum("*" in model for model in owners) > MAX_PATTERNS:
        raise ValueError(f"routes: must have at most {MAX_PATTERNS} models with * in all")
