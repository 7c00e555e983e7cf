"""Which machine a result was taken on: what matters for it, and no names."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from extproc.stack.stack import find_envoy

_BUSY = 0.3
"""Load per core before the start from which on figures say more about the rest than about us."""


def describe() -> dict[str, Any]:
    """CPU model, cores, memory, and the versions that matter. Warns if others use the machine."""
    load = os.getloadavg()[0]
    machine = {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30),
        "kernel": platform.release().partition("-")[0],
        "python": platform.python_version(),
        "grpcio": version("grpcio"),
        "uvloop": version("uvloop"),
        "envoy": _envoy_version(),
        "load_1min_at_start": round(load, 2),
    }
    if load > _BUSY * len(os.sched_getaffinity(0)):
        print(f"the machine is busy (load {load:.1f}): do not trust the figures", file=sys.stderr)
    return machine


def slug(machine: dict[str, Any]) -> str:
    """Return a short form of the machine's description for file names."""
    words = re.sub(r"[^a-z0-9]+", "-", str(machine["cpu"]).lower()).strip("-")
    return f"{words}-{machine['cores']}-cores"


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _envoy_version() -> str:
    done = subprocess.run([find_envoy(), "--version"], capture_output=True, text=True, check=True)
    found = re.search(r"/(\d+\.\d+\.\d+)/", done.stdout)
    return found.group(1) if found else "unknown"
