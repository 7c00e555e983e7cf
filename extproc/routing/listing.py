"""The response to `GET /v1/models`, encoded once for each state of the models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_

from extproc.openai import models_body
from extproc.types import ModelCard


class ModelListing:
    """A cache of the body: ten thousand adapters take 3 ms to encode, and any client may ask."""

    __slots__ = ("_body", "_lists", "_names", "_registry")

    def __init__(self) -> None:
        self._registry: Mapping[str, ModelCard] | None = None
        self._lists: Sequence[frozenset[str]] = ()
        self._names: set[str] = set()
        self._body = b""

    def body(self, registry: Mapping[str, ModelCard], lists: Sequence[frozenset[str]]) -> bytes:
        """Return the body that lists every name of `lists`.

        Args:
            registry: Cards by name; a new object after each change.
            lists: The names that endpoints have, of which those in the registry count; new objects
                after each change.
        """
        is_same = registry is self._registry
        # By identity: comparing the names of many endpoints is slower than encoding them.
        if not is_same or len(lists) != len(self._lists) or not all(map(is_, lists, self._lists)):
            names = _union(lists, registry)
            if not is_same or names != self._names:
                self._body = models_body(registry[name] for name in names)
            self._registry, self._lists, self._names = registry, lists, names
        return self._body


def _union(lists: Sequence[frozenset[str]], registry: Mapping[str, ModelCard]) -> set[str]:
    """Return all names that are in the registry; most endpoints have the same ones."""
    names: set[str] = set()
    for each in lists:
        names |= registry.keys() & each
        if len(names) == len(registry):
            break
    return names
