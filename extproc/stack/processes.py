"""Child processes that end with their parent, however that ends.

They are not bound to an event loop: a process that was started in one can be stopped in another.
"""

from __future__ import annotations

import asyncio
import atexit
import errno
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import aiohttp

from extproc.address import Address

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
_POLL_S = 0.05
_LOG_CHARS = 4000
_PAGE_TIMEOUT = aiohttp.ClientTimeout(total=5.0)
_PORTS = range(20_000, 32_000)
"""Below Linux's ports of outgoing connections: no client gets one of them before its owner."""
# prctl(2): the kernel ends this process when its parent is gone. Linux only: elsewhere a parent
# killed with SIGKILL leaves its children behind. A program instead of `preexec_fn`, which would
# fork the parent with gRPC's threads and their fork handlers.
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
_T = TypeVar("_T")
_MAX_CLAIMS = 64
"""Ports that are claimed at the same time: each takes a file descriptor, and a port that was given
before so many others is listened on by now, or nobody needs it."""
_claimed: deque[socket.socket] = deque()
_given_ports: set[int] = set()


class StackError(Exception):
    """A process cannot be started, or does not become ready; the message says which and why."""


class ChildProcess:
    """A process with its own group and folder; its output goes to a file there.

    Start it from a thread that outlives it: the kernel ends it with the thread.

    Attributes:
        dir: The folder; removed by `close`.
        log_path: The output.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.dir = Path(tempfile.mkdtemp(prefix=f"extproc-{name}-"))
        self.log_path = self.dir / "log"
        self._closed_log = ""
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The process id."""
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    @property
    def returncode(self) -> int | None:
        """The exit status; None before the end."""
        return self._process.poll() if self._process else None

    @property
    def log(self) -> str:
        """The output so far; also after `close`."""
        if not self.log_path.exists():
            return self._closed_log
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def spawn(
        self, command: Sequence[str], env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> None:
        """Start a program, or start it again after its end; the log is continued.

        Raises:
            StackError: There is no such program.
        """
        with self.log_path.open("ab") as log:
            try:
                self._process = subprocess.Popen(
                    bound_to_us(command),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **(env or {})},
                    cwd=cwd,
                    # Its own group: a Ctrl-C reaches the parent only, which ends its children in
                    # order. Not a session: Linux would give each its own share of the CPU
                    # (sched_autogroup).
                    process_group=0,
                )
            except OSError as error:
                raise StackError(f"{command[0]}: {error}") from error

    async def start(self) -> None:
        """Start the process, and return once it is ready.

        Raises:
            StackError: It cannot be started, or does not become ready.
        """
        raise NotImplementedError

    async def wait_until(
        self, check: Callable[[], Awaitable[_T]], within_s: float = START_TIMEOUT_S
    ) -> _T:
        """Repeat `check` until it returns something true, and return that.

        Raises:
            StackError: The process ended first, or took longer; with the end of its log.
        """
        try:
            async with asyncio.timeout(within_s):
                while True:
                    self.check_running()
                    if found := await check():
                        return found
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise self._failure(f"not ready within {within_s:g} s") from None

    def check_running(self) -> None:
        """Do nothing as long as the process runs.

        Raises:
            StackError: It has ended; with the end of its log.
        """
        if not self.is_running:
            raise self._failure(f"ended with status {self.returncode}")

    def _failure(self, why: str) -> StackError:
        return StackError(f"{self.name}: {why}\n{self.log[-_LOG_CHARS:]}")

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the whole group, if the process runs."""
        if self.is_running:
            os.killpg(self.pid, number)

    async def wait(self, within_s: float | None = None) -> int:
        """Wait for the end of the process, and return the exit status.

        Raises:
            TimeoutError: It has not ended in time.
        """
        assert self._process is not None
        async with asyncio.timeout(within_s):
            while (status := self._process.poll()) is None:  # noqa: ASYNC110 # of no loop
                await asyncio.sleep(_POLL_S)
        return status

    async def stop(self, within_s: float = STOP_TIMEOUT_S) -> int:
        """Send SIGTERM, then SIGKILL if the process does not end, and return the exit status."""
        self.send(signal.SIGTERM)
        try:
            return await self.wait(within_s)
        except TimeoutError:
            return await self.kill()

    async def kill(self) -> int:
        """Kill the process, and return the exit status."""
        self.send(signal.SIGKILL)
        return await self.wait()

    async def close(self) -> None:
        """Kill the process if it runs, and remove its files."""
        if self.is_running:
            await self.kill()
        self._closed_log = self.log
        shutil.rmtree(self.dir, ignore_errors=True)

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def bound_to_us(command: Sequence[str]) -> list[str]:
    """Wrap a command so that it ends with this process.

    Raises:
        FileNotFoundError: There is no such program.
    """
    if shutil.which(command[0]) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    return [sys.executable, "-S", "-c", _LAUNCHER, str(os.getpid()), *command]


def free_port(count: int = 1) -> int:
    """Return a TCP port of 127.0.0.1 on which nothing listens: the first of `count` in a row.

    No other call of this process gets one of them, and none of another process before it is
    listened on. For many choose at the same time, and a port is listened on only some time later.
    """
    while True:
        first = _PORTS[secrets.randbelow(len(_PORTS) - count + 1)]
        ports = range(first, first + count)
        if not _given_ports.isdisjoint(ports):
            continue
        claimed = [claim for claim in map(_claim, ports) if claim]
        if len(claimed) == count:
            _given_ports.update(ports)
            _claimed.extend(claimed)
            _release(_MAX_CLAIMS)
            return first
        for claim in claimed:
            claim.close()


@atexit.register
def _release(num_kept: int = 0) -> None:
    while len(_claimed) > num_kept:
        _claimed.popleft().close()


def _claim(port: int) -> socket.socket | None:
    """A UDP socket on this port, which says that its TCP port is given away; None: it is taken."""
    claim = socket.socket(type=socket.SOCK_DGRAM)
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
            claim.bind(("127.0.0.1", port))
        except OSError:
            claim.close()
            return None
    return claim


def check_port(host: str, port: int) -> None:
    """Do nothing if a server can listen on this IP address and TCP port.

    Raises:
        OSError: Another one does, or it is not allowed; the message names the address.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise OSError(error.errno, f"{Address(host, port)}: {error.strerror}") from error


async def get_page(url: str) -> str | None:
    """Return the page at `url`; None without a response of status 200."""
    try:
        async with aiohttp.ClientSession(timeout=_PAGE_TIMEOUT) as http, http.get(url) as response:
            return await response.text() if response.status == 200 else None
    except (aiohttp.ClientError, TimeoutError):
        return None


async def has_page(url: str) -> bool:
    """Return whether there is a page at `url`, be it empty."""
    return await get_page(url) is not None


# --- Signals that end a command in order.

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


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
