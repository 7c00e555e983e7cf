"""The one place where what observes is called: it can neither fail a request nor flood the log.

Telemetry, decisions for people, attainment, spans and the relay to peers look on; no answer needs
them. So they are called through here: an exception is counted, logged, and gone.
A part of `app`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar

log = logging.getLogger(__name__)

_P = ParamSpec("_P")
_T = TypeVar("_T")

NAMES = ("telemetry", "decisions", "attainment", "tracing", "relay")
"""Who observes; a metric's label."""


class Observers:
    """Calls observers."""

    def __init__(self) -> None:
        self._num_errors = dict.fromkeys(NAMES, 0)

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
            self._num_errors[name] += 1
            log.exception("%s failed, requests go on", name)
            return None
