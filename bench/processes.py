"""Child processes of code that does not await, and what the kernel says they used."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from extproc.stack.processes import ChildProcess, StackError
from extproc.stack.stack import find_envoy

_ChildT = TypeVar("_ChildT", bound=ChildProcess)


@contextmanager
def started(child: _ChildT) -> Iterator[_ChildT]:
    """The child, up; ended with the context.

    Raises:
        StackError: It does not come up.
    """
    try:
        asyncio.run(child.start())
        yield child
    finally:
        asyncio.run(child.close())


def raise_file_limit() -> None:
    """As many sockets as we may have, for us and for our children."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def require(*tools: str) -> None:
    """Check that load generators and Envoy are there.

    Raises:
        StackError: The names of those that are not, and where to get them.
    """
    packages = {"wrk": "wrk", "h2load": "nghttp2-client"}
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        names = " ".join(packages[tool] for tool in missing)
        raise StackError(f"not installed: {', '.join(missing)} (Debian: apt-get install {names})")
    find_envoy()


def get(url: str) -> str | None:
    """The page at `url`; None while there is no good answer."""
    try:
        with urllib.request.urlopen(url, timeout=5.0) as response:
            return str(response.read(), "utf-8")
    except (urllib.error.URLError, OSError):
        return None


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has used, user and system, all threads.

    Source: proc_pid_stat(5), fields 14 and 15.
    """
    # Field 2 is the program's name in brackets and may hold spaces and brackets itself.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


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
    """Return the memory of a process; none of one that is about to end."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    kib = {
        name: int(rest.split()[0])
        for name, _, rest in (x.partition(":") for x in lines)
        if name in ("VmRSS", "VmHWM")
    }
    return Memory(kib.get("VmRSS", 0) * 1024, kib.get("VmHWM", 0) * 1024)
