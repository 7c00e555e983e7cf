"""The declaration of an adapter, from any source: the configuration, a store, or a cluster."""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import StrEnum

from msgspec import UNSET, Struct, UnsetType

from extproc.openai import MAX_MODEL_BYTES, is_model_name
from extproc.phrases import shortened

MAX_SOURCE_BYTES = 1024
"""Of a source in UTF-8. With names of `MAX_MODEL_BYTES` a declaration has 2 KB at the most."""
MAX_RANK = 512
MAX_REPLICAS = 1024
"""More pods than one router serves."""
MAX_PRIORITY = 2**31 - 1
MAX_TENANTS = 256
"""Of one adapter, as an LLMRoute has them."""
MAX_TENANT_CHARS = 253
MAX_TARGETS = 100
"""Of one alias, as a route of the configuration has them."""
MAX_WEIGHT = 1_000_000.0
ITEMS_A_PLACE = 8
"""Tenants and targets that a declaration may have for each place in a store that it takes beside
its first: eight targets take 2 KB in a router, as much as the longest declaration without."""
_MAX_SHOWN_CHARS = 80
"""Of a wrong value, in the message about it."""

_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_HUB = re.compile(r"hf:[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")


class DeclarationError(ValueError):
    """A declaration cannot stand; the message says why, for whoever made it."""


class LoadMode(StrEnum):
    """When an adapter is loaded."""

    AUTO = "auto"  # eagerly as long as all that are declared fit, else lazily
    EAGER = "eager"  # as soon as it is declared
    LAZY = "lazy"  # once a request asks for it


