"""Coroutines beside locust's greenlets: each in a thread with an event loop of its own.

Locust replaces the standard library's blocking calls with gevent's. uvloop makes its own system
calls, so that it is not affected.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar, cast

import gevent
import uvloop

_T = TypeVar("_T")
_T_co = TypeVar("_T_co", covariant=True)


class Result(Protocol[_T_co]):
    """The result of a coroutine in its thread."""

    def ready(self) -> bool:
        """Whether it has ended."""
        ...

    def get(self) -> _T_co:
        """Wait for it, while other greenlets run, and return its result or raise its exception."""
        ...


def in_thread(work: Callable[[], Coroutine[Any, Any, _T]]) -> Result[_T]:
    """Start a coroutine in a thread."""

    def run() -> _T:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(work())

    return cast("Result[_T]", gevent.get_hub().threadpool.spawn(run))
