"""Signals that end a command in order."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_T = TypeVar("_T")


class SignalledError(Exception):
    """Work was ended by the signal `number`."""

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by {signal.Signals(number).name}")
        self.number = number


async def until_signalled(work: Coroutine[Any, Any, _T]) -> _T:
    """Run `work` until it ends; a signal cancels it, further signals are ignored.

    Raises:
        SignalledError: There was a signal.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    caught: list[int] = []

    def on_signal(number: int) -> None:
        if not caught:
            caught.append(number)
            task.cancel()

    for number in _SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
    try:
        return await work
    except asyncio.CancelledError:
        if not caught:
            raise
        raise SignalledError(caught[0]) from None
