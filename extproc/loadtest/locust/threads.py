"""Coroutines beside locust's greenlets: each in a thread with an event loop of its own.

Locust replaces the standard library's blocking calls with gevent's. uvloop makes its own system
calls, so that it is not affected.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

import gevent
import uvloop

_T = TypeVar("_T")


class InThread(Generic[_T]):
    """Runs a coroutine in a thread, from now on."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, _T]]) -> None:
        self._work = work
        self._values: list[_T] = []
        self._ended = gevent.get_hub().threadpool.spawn(self._run)

    @property
    def has_ended(self) -> bool:
        """Whether the coroutine has ended."""
        return bool(self._ended.ready())

    def wait(self) -> _T:
        """Wait until it ends, while other greenlets run; return its result or raise its error."""
        error = self._ended.get()
        if error is not None:
            raise error
        return self._values[0]

    def _run(self) -> Exception | None:
        """Return the error: gevent would print one that is raised here."""
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                self._values.append(runner.run(self._work()))
        except Exception as error:
            return error
        return None
