"""One declared adapter: which of its versions serves, and where it should be."""

from __future__ import annotations

from collections.abc import Container
from math import inf

from extproc.adapters.adapterstates import AdapterState, Failure
from extproc.adapters.declared import Declaration

NOBODY: frozenset[str] = frozenset()
"""One object for all: of thousands of declared adapters, most are on no pod, and an empty set has
216 bytes."""
MAX_REMOVED = 4
"""Versions of an adapter that are remembered although no pod has them any more."""


class Kept:
    """A declared adapter, and its known state.

    Attributes:
        served: The declared version's name with pods; `path` is where they find it.
        earlier: Paths that were declared for the same served name. Adapters from there go on
            serving. A new source needs a new version: pods that load another adapter under a known
            name mix it up with their memory of the old one (vllm-project/vllm issue 42125).
        ready: Pods that requests can be sent to, by served name, for all versions that any has.
        serving: The version that requests get; None before any has.
        before: The one that served before that.
        removed: Versions that no pod has any more, the latest last.
        holders: Pods that have the declared version, of those that requests can be sent to.
        earlier_holders: Pods that have it from an earlier path, likewise.
        strays: Pods that have the declared version, and are in other pools than may.
        targets: Pods that should have it; `num_desired` counts those that are missing, too.
        spares: Pods that may have it instead, where requests wait.
        missing: Those of them on which it is to be loaded.
        unproven: Pods that have it, and have not shown that it has an effect there, where that is
            needed; else that have not been asked.
        to_check: Those of them that are to be asked now.
        is_eager: It is to be loaded without a request.
        trouble: Why a pod that should have it has not: the reason, the pod, and a sentence.
        retry_s: When it is tried next, where it failed wherever it was tried; -inf elsewhere.
        state: As it was judged last.
    """

    __slots__ = (
        *("before", "declaration", "earlier", "earlier_holders", "holders", "is_eager"),
        *("missing", "num_desired"),
        *("path", "ready", "removed", "retry_s", "served", "serving", "spares", "state"),
        *("strays", "targets", "to_check", "trouble", "unproven"),
    )

    def __init__(self, declaration: Declaration) -> None:
        self.earlier = NOBODY
        self.serving: str | None = None
        self.before: str | None = None
        self.removed: tuple[str, ...] = ()
        self.holders = NOBODY
        self.earlier_holders = NOBODY
        self.strays = NOBODY
        self.targets: tuple[str, ...] = ()
        self.spares: tuple[str, ...] = ()
        self.num_desired = 0
        self.missing: tuple[str, ...] = ()
        self.unproven = NOBODY
        self.to_check: tuple[str, ...] = ()
        self.is_eager = False
        self.ready: dict[str, int] = {}
        self.trouble: tuple[Failure, str, str] | None = None
        self.retry_s = -inf
        self.state = AdapterState.COLD
        self.declaration, self.served = declaration, declaration.served_name
        self.path = path_of(declaration.source)

    def edit(self, declaration: Declaration) -> None:
        """Take another declaration of the same name."""
        served, path = declaration.served_name, path_of(declaration.source)
        if served != self.served:
            self.earlier = NOBODY
        elif path != self.path:
            self.earlier = (self.earlier | {self.path}) - {path}
        self.declaration, self.served, self.path = declaration, served, path
        self.removed = tuple(name for name in self.removed if name != served)

    def has(self, root: str) -> bool:
        """Return whether what a pod lists under the served name is what is declared."""
        return not self.path or is_same(root, self.path)

    def had(self, root: str) -> bool:
        """Return whether it is what was declared once."""
        return any(is_same(root, path) for path in self.earlier)

    def serve(self, num_needed: int) -> None:
        """Let that version serve which should.

        Args:
            num_needed: Pods that must have a version which has not served yet.
        """
        ready = self.ready
        is_known = self.served in (self.serving, self.before)
        num_ready = ready.get(self.served, 0)
        if num_ready >= (1 if is_known else max(1, num_needed)):
            chosen = self.served
        elif self.serving in ready:
            return
        else:
            chosen = max(ready, key=lambda name: (ready[name], name), default="")
        if chosen and chosen != self.serving:
            self.before, self.serving = self.serving, chosen

    @property
    def num_surplus(self) -> int:
        """Pods that have it beyond those that may."""
        most = self.declaration.max_replicas
        return 0 if most is None else max(0, len(self.holders) - most)

    @property
    def is_ready(self) -> bool:
        """Requests can be served."""
        return self.serving in self.ready

    def forget(self, served: str) -> None:
        """No pod has a version any more."""
        others = [name for name in self.removed if name != served]
        self.removed = (*others, served)[-MAX_REMOVED:]


def owner_of(served: str, names: Container[str]) -> str | None:
    """Return which of some adapters a served name is a version of."""
    if served in names:
        return served
    name, _, version = served.rpartition("@")
    return name if version and name in names else None


def path_of(source: str) -> str:
    """Return the path that pods load; "" where they find it by themselves."""
    return source.removeprefix("hf:")


def is_same(root: str, path: str) -> bool:
    """Return whether two spellings mean the same path."""
    return root == path or _plain(root) == _plain(path)


def _plain(path: str) -> str:
    parts = [part for part in path.split("/") if part not in ("", ".")]
    return "/" * path.startswith("/") + "/".join(parts)
