"""What is declared of an adapter, whoever declares it: the configuration, a store, or a cluster."""

from __future__ import annotations

import re
from enum import StrEnum

from msgspec import Struct

from extproc.core.openai import MAX_MODEL_BYTES, is_model_name

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


class Declaration(Struct, frozen=True):
    """One adapter that is to be served.

    Attributes:
        name: What clients write in `model`.
        source: A directory as pods see it, or `hf:org/repo`; "" where pods find it by
            themselves (a resolver), or have it already.
        version: Pods have it under `NAME@VERSION`; "" for none: under its name.
        base: Name of its base model; "" for whatever the pods serve.
        rank: Its `r`; None where unknown.
        min_replicas: Pods that should hold it, where so many can.
        max_replicas: Pods that may; None for all.
        pools: Names of the pools whose pods may; empty for all.
        origin: Who declared it, for people: `config`, `store`, `llmroute NAMESPACE/NAME`.
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

    @property
    def served_name(self) -> str:
        """The name under which pods have it."""
        return f"{self.name}@{self.version}" if self.version else self.name

    def check(self) -> None:
        """Raise DeclarationError if it cannot stand."""
        if not is_model_name(self.name) or "," in self.name or self.name != self.name.strip():
            raise DeclarationError(
                f"name {self.name!r}: must be a model's name without commas (vLLM's metrics join "
                "names by them) and without blanks at its ends"
            )
        if self.version and not _VERSION.fullmatch(self.version):
            raise DeclarationError(
                f"version {self.version!r}: must be letters, digits and ._-, at most 63"
            )
        if len(self.served_name.encode()) > MAX_MODEL_BYTES:
            raise DeclarationError(f"{self.served_name}: longer than {MAX_MODEL_BYTES} bytes")
        check_source(self.source)
        if self.rank is not None and not 1 <= self.rank <= 512:
            raise DeclarationError(f"rank {self.rank}: must be from 1 to 512")
        if self.min_replicas < 0:
            raise DeclarationError(f"min {self.min_replicas}: must not be negative")
        if self.max_replicas is not None and self.max_replicas < max(1, self.min_replicas):
            raise DeclarationError(f"max {self.max_replicas}: must be at least 1, and at least min")


def check_source(source: str) -> None:
    """Raise DeclarationError for a source that no pod can load."""
    if not source or source.startswith("/"):
        if ".." in source.split("/") or not source.isprintable():
            raise DeclarationError(f"source {source!r}: must be a plain absolute path")
        return
    if source.startswith("hf:"):
        if not _HUB.fullmatch(source):
            if "@" in source:
                raise DeclarationError(
                    f"source {source!r}: no engine takes a revision; have it downloaded into a "
                    "directory of the pods, by an init container say, and name that "
                    "(docs/adapters.md)"
                )
            raise DeclarationError(f"source {source!r}: must be hf:ORG/REPO")
        return
    if _SCHEME.match(source):
        scheme = source.partition(":")[0]
        raise DeclarationError(
            f"source {source!r}: {scheme} is not fetched here; mount the files into the pods and "
            "name their directory, or run a resolver in the pods (docs/adapters.md)"
        )
    raise DeclarationError(f"source {source!r}: must be an absolute path, or hf:ORG/REPO")


def is_version_of(served_name: str, name: str) -> bool:
    """Return whether pods may have `name` under `served_name`, in whichever version."""
    return served_name == name or served_name.startswith(f"{name}@")
