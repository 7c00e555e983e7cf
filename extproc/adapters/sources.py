"""Where adapters are declared, and what is known of that."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from msgspec import Struct

from extproc.meters import Meters

READINESS_LIMIT_S = 5.0
"""The longest time for which names that cannot be read delay readiness, where they are no terms."""


class SourceStatus(Struct, frozen=True):
    """How one source of declarations is: a store, or a kind of objects in a cluster.

    Attributes:
        name: Its name for people.
        has_terms: It may say who may use an adapter, or that one is gone. Others only name models.
        is_read: It has been read as a whole once, or there is none.
        is_complete: Besides, all that was in it then could be used.
        age_s: Seconds since it last answered: how old what is known of it may be.
        problem: Why it cannot be read now; "" if it can.
        full: Why the last declaration had no room there; "" for one that had.
    """

    name: str
    has_terms: bool
    is_read: bool
    is_complete: bool
    age_s: float
    problem: str = ""
    full: str = ""

    @property
    def said(self) -> str:
        """The problem, for people; "" for none."""
        if self.is_read and not self.problem:
            return f"{self.name}: full, declarations get a 507: {self.full}" if self.full else ""
        if not self.is_read:
            return f"{self.name}: not read yet" + (f": {self.problem}" if self.problem else "")
        return f"{self.name}: as of {self.age_s:.0f} s ago: {self.problem}"


class DeclarationSources:
    """All sources of declarations but the configuration.

    Attributes:
        had_terms: All had been read, when it was asked for last, that may say who may use an
            adapter.
    """

    def __init__(self) -> None:
        self._say: list[Callable[[], Iterable[SourceStatus]]] = []
        self._are_known = self.had_terms = False

    def add(self, say: Callable[[], Iterable[SourceStatus]]) -> None:
        """Add sources that say how they are; before anybody asks."""
        self._say.append(say)

    def statuses(self) -> list[SourceStatus]:
        """Return how each source is."""
        return [status for say in self._say for status in say()]

    def why_not_ready(self, waited_s: float, terms_wait_s: float) -> list[str]:
        """Return which sources have to be read before this router is ready, for people.

        Once all of one has been read it stays known, whatever happens to where it was read.

        Args:
            waited_s: Since the start.
            terms_wait_s: The longest wait for those that may say who may use an adapter.
        """
        return [
            each.said
            for each in self.statuses()
            if not each.is_read
            and waited_s < (terms_wait_s if each.has_terms else READINESS_LIMIT_S)
        ]

    def warnings(self) -> list[str]:
        """Return what is wrong with them, for people."""
        return [each.said for each in self.statuses() if each.said]

    def add_metrics(self, meters: Meters) -> None:
        """Register what is known of them."""
        meters.add_gauges(
            "declarations_known",
            "1 once everything that a source declares has been read. Sources are "
            "adapters.store, LLMRoutes and InferenceModelRewrites.",
            "source",
            lambda: {each.name: float(each.is_complete) for each in self.statuses()},
        )
        meters.add_gauges(
            "declarations_age_seconds",
            "Time since a source of declarations last answered. A store answers each "
            "interval_s, a watch at least each watch_s.",
            "source",
            lambda: {each.name: each.age_s for each in self.statuses()},
        )

    @property
    def are_known(self) -> bool:
        """Whether all declarations have been read, in all sources.

        A source that has been read as a whole once stays known, whatever happens to it.
        """
        self._are_known = self._are_known or all(each.is_complete for each in self.statuses())
        return self._are_known

    def terms_are_known(self) -> bool:
        """Return whether all has been read that may say who may use an adapter; it stays known."""
        self.had_terms = self.had_terms or all(
            each.is_complete for each in self.statuses() if each.has_terms
        )
        return self.had_terms
