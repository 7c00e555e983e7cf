"""Processes that end with the command that started them, whatever ends it."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 5.0
_POLL_S = 0.05
_LOG_CHARS = 2000
# prctl(2): the kernel ends this process when its parent is gone. Linux only: elsewhere a parent
# that is killed with SIGKILL leaves its processes behind. A program of its own and no
# `preexec_fn`: that would fork the parent, gRPC's threads and their fork handlers with it.
_LAUNCHER = """
import ctypes, os, signal, sys
parent, command = int(sys.argv[1]), sys.argv[2:]
if sys.platform == "linux":
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # gone before the kernel was asked
        os._exit(1)
os.execvp(command[0], command)
"""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_T = TypeVar("_T")


class DemoError(Exception):
    """It cannot run; the message says what is missing."""


class SignalledError(Exception):
    """A signal ended it, in order.

    Attributes:
        number: The signal's.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by {signal.Signals(number).name}")
        self.number = number


async def until_signalled(work: Coroutine[Any, Any, _T]) -> _T:
    """Run `work`; a signal ends it in order, and a second one does not end that.

    Raises:
        SignalledError: There was one.
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


class Program:
    """A child process and its log.

    Args:
        process: The process.
        log_path: File with its standard output and error.
    """

    def __init__(self, process: asyncio.subprocess.Process, log_path: Path) -> None:
        self._process = process
        self._log_path = log_path

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def log(self) -> str:
        """What it wrote so far."""
        return self._log_path.read_text(encoding="utf-8", errors="replace")

    async def wait_for(self, look: Callable[[], Awaitable[_T | None]], what: str) -> _T:
        """Look again and again until there is something, and return it.

        Raises:
            DemoError: The process ended first, or it took longer than `START_TIMEOUT_S`.
        """
        why = f"not within {START_TIMEOUT_S:g} s"
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                while self._process.returncode is None:
                    found = await look()
                    if found is not None:
                        return found
                    await asyncio.sleep(_POLL_S)
            why = f"ended with status {self._process.returncode}"
        except TimeoutError:
            pass
        raise DemoError(f"{what}: {why}\n{self.log[-_LOG_CHARS:]}")

    async def ended(self) -> int:
        """Wait until it ends by itself; its exit status."""
        return await self._process.wait()

    async def stop(self) -> None:
        """Ask it to end, and kill it if it does not."""
        if self._process.returncode is not None:
            return
        self._process.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()


def bound_to_us(command: Sequence[str]) -> list[str]:
    """The same command, as one that ends with this process.

    Raises:
        FileNotFoundError: There is no such program.
    """
    if shutil.which(command[0]) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    return [sys.executable, "-S", "-c", _LAUNCHER, str(os.getpid()), *command]


async def spawn(command: Sequence[str], log_path: Path) -> Program:
    """Start a program.

    Raises:
        DemoError: It cannot be started.
    """
    with log_path.open("wb") as log:
        try:
            process = await asyncio.create_subprocess_exec(
                *bound_to_us(command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # A group of its own: a Ctrl-C is for the parent, which then ends its children in
                # order. Not a session: Linux would give each its own share of the CPU
                # (sched_autogroup).
                process_group=0,
            )
        except OSError as error:
            raise DemoError(f"{command[0]}: {error}") from error
    return Program(process, log_path)
