"""An adapter that is declared in the configuration: with a route, or in `adapters.declared`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from extproc.adapters.declared import (
    MAX_RANK,
    MAX_REPLICAS,
    MAX_SOURCE_BYTES,
    Declaration,
    LoadMode,
)
from extproc.config.base import Section


class ReplicasConfig(Section):
    """On how many pods an adapter is."""

    min: int = Field(
        1,
        ge=0,
        le=MAX_REPLICAS,
        description="Pods that should have it; where fewer can, it is loaded on those and does not "
        "count as ready. Live.",
    )
    max: int | None = Field(
        None, ge=1, le=MAX_REPLICAS, description="Pods that may have it; none means all. Live."
    )


class AdapterConfig(Section):
    """An adapter that the router has the pods load."""

    # What else its fields may be is said by `Declaration.check`, as for all who declare.

    source: str = Field(
        "",
        description="Directory of its files, as pods see it; or `hf:ORG/REPO`, which pods download "
        f"from Hugging Face; at most {MAX_SOURCE_BYTES} bytes. Empty where pods find it by "
        "themselves. Live.",
    )
    version: str = Field(
        "",
        description="Pods have it under `NAME@VERSION`, and clients go on to write `NAME`; a new "
        "version needs a new source. Letters, digits and `._-`, at most 63. Live.",
    )
    base: str = Field(
        "", description="Its base model, by the name that pods list; empty for whichever. Live."
    )
    rank: int | None = Field(
        None,
        ge=1,
        le=MAX_RANK,
        description="`r` of its `adapter_config.json`, where the router does not see that. Live.",
    )
    replicas: ReplicasConfig = Field(
        default_factory=ReplicasConfig, description=ReplicasConfig.__doc__
    )
    load: Literal["auto", "eager", "lazy"] = Field(
        "auto",
        description="When it is loaded: `eager` at once, `lazy` with the first request, `auto` at "
        "once as long as all that are declared fit into the pods' CPU caches. Live.",
    )

    def declaration(self, name: str) -> Declaration:
        """Return what is declared of an adapter of that name."""
        return Declaration(
            name,
            self.source,
            self.version,
            self.base,
            self.rank,
            self.replicas.min,
            self.replicas.max,
            LoadMode(self.load),
        )


class DeclaredConfig(AdapterConfig):
    """An adapter that the router has the pods load, without a route of its own."""

    name: str = Field(description="What clients write in `model`. Live.")

    @model_validator(mode="after")
    def _can_be_declared(self) -> DeclaredConfig:
        self.declaration(self.name).check()
        return self