class AliasTarget(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A model that an alias stands for, and its share of the alias' requests.

    If no target of an alias has a weight, all are equal; if some do, a target without gets nothing.
    """

    model: str
    weight: float | None = None


class Terms(Struct, frozen=True):
    """How the requests for a declared name are served, apart from where its adapter is.

    Attributes:
        tenants: Tenants that may use it, by their fairness id; empty for all.
        priority: The higher the sooner; None leaves it to routes and objectives.
        targets: Models that pods read instead: the name is an alias, and no adapter.
    """

    tenants: frozenset[str] = frozenset()
    priority: int | None = None
    targets: tuple[AliasTarget, ...] = ()

    def check(self, name: str) -> None:
        """Raise DeclarationError if they cannot stand for that name."""
        _check_number("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY)
        _check_number("number of tenants", len(self.tenants), 0, MAX_TENANTS)
        for tenant in self.tenants:
            if not 1 <= len(tenant) <= MAX_TENANT_CHARS:
                raise _error("tenants", tenant, f"must have 1 to {MAX_TENANT_CHARS} characters")
        _check_number("number of targets", len(self.targets), 0, MAX_TARGETS)
        for target in self.targets:
            check_model("targets", target.model)
            weight = target.weight
            if weight is not None and not 0 <= weight <= MAX_WEIGHT:
                raise _error("weight", f"{weight:g}", f"must be from 0 to {MAX_WEIGHT:g}")
        weights = [target.weight for target in self.targets]
        if not any(weights) and weights != [None] * len(weights):
            raise _error("targets", name, "one must have a weight above 0")


NO_TERMS = Terms()


class Declaration(Struct, frozen=True):
    """One adapter that is to be served, or an alias for other models.

    Attributes:
        name: The name that clients write in `model`.
        source: A directory as pods see it, or `hf:org/repo`; "" where pods find it by
            themselves (a resolver), or have it already.
        version: Pods have it under `NAME@VERSION`; "" for none: under its name.
        base: Name of its base model; "" for whatever the pods serve.
        rank: Its `r`; None where unknown.
        min_replicas: Pods that should hold it, where so many can.
        max_replicas: Pods that may; None for all.
        pools: Names of the pools whose pods may; empty for all.
        origin: The source of the declaration, for people: `config`, `store`, `llmroute
            NAMESPACE/NAME`.
        terms: How its requests are served, where the same declaration says so.
    """

    name: str
    source: str = ""
    version: str = ""
    base: str = ""
    rank: int | None = None
    min_replicas: int = 1
    max_replicas: int | None = None
    load: LoadMode = LoadMode.AUTO
    pools: frozenset[str] = frozenset()
    origin: str = "config"
    terms: Terms = NO_TERMS

    @property
    def is_alias(self) -> bool:
        """Whether it is a name for other models, of which nothing is to be loaded."""
        return bool(self.terms.targets)

    @property
    def num_places(self) -> int:
        """How many places of a store it takes: one, and more for many tenants and targets."""
        return 1 + (len(self.terms.tenants) + len(self.terms.targets)) // ITEMS_A_PLACE

    @property
    def served_name(self) -> str:
        """The name under which pods have it."""
        return f"{self.name}@{self.version}" if self.version else self.name

    def check(self) -> None:
        """Raise DeclarationError if it cannot stand. The same rules hold for all sources."""
        check_model("name", self.name)
        if self.version and not _VERSION.fullmatch(self.version):
            raise _error("version", self.version, "must be letters, digits and ._-, at most 63")
        if len(self.served_name.encode()) > MAX_MODEL_BYTES:
            raise _error(
                "version", self.version, f"NAME@VERSION must have at most {MAX_MODEL_BYTES} bytes"
            )
        _check_source(self.source)
        if self.base:
            check_model("base", self.base)
        if self.base == self.name:
            raise _error("base", self.base, "must be another model than the adapter itself")
        _check_number("rank", self.rank, 1, MAX_RANK)
        _check_number("replicas.min", self.min_replicas, 0, MAX_REPLICAS)
        _check_number("replicas.max", self.max_replicas, 1, MAX_REPLICAS)
        if self.max_replicas is not None and self.max_replicas < self.min_replicas:
            raise _error("replicas.max", self.max_replicas, "must be at least min")
        self.terms.check(self.name)
        if self.is_alias and self != Declaration(
            self.name,
            origin=self.origin,
            terms=Terms(frozenset(), self.terms.priority, self.terms.targets),
        ):
            raise _error(
                "targets", self.name, "go with `name` and `priority` alone; an adapter has the rest"
            )


class Replicas(Struct):
    """On how many pods an adapter is, as people write it."""

    min: int = 1
    max: int | None = None


class Written(Struct, omit_defaults=True):
    """A declaration as people write it, in a store or in a cluster."""

    name: str
    source: str = ""
    version: str = ""
    base: str = ""
    rank: int | None = None
    replicas: Replicas | UnsetType | None = UNSET
    load: LoadMode = LoadMode.AUTO

    def declaration(
        self, *, origin: str, pools: frozenset[str] = frozenset(), terms: Terms = NO_TERMS
    ) -> Declaration:
        """Return what is declared.

        Raises:
            DeclarationError: It cannot stand.
        """
        replicas = self.replicas or Replicas()
        declaration = Declaration(
            name=self.name,
            source=self.source,
            version=self.version,
            base=self.base,
            rank=self.rank,
            min_replicas=replicas.min,
            max_replicas=replicas.max,
            load=self.load,
            pools=pools,
            origin=origin,
            terms=terms,
        )
        declaration.check()
        return declaration


def check_model(field: str, name: str) -> None:
    """Raise DeclarationError for what cannot be a model's name in a declaration.

    `*` stands for anything in the names of routes.
    """
    if not is_model_name(name) or name != name.strip() or "," in name or "*" in name:
        raise _error(
            field,
            name,
            f"must be a model's name of at most {MAX_MODEL_BYTES} bytes, without control "
            "characters, without commas (vLLM's metrics join names by them), without * and "
            "without blanks at its ends",
        )


def check_fallback(fallback: str, name: str) -> None:
    """Raise DeclarationError for what cannot serve an adapter's requests."""
    check_model("fallback", fallback)
    if fallback == name:
        raise _error("fallback", fallback, "must be another model than the adapter itself")


def _check_source(source: str) -> None:
    """Raise DeclarationError for a source that no pod can load."""
    if not source:
        return
    if not source.isprintable() or len(source.encode()) > MAX_SOURCE_BYTES:
        raise _error(
            "source",
            source,
            f"must have at most {MAX_SOURCE_BYTES} bytes, all of them of printable characters",
        )
    if source.startswith("/"):
        parts = source.split("/")
        if ".." in parts or not any(part not in ("", ".") for part in parts):
            raise _error(
                "source", source, "must be the absolute path of a directory below /, without .."
            )
    elif source.startswith("hf:"):
        if "@" in source:
            raise _error(
                "source",
                source,
                "no engine takes a revision; have it downloaded into a directory of the pods, by "
                "an init container say, and name that (docs/declare-adapters.md)",
            )
        if ".." in source or not _HUB.fullmatch(source):
            raise _error("source", source, "must be hf:ORG/REPO")
    elif _SCHEME.match(source):
        raise _error(
            "source",
            source,
            "is not fetched here; mount the files into the pods and name their directory, or run a "
            "resolver in the pods (docs/declare-adapters.md)",
        )
    else:
        raise _error("source", source, "must be an absolute path, or hf:ORG/REPO")


def _check_number(field: str, value: int | None, least: int, most: int) -> None:
    if value is not None and not least <= value <= most:
        raise _error(field, value, f"must be from {least} to {most}")


def _error(field: str, value: str | int, why: str) -> DeclarationError:
    shown = repr(value) if isinstance(value, str) else str(value)
    return DeclarationError(f"{field} {shortened(shown, _MAX_SHOWN_CHARS)}: {why}")


class Names:
    """Declared names, of which no two can be meant by one served name.

    Pods have version 2 of `sql` as `sql@2`: beside `sql`, in whichever version, nobody can declare
    an adapter `sql@2`. Apart from that names that differ in any byte are different adapters, as
    they are for vLLM: `SQL` is not `sql`.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names: set[str] = set()
        self._longer: dict[str, str] = {}
        for name in names:
            self.add(name)

    def add(self, name: str) -> None:
        """Take one more."""
        self._names.add(name)
        if family := _family_of(name):
            self._longer.setdefault(family, name)

    def why_not(self, name: str) -> str:
        """Return why a name cannot be declared beside the present names, for people; "" if it
        can.
        """
        family = _family_of(name)
        if family in self._names:
            return f"pods have versions of {family}, which is declared, under names like {name}"
        if name in self._longer:
            longer = self._longer[name]
            return f"pods would have a version of it as {longer}, which is declared"
        return ""


def _family_of(name: str) -> str:
    """Return the name that this one would be a version of; "" for none."""
    if "@" not in name:  # as most
        return ""
    family, _, version = name.rpartition("@")
    return family if version else ""
