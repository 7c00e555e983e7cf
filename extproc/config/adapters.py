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
from extproc.config.base import OneOf, Section

# --- An adapter that is declared in the configuration: with a route, or in `adapters.declared`.


class ReplicasConfig(Section):
    """How many pods have an adapter."""

    min: int = Field(
        1,
        ge=0,
        le=MAX_REPLICAS,
        description="Pods that should have it. Where fewer pods can have it, it is loaded on those "
        "and does not count as ready. Live.",
    )
    max: int | None = Field(
        None, ge=1, le=MAX_REPLICAS, description="Pods that may have it; none means all. Live."
    )


class AdapterConfig(Section):
    """An adapter that the router has the pods load."""

    # `Declaration.check` has the other rules for its fields, the same for all sources.

    source: str = Field(
        "",
        description="Directory of its files, as pods see it; or `hf:ORG/REPO`, which pods download "
        f"from Hugging Face. At most {MAX_SOURCE_BYTES} bytes. Empty where pods find it by "
        "themselves. Live.",
    )
    version: str = Field(
        "",
        description="Its version. Pods have the adapter under `NAME@VERSION`; clients still write "
        "`NAME`. A new version needs a new source. Letters, digits and `._-`, at most 63. Live.",
    )
    base: str = Field(
        "", description="Its base model, by the name that pods list. Empty: any base model. Live."
    )
    rank: int | None = Field(
        None,
        ge=1,
        le=MAX_RANK,
        description="`r` of its `adapter_config.json`; needed where the router cannot read that "
        "file. Live.",
    )
    replicas: ReplicasConfig = Field(
        default_factory=ReplicasConfig, description=ReplicasConfig.__doc__
    )
    load: Literal["auto", "eager", "lazy"] = Field(
        "auto",
        description="When it is loaded. `eager`: at once. `lazy`: with the first request. `auto`: "
        "at once as long as all declared adapters fit into the pods' CPU caches, else with the "
        "first request. Live.",
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

    name: str = Field(description="Name that clients write in `model`. Live.")

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
    """Files of a directory, a mount or a ConfigMap. Of several writers of a file the last wins."""

    path: Path = Field(description="The directory. It must exist and may be read-only.")
    interval_s: float = Field(
        1.0, ge=0.1, le=3600, description="Seconds between two listings of it."
    )


class SqliteStoreConfig(Section):
    """An SQLite database, for routers on one host."""

    file: Path = Field(
        description="The database, on a local disk. It is created if it does not exist."
    )
    interval_s: float = Field(
        1.0, ge=0.1, le=3600, description="Seconds between two checks for changes."
    )


class RedisStoreConfig(Section):
    """A Redis or Valkey server (`pip install '.[redis]'`), for several hosts."""

    url: str = Field(
        pattern=r"^(redis|rediss|unix)://\S+$",  # a count in the pattern would compile for a second
        max_length=1000,
        description="`redis://host:6379/0`, `rediss://` for TLS, or `unix:///path`. Add `user@` "
        "before the host where the server has users.",
    )
    password_file: Path | None = Field(
        None,
        description="File with the password; none means there is no password. It is read for each "
        "connection.",
    )
    ca_file: Path | None = Field(
        None,
        description="PEM file with the CAs that the server's certificate must be signed by; none "
        "means the system's. It is read again when TLS fails.",
    )
    key: str = Field(
        "extproc:adapters",
        pattern=r"^[A-Za-z0-9_:.{}-]+$",
        max_length=100,
        description="First part of the names of all keys. Routers with the same value share one "
        "store.",
    )
    interval_s: float = Field(
        1.0,
        ge=0.1,
        le=3600,
        description="Seconds between two checks for missed messages.",
    )

    @model_validator(mode="after")
    def _ca_needs_tls(self) -> RedisStoreConfig:
        if self.ca_file is not None and not self.url.startswith("rediss:"):
            raise ValueError("ca_file needs a url with rediss://")
        return self


class StoreConfig(OneOf):
    """Where declarations of adapters are stored: exactly one of these."""

    ONE_OF = ("directory", "sqlite", "redis")

    directory: DirectoryStoreConfig | None = Field(None, description=DirectoryStoreConfig.__doc__)
    sqlite: SqliteStoreConfig | None = Field(None, description=SqliteStoreConfig.__doc__)
    redis: RedisStoreConfig | None = Field(None, description=RedisStoreConfig.__doc__)


class RegistrationConfig(Section):
    """Declaring adapters over HTTP on `admin.address`; needs `store`."""

    token_file: Path = Field(
        description="File with bearer tokens, one a line, each with what it may declare "
        "([the options](declare-adapters.md#tokens)). The file is read again when it changes."
    )
    max_per_s: float = Field(
        10.0,
        ge=0.1,
        le=1000,
        description="Requests per second with one token, and how many at once. Further requests "
        "get 429.",
    )
    ready_s: float = Field(
        60.0,
        ge=0.1,
        le=600,
        description="Seconds for which `/v1/load_lora_adapter` waits until enough pods list the "
        "adapter. Afterwards it responds with 504.",
    )


class AdaptersConfig(Section):
    """Adapters: facts about them that pods do not report, and how declared adapters are loaded."""

    declared: tuple[DeclaredConfig, ...] = Field(
        (),
        max_length=MAX_DECLARED,
        description=f"{DeclaredConfig.__doc__} A route with its name, or with a pattern that "
        "matches it, sets the priority and objectives of its requests. Live.",
    )
    ranks: dict[str, Annotated[int, Field(ge=1, le=512)]] = Field(
        default_factory=dict,
        description="Rank of each adapter by its name, `r` in its `adapter_config.json`. A name "
        "with `*` (anything) is a pattern, for adapters that are not listed by name. The first "
        f"pattern that matches counts; at most {MAX_PATTERNS} patterns. An adapter without a rank "
        "here goes to every pod that lists it. Live.",
    )
    store: StoreConfig | None = Field(None, description=StoreConfig.__doc__)
    lease_s: float = Field(
        15.0,
        ge=1,
        le=600,
        description="Seconds after which another router takes over the loading of adapters when "
        "the router that did it has stopped without notice. A directory has no lease.",
    )
    registration: RegistrationConfig | None = Field(None, description=RegistrationConfig.__doc__)

    undeclared: Literal["auto", "admit", "refuse"] = Field(
        "auto",
        description="Whether requests are routed for adapters that pods list and nobody declares. "
        "`auto`: yes, until a declaration names tenants. No such request is routed until all "
        "declarations have been read. Undeclared adapters are never unloaded. Live.",
    )
    ready_wait_s: float | None = Field(
        None,
        ge=0,
        le=86_400,
        allow_inf_nan=False,
        description="Seconds for which a router that starts stays not ready while a store or "
        "LLMRoutes cannot be read. None means until they have been read. Ready or not, the router "
        "refuses requests that only these sources could permit, and serves all other requests.",
    )
    show_sources: bool = Field(
        False,
        description="Whether `root` in `GET /v1/models` says where pods have an adapter from, as "
        "in vLLM. If false, `root` is the adapter's name. Live.",
    )
    roots: tuple[RootConfig, ...] = Field(
        (),
        max_length=100,
        description=f"{RootConfig.__doc__} Adapters in them are checked before they are loaded, "
        "and loaded again after a failure once their files have changed. Live.",
    )
    verify: Literal["listed", "effect"] = Field(
        "listed",
        description="The proof that an adapter is loaded. `listed`: the pod lists it. `effect`: it "
        "also [changes](adapters.md#effect) the base model's answers to three short prompts. Live.",
    )
    no_effect: Literal["refuse", "serve"] = Field(
        "refuse",
        description="With `verify: effect`, treatment of adapters that change nothing. `refuse`: "
        "no pod serves one before it has passed there; those that fail are unloaded, and requests "
        "for them are refused. `serve`: they are served, and their status reports it. Live.",
    )
    allow_unsafe_versions: bool = Field(
        False,
        description="Load adapters also into pods that have requests and an unsafe version of the "
        "engine. Such a version is [known](model-server.md#versions-of-vllm) to answer running "
        "requests with another adapter's weights when one is loaded. Live.",
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
        description="Seconds that running requests have to end before an old version, or an "
        "adapter that is no longer declared, is unloaded. Live.",
    )
    load_timeout_s: float = Field(
        60.0,
        gt=0,
        le=3600,
        allow_inf_nan=False,
        description="Seconds that loading an adapter may take. Live.",
    )
    unload_timeout_s: float = Field(
        10.0,
        gt=0,
        le=3600,
        allow_inf_nan=False,
        description="Seconds that unloading an adapter may take. Live.",
    )
    max_loads: int = Field(
        4,
        ge=1,
        le=10_000,
        description="Loads in progress at once over all pods; each pod has at most one. Live.",
    )
    max_loads_per_minute: int = Field(
        30,
        ge=1,
        le=100_000,
        description="Loads a minute on a pod that has requests, and a quarter of that in one "
        "burst. Each load stalls the pod's engine. Live.",
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
            raise ValueError("registration needs store, where declarations are kept")
        return self
