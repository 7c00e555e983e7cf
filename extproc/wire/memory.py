"""The memory limit of this process: its cgroup's, its resource limits, or the machine's."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final

PROGRAM_BYTES = 128 * 1024 * 1024
"""Of the process's memory limit, for the program itself: 80 MB, and twice as much where pods and
tokens fill all that they may."""
BODY_SHARE_OF_MEMORY = 0.25
"""Of the rest, for bodies. There are also the copies of the body that is being read, long responses
of pods, and what the allocator keeps."""
_V2: Final = ("", Path("/sys/fs/cgroup"), "memory.max")
_V1: Final = ("memory", Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes")


def body_share_bytes(limit_bytes: int) -> int:
    """Return how much of a memory limit is for bodies."""
    return int(max(0, limit_bytes - PROGRAM_BYTES) * BODY_SHARE_OF_MEMORY)


def memory_limit_bytes(root: Path = Path("/")) -> int:
    """Return the least of all limits; `root` is the root of the system's files."""
    physical_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    kinds = (resource.RLIMIT_AS, resource.RLIMIT_DATA)
    resources = [resource.getrlimit(kind)[0] for kind in kinds]
    limits = [limit for limit in resources if limit != resource.RLIM_INFINITY]
    return min([physical_bytes, *limits, *_cgroup_limits(root)])


def _cgroup_limits(root: Path) -> Iterator[int]:
    """Yield the limits of our cgroup and its ancestors (kernel: cgroup-v2.rst,
    cgroup-v1/memory.rst).
    """
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        for controller, mount, file in (_V2, _V1):
            if controller not in controllers.split(","):
                continue
            # In a container the path may be the host's, and the mount our own cgroup: then folders
            # of the path are missing here, and the mount itself has the limit.
            group = PurePosixPath(path.lstrip("/"))
            for folder in (group, *group.parents):
                text = _read(root / mount.relative_to("/") / folder / file).strip()
                if text.isdecimal():
                    yield int(text)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
