"""One endpoint's row of the pool's columns, and whether it is true."""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from extproc.pods.columns import Columns
from extproc.types import EndpointView


class Trouble(NamedTuple):
    """The trouble of one endpoint; see `EndpointView`.

    Attributes:
        num_failed: Failures that count as requests there: for a choice, and no request is rejected
            for them.
    """

    num_failed: int = 0
    is_ejected: bool = False
    is_gone: bool = False
    is_suspect: bool = False


class PodRow:
    """A row, and the knowledge that it was made of.

    Args:
        stale: It adds itself to these once it is no longer true.

    Attributes:
        number: Its place among the rows.
        columns: In which it is kept true; None where it is stale, or its endpoint in some trouble.
        num_reads: Of the columns before it was made.
        expires_s: After that, it is not true. By `due_s` somebody looks.
        facts: Knowledge of the endpoint that no request changes, until `facts_until_s`; None where
            it is no longer true.
        is_known: As a view has it; `trouble` likewise.
    """

    def __init__(self, stale: dict[PodRow, None]) -> None:
        self._stale = stale
        self.number = self.num_reads = 0
        self.columns: Columns | None = None
        self.facts: EndpointView | None = None
        self.facts_until_s = inf
        self.expires_s, self.due_s = 0.0, inf
        self.is_known, self.trouble = False, Trouble()

    def touch(self) -> None:
        """Take it for untrue in what changes with requests."""
        self.columns = None
        self._stale[self] = None

    def renew(self) -> None:
        """Take all of it for untrue."""
        self.facts = None
        self.touch()
