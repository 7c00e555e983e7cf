"""The section `adapters`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from extproc.adapters.declared import (
    MAX_RANK,
    MAX_REPLICAS,
    MAX_SOURCE_BYTES,
    Declaration,
    LoadMode,
)
from extproc.config.base import Choice, Section

# --- An adapter that is declared in the configuration: with a route, or in `adapters.declared`.


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


MAX_PATTERNS = 100
MAX_DECLARED = 10_000


class RootConfig(Section):
    """A directory that pods and the router both see, each under its own path."""

    pod: Path = Field(description="As pods see it. Live.")
    router: Path = Field(description="As the router sees it. Live.")

    @field_validator("pod", "router")
    @classmethod
    def _is_absolute(cls, value: Path) -> Path:
        if not value.is_absolute() or ".." in value.parts:
            raise ValueError(f"{value}: must be an absolute path without ..")
        return value


class DirectoryStoreConfig(Section):
    """Files of one directory, also a mount or a ConfigMap. Of several writers the last one wins."""

    path: Path = Field(description="The directory; it must be there, and may be read-only.")
    interval_s: float = Field(
        1.0, ge=0.1, le=3600, description="Seconds between two listings of it."
    )


class SqliteStoreConfig(Section):
    """An SQLite database, for routers on one host."""

    file: Path = Field(description="The database, on a local disk; made if it is not there.")
    interval_s: float = Field(
        1.0, ge=0.1, le=3600, description="Seconds between two looks at whether it has changed."
    )


class RedisStoreConfig(Section):
    """A Redis or Valkey server (`pip install '.[redis]'`), for several hosts."""

    url: str = Field(
        pattern=r"^(redis|rediss|unix)://\S+$",  # a count in the pattern would compile for a second
        max_length=1000,
        description="`redis://host:6379/0`, `rediss://` for TLS, or `unix:///path`; with "
        "`user@` where the server has users.",
    )
    password_file: Path | None = Field(
        None, description="File with the password; none means there is no password."
    )
    ca_file: Path | None = Field(
        None,
        description="PEM file with the CAs that the server's certificate must be signed by; none "
        "means the system's.",
    )
    key: str = Field(
        "extproc:adapters",
        pattern=r"^[A-Za-z0-9_:.{}-]+$",
        max_length=100,
        description="First part of the names of all keys: routers with the same have one store.",
    )
    interval_s: float = Field(
        1.0,
        ge=0.1,
        le=3600,
        description="Seconds between two looks at whether a message was missed.",
    )

    @model_validator(mode="after")
    def _ca_needs_tls(self) -> RedisStoreConfig:
        if self.ca_file is not None and not self.url.startswith("rediss:"):
            raise ValueError("ca_file needs a url with rediss://")
        return self


class StoreConfig(Choice):
    """Where declarations of adapters are kept: exactly one of these."""

    ONE_OF = ("directory", "sqlite", "redis")

    directory: DirectoryStoreConfig | None = Field(None, description=DirectoryStoreConfig.__doc__)
    sqlite: SqliteStoreConfig | None = Field(None, description=SqliteStoreConfig.__doc__)
    redis: RedisStoreConfig | None = Field(None, description=RedisStoreConfig.__doc__)


class RegistrationConfig(Section):
    """Declaring adapters over HTTP on `admin.address`; needs `store`."""

    token_file: Path = Field(
        description="File with bearer tokens, one a line, each perhaps with `name=NAME` for logs "
        "and `allow=PATTERN,PATTERN`, the adapters it may change; it is read again when it changes."
    )
    max_per_s: float = Field(
        10.0,
        ge=0.1,
        le=1000,
        description="Requests per second with one token, and how many at once; others get 429.",
    )
    ready_s: float = Field(
        60.0,
        ge=0.1,
        le=600,
        description="Seconds for which `/v1/load_lora_adapter` waits until enough pods list the "
        "adapter; then it answers 504.",
    )


class AdaptersConfig(Section):
    """Adapters: what pods do not report of them, and how those that are declared are loaded."""

    declared: tuple[DeclaredConfig, ...] = Field(
        (),
        max_length=MAX_DECLARED,
        description=f"{DeclaredConfig.__doc__} A route with its name, or a pattern that "
        "matches it, says what its requests may claim. Live.",
    )
    ranks: dict[str, Annotated[int, Field(ge=1, le=512)]] = Field(
        default_factory=dict,
        description="Rank of each adapter by its name, `r` in its `adapter_config.json`. A name "
        "with `*` (anything) stands for all that match and are not listed by name, the first such "
        f"name first; at most {MAX_PATTERNS} of them. An adapter without a rank here goes to every "
        "pod that lists it. Live.",
    )
    store: StoreConfig | None = Field(None, description=StoreConfig.__doc__)
    lease_s: float = Field(
        15.0,
        ge=1,
        le=600,
        description="Seconds after which another router loads adapters, where the one that does "
        "is gone without a word. In a directory nobody has a lease.",
    )
    registration: RegistrationConfig | None = Field(None, description=RegistrationConfig.__doc__)

    undeclared: Literal["auto", "admit", "refuse"] = Field(
        "auto",
        description="Adapters that pods list and nobody declares: whether requests for them are "
        "routed. `auto`: until an LLMRoute names tenants. None is before all that is declared has "
        "been read. They are never unloaded. Live.",
    )
    ready_wait_s: float | None = Field(
        None,
        ge=0,
        le=86_400,
        allow_inf_nan=False,
        description="Seconds for which a router that starts is not ready where a store or "
        "LLMRoutes cannot be read; none means until they have been. Ready or not, it refuses what "
        "only they could permit, and serves the rest.",
    )
    show_sources: bool = Field(
        False,
        description="Whether `GET /v1/models` says where pods have an adapter from, as vLLM does: "
        "its `root`. Without, that is the adapter's name. Live.",
    )
    roots: tuple[RootConfig, ...] = Field(
        (),
        max_length=100,
        description=f"{RootConfig.__doc__} Adapters in them are checked before they are loaded, "
        "and loaded again after a failure once their files have changed. Live.",
    )
    verify: Literal["listed", "effect"] = Field(
        "listed",
        description="What shows that an adapter is loaded: that the pod lists it, or also that it "
        "[changes](adapters.md#effect) what the base model answers to three short prompts. Live.",
    )
    no_effect: Literal["refuse", "serve"] = Field(
        "refuse",
        description="With `verify: effect`, adapters that change nothing: they are unloaded and "
        "requests for them are refused, or they are served, and their status says so. Live.",
    )
    allow_unsafe_versions: bool = Field(
        False,
        description="Load adapters also into pods that have requests and whose engine's version is "
        "[known](model-server.md#versions-of-vllm) to answer those with another adapter's weights "
        "then. Live.",
    )
    cold_wait_s: float = Field(
        20.0,
        ge=0,
        le=3600,
        allow_inf_nan=False,
        description="Seconds for which a request waits until a pod has its adapter. Live.",
    )
    drain_s: float = Field(
        300.0,
        ge=0,
        le=86_400,
        allow_inf_nan=False,
        description="Seconds that requests for an old version, or for an adapter that is not "
        "declared any more, have to end before it is unloaded. Live.",
    )
    load_timeout_s: float = Field(
        60.0, gt=0, le=3600, allow_inf_nan=False, description="Longest load of an adapter. Live."
    )
    unload_timeout_s: float = Field(
        10.0, gt=0, le=3600, allow_inf_nan=False, description="Longest unload. Live."
    )
    max_loads: int = Field(
        4, ge=1, le=10_000, description="Loads at once on all pods; one on each. Live."
    )
    max_loads_per_minute: int = Field(
        30,
        ge=1,
        le=100_000,
        description="Loads a minute on a pod that has requests, a quarter of them at once: each "
        "stalls its engine. Live.",
    )

    @field_validator("ranks")
    @classmethod
    def _few_patterns(cls, value: dict[str, int]) -> dict[str, int]:
        if sum("*" in name for name in value) > MAX_PATTERNS:
            raise ValueError(f"must have at most {MAX_PATTERNS} names with *")
        return value

    @model_validator(mode="after")
    def _registration_has_a_store(self) -> AdaptersConfig:
        if self.registration is not None and self.store is None:
            raise ValueError("registration needs store: where declarations are kept")
        return self
