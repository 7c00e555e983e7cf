"""The ranks of adapters, as the operator states them.

No engine reports them, and the adapters' files are where only the engines read them. vLLM lists an
adapter once it has loaded it, which proves that it fits; a server that lists adapters without
loading them, as llm-d's simulator does, proves nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import lru_cache

from msgspec import Struct

from extproc.routing.patterns import as_fnmatch

_Patterns = tuple[tuple[str, int], ...]

MAX_REMEMBERED = 4096
"""Adapters whose rank by pattern is kept: a hundred patterns take 0.1 ms, more than a decision."""


class Ranks(Struct, frozen=True):
    """Ranks by adapter.

    Attributes:
        by_name: Of single adapters.
        by_pattern: (pattern, rank), for all others; the first that matches counts. `*` stands for
            anything, all else for itself.
    """

    by_name: Mapping[str, int] = {}
    by_pattern: _Patterns = ()

    @classmethod
    def of_rules(cls, rules: Mapping[str, int]) -> Ranks:
        """Return the ranks by name or, with a `*`, by pattern; patterns in their order."""
        by_pattern = tuple((name, rank) for name, rank in rules.items() if "*" in name)
        return cls({name: rank for name, rank in rules.items() if "*" not in name}, by_pattern)

    def of(self, adapter: str) -> int | None:
        """Return the rank of an adapter; None for unknown."""
        rank = self.by_name.get(adapter)
        if rank is not None or not self.by_pattern:
            return rank
        return _first_match(self.by_pattern, adapter)


@lru_cache(MAX_REMEMBERED)
def _first_match(by_pattern: _Patterns, adapter: str) -> int | None:
    return next((rank for each, rank in by_pattern if fnmatchcase(adapter, as_fnmatch(each))), None)
