"""The limits of a token: which names it may declare, from where, for what, and how urgent.

A token without patterns of names is the operator's, and has the limits that its line names. One
with patterns has all of them, and those that its line does not name are:

- sources: all but those that a name outside of its own is declared with, those below, and those
  above.
- targets: its own names, and base models.
- priority: that of the configured route of the name, else 0; and of an alias at most that of its
  targets' routes, where it is below 0.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from fnmatch import translate
from functools import lru_cache
from itertools import pairwise

from msgspec import Struct

from extproc.adapters.declared import Declaration

HUB = "hf:"
_MAX_KEPT = 20_000
"""Sources whose plain form is kept: twice as many as a store has."""
_MAX_KEPT_PATTERNS = 100
"""Sets of patterns that are kept compiled: three of each token, and those of before a change."""


class TokenFacts(Struct, frozen=True):
    """The facts that decide beside a token's line.

    Attributes:
        is_used_outside: Returns whether a name outside of a scope is declared with a source, or
            with one above or below it.
        is_base: Returns whether pods have a base model of that name, and nobody declares it.
        priority: Returns that of the configured route of a model; None for no route.
    """

    is_used_outside: Callable[[str, TokenScope], bool]
    is_base: Callable[[str], bool]
    priority: Callable[[str], int | None]


class Excess(Struct, frozen=True):
    """Something that a token may not declare: a code, and a sentence without its subject."""

    code: str
    why: str


class TokenScope(Struct, frozen=True):
    """The limits of a token.

    Attributes:
        names: Patterns of the names that it may see and change, in which `*` stands for anything;
            empty for all.
        sources: Patterns of where its adapters may be from; empty for none that are named.
        targets: Patterns of the models that its aliases may stand for, beside its own names and
            base models.
        max_priority: None where nothing is named.
        max_declarations: Likewise.
    """

    names: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    max_priority: int | None = None
    max_declarations: int | None = None

    @property
    def is_limited(self) -> bool:
        """Whether its names are."""
        return bool(self.names)

    def may(self, name: str) -> bool:
        """Return whether it may see and change an adapter.

        One whose name could be a version of another's is that one's, too; and no name leads out of
        a resolver's folder.
        """
        if not self.names:
            return True
        family = name.rpartition("@")[0]
        is_inside = ".." not in name or ".." not in name.split("/")
        return is_inside and _any(self.names, name) and (not family or _any(self.names, family))

    def excess(self, declared: Declaration, known: TokenFacts) -> Excess | None:
        """Return the first thing of a declaration that it may not declare; None where it may."""
        name = declared.name
        if not self.may(name) or (self.is_limited and known.is_base(name)):
            return Excess("name_not_allowed", f"use the name {name}")
        if declared.source and not self._may_load(declared.source, known):
            return Excess("source_not_allowed", f"declare the source {declared.source}")
        for target in declared.terms.targets:
            if not self._may_stand_for(target.model, known):
                return Excess("target_not_allowed", f"declare an alias for {target.model}")
        return self._too_urgent(declared, known)

    def _may_load(self, source: str, known: TokenFacts) -> bool:
        if self.sources:
            return _any(tuple(map(_plain_hub, self.sources)), plain(source))
        return not self.is_limited or not known.is_used_outside(source, self)

    def _may_stand_for(self, target: str, known: TokenFacts) -> bool:
        if not self.is_limited and not self.targets:
            return True
        is_own = self.is_limited and self.may(target)
        return is_own or _any(self.targets, target) or known.is_base(target)

    def _too_urgent(self, declared: Declaration, known: TokenFacts) -> Excess | None:
        if not self.is_limited and self.max_priority is None:
            return None
        own = known.priority(declared.name) or 0
        most = self.max_priority
        if most is None:
            of_targets = [known.priority(each.model) or 0 for each in declared.terms.targets]
            most = min([own, *[each for each in of_targets if each < 0]])
        wanted = own if declared.terms.priority is None else declared.terms.priority
        if wanted <= most:
            return None
        return Excess("priority_not_allowed", f"declare a priority above {most}")


NO_LIMITS = TokenScope()


class Users:
    """Which names are declared with which sources, for all that compare them by their plain form.

    Args:
        sources: By name.
    """

    def __init__(self, sources: Mapping[str, str]) -> None:
        self._sources = {name: plain(source) for name, source in sources.items() if source}
        self._outside: dict[tuple[str, ...], tuple[set[str], list[str]]] = {}

    def is_used_outside(self, source: str, scope: TokenScope) -> bool:
        """Return whether a name outside of a scope is declared with a source, or with one above or
        below it. The first question about a scope takes some 10 ms of 10,000 names.
        """
        found = self._outside.get(scope.names)
        if found is None:
            sources = {each for name, each in self._sources.items() if not scope.may(name)}
            sources |= {each for source in sources for each in _as_hub(source)}
            found = self._outside[scope.names] = sources, sorted(sources)
        sources, in_order = found
        own = plain(source)
        if own.startswith(HUB):
            return own in sources
        above = own
        while above:
            if above in sources:
                return True
            above = above.rpartition("/")[0]
        below = f"{own}/"
        at = bisect_left(in_order, below)
        return at < len(in_order) and in_order[at].startswith(below)


def _as_hub(source: str) -> Iterator[str]:
    """Yield the ids of Hugging Face under which engines could find a path: they look for a
    directory of that name first, in the one that they were started in.
    """
    if not source.startswith(HUB):
        parts = source.lower().split("/")[1:]
        yield from (f"{HUB}{org}/{repo}" for org, repo in pairwise(parts))


@lru_cache(_MAX_KEPT)
def plain(source: str) -> str:
    """Return the form that all spellings of one source have: Hugging Face's names are the same in
    any case, and a path's empty parts and dots say nothing.
    """
    if source.startswith(HUB):
        return source.lower()
    return "/" + "/".join(part for part in source.split("/") if part not in ("", "."))


def _plain_hub(pattern: str) -> str:
    return pattern.lower() if pattern.startswith(HUB) else pattern


def _any(patterns: tuple[str, ...], text: str) -> bool:
    return bool(patterns) and _matcher(patterns)(text) is not None


@lru_cache(_MAX_KEPT_PATTERNS)
def _matcher(patterns: tuple[str, ...]) -> Callable[[str], re.Match[str] | None]:
    """Return what matches any of some patterns, in which nothing but `*` is special."""
    escaped = (each.replace("[", "[[]").replace("?", "[?]") for each in patterns)
    return re.compile("|".join(translate(each) for each in escaped)).match
