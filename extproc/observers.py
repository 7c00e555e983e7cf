"""The one place where what observes is called: it can neither fail a request nor flood the log.

Telemetry, decisions for people, attainment, spans and the relay to peers look on; no answer needs
them. So they are called through here: an exception is counted, logged once in a while, and gone.
A part of `app`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar

from extproc.core.seldom import Seldom

log = logging.getLogger(__name__)

_P = ParamSpec("_P")
_T = TypeVar("_T")

NAMES = ("telemetry", "decisions", "attainment", "tracing", "relay")
"""Who observes; a metric's label."""


class Observers:
    """Calls observers.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._num_errors = dict.fromkeys(NAMES, 0)
        self._lines = {name: Seldom() for name in NAMES}

    @property
    def num_errors(self) -> Mapping[str, int]:
        """Calls that raised, by observer."""
        return self._num_errors

    def tell(
        self, name: str, observe: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs
    ) -> _T | None:
        """Call the observer `name`, one of `NAMES`; answer what it answers, None if it raised."""
        try:
            return observe(*args, **kwargs)
        except Exception:
            self._failed(name)
            return None

    def _failed(self, name: str) -> None:
        self._num_errors[name] += 1
        num_held_back = self._lines[name].admit(now=self._clock())
        if num_held_back is not None:
            log.exception(
                "%s failed, requests go on (%d more since the last such line)", name, num_held_back
            )
