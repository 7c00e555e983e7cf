"""Counts of requests by kind, within a window of time.

A kind is a model and a path. Counts cover the last half to whole `WINDOW_S`, so that what is kept
is bounded: `MAX_KINDS` kinds in the pool, `MAX_OWN_KINDS` of one endpoint, `MAX_SOURCES` requests.
Requests beyond these bounds do not count.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from msgspec import Struct

from extproc.learned.chances import Count, less

WINDOW_S = 30.0
"""Counts cover the last half to whole window; as long as the base ejection."""
MAX_KINDS = 1024
MAX_OWN_KINDS = 256
MAX_SOURCES = 4096


class Like(Struct, frozen=True, gc=False):
    """The properties that make requests alike.

    Attributes:
        kind: The model and the path, by which endpoints are compared.
        source: The same for a request that is repeated, and rarely the same for another request.
    """

    kind: Hashable
    source: int


Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


@dataclass(slots=True)
class Growing(Count):
    """A count of half a window.

    Attributes:
        sizes: Of those served, how many had answers of a size (`_size`).
    """

    sizes: dict[int, int] = field(default_factory=dict)

    def add(self, *, failed: bool) -> None:
        """Count a request."""
        self.num += 1
        self.num_failed += failed


class _Window(Generic[Key, Value]):
    """What is known by key, within the window.

    Attributes:
        half: Of the window, by its number.
        new: What this half has brought, to be added to.
    """

    __slots__ = ("_old", "half", "new")

    def __init__(self) -> None:
        self.half = 0
        self.new: dict[Key, Value] = {}
        self._old: dict[Key, Value] = {}

    def begin_half(self, half: int) -> None:
        """Start a half of the window, by its number, when it is due."""
        if half > self.half:
            self._old = self.new if half == self.half + 1 else {}
            self.half, self.new = half, {}


class Tally(_Window[Hashable, Growing]):
    """Counts by kind: within the window, and since a kind was new."""

    __slots__ = ("_ever", "_limit")

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit
        self._ever: dict[Hashable, Count] = {}  # before this half

    def begin_half(self, half: int) -> None:
        """Start a half of the window, and forget the kinds that it has no requests of."""
        if half > self.half:
            ever = {kind: self.ever(kind) for kind in self.new}
            super().begin_half(half)
            self._ever = {kind: ever[kind] for kind in self._old}

    def has_room(self, kind: Hashable) -> bool:
        """Return whether requests of a kind can be counted."""
        return kind in self.new or len(self.new) < self._limit

    def begin(self, kind: Hashable) -> Growing:
        """Return the count of a kind in this half, begun if need be; `has_room` has said yes."""
        return self.new.setdefault(kind, Growing())

    def of(self, kind: Hashable) -> Count:
        """Return the requests of a kind within the window."""
        return self._with(self._old, kind)

    def sizes_of(self, kind: Hashable) -> Iterator[Mapping[int, int]]:
        """Yield the answers served within the window by size."""
        for counts in (self.new, self._old):
            if kind in counts:
                yield counts[kind].sizes

    def take_back(self, kind: Hashable, own: Tally) -> None:
        """Forget what an endpoint has had of a kind: in its own counts, and in these of all."""
        for all_counts, counts in zip(self._all_counts(), own._all_counts(), strict=True):
            if kind in counts:
                rest = less(all_counts[kind], counts.pop(kind))
                all_counts[kind].num, all_counts[kind].num_failed = rest.num, rest.num_failed

    def _all_counts(self) -> tuple[dict[Hashable, Any], ...]:
        return self.new, self._old, self._ever

    def ever(self, kind: Hashable) -> Count:
        """Return the requests of a kind since it was new; it is forgotten with its last ones."""
        return self._with(self._ever, kind)

    def _with(self, before: Mapping[Hashable, Count], kind: Hashable) -> Count:
        new, old = self.new.get(kind, _NOTHING), before.get(kind, _NOTHING)
        return Count(new.num + old.num, new.num_failed + old.num_failed)

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self.new.keys() | self._old.keys())


_NOTHING = Count(0, 0)


class ServedRequests(_Window[int, str]):
    """Which requests endpoints have served, within the window."""

    __slots__ = ()

    def served(self, source: int, address: str) -> None:
        """Record that an endpoint has served a request."""
        before = self.new.get(source)
        if before is None and len(self.new) < MAX_SOURCES:
            self.new[source] = address
        elif before is not None and before != address:
            self.new[source] = ""  # several have

    def is_served_elsewhere(self, source: int, address: str) -> bool:
        """Return whether another endpoint than this one has served it."""
        return any(half.get(source, address) != address for half in (self.new, self._old))
