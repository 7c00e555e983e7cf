"""The calls of observers, which must not fail a request.

Telemetry, published decisions, attainment, spans, the relay to peers, the messages to them and the
judges of canaries and trials are observers: no response depends on them. An exception of theirs is
counted and logged, and goes no further.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Literal, TypeVar, TypeVarTuple, get_args

from extproc.errors import FOREIGN_ERRORS

log = logging.getLogger(__name__)

_Args = TypeVarTuple("_Args")
_T = TypeVar("_T")

Name = Literal[
    "telemetry", "decisions", "attainment", "tracing", "relay", "telling", "canaries", "arms"
]
NAMES: tuple[Name, ...] = get_args(Name)
"""The observers, as values of a metric's label."""


class Observers:
    """Calls observers.

    Attributes:
        num_errors: Calls that raised, by observer.
    """

    def __init__(self) -> None:
        self.num_errors = dict.fromkeys(NAMES, 0)

    def call(self, name: Name, observe: Callable[[*_Args], _T], *args: *_Args) -> _T | None:
        """Call the observer `name`, and return its result; None if it raised."""
        try:
            return observe(*args)
        except FOREIGN_ERRORS:
            self.failed(name)
            return None

    def failed(self, name: Name) -> None:
        """Count an exception of an observer, which is being handled, and log it."""
        self.num_errors[name] += 1
        log.exception("%s failed, requests go on", name)
