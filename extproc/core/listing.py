"""The answer to `GET /v1/models`, encoded once for each state of what it lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_

from extproc.core.openai import models_body
from extproc.core.types import ModelCard


class ModelListing:
    """Ten thousand adapters take 7 ms to encode, and anybody may ask for them."""

    __slots__ = ("_body", "_lists", "_names", "_registry")

    def __init__(self) -> None:
        self._registry: Mapping[str, ModelCard] | None = None
        self._lists: Sequence[frozenset[str]] = ()
        self._names: set[str] = set()
        self._body = b""

    def body(self, registry: Mapping[str, ModelCard], lists: Sequence[frozenset[str]]) -> bytes:
        """The body that lists every name of `lists`.

        Args:
            registry: Cards by name; another object where it is not what it was.
            lists: The names that endpoints have, all of them in the registry; the same objects
                where they are what they were.
        """
        is_same = registry is self._registry
        if not is_same or not _are_the_same(lists, self._lists):
            names = _union(lists, len(registry))
            if not is_same or names != self._names:
                self._body = models_body(registry[name] for name in names)
            self._registry, self._lists, self._names = registry, lists, names
        return self._body


def _are_the_same(one: Sequence[object], other: Sequence[object]) -> bool:
    """By identity: to compare the names of many endpoints takes longer than to encode them."""
    return len(one) == len(other) and all(map(is_, one, other))


def _union(lists: Sequence[frozenset[str]], most: int) -> set[str]:
    """All names; there are `most` at most, and most endpoints have the same ones."""
    names: set[str] = set()
    for each in lists:
        names |= each
        if len(names) == most:
            break
    return names
