"""How much memory the process may use, by the files of a made-up system."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from extproc.wire.memory import memory_limit_bytes

MIB = 1024 * 1024
PHYSICAL_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.fixture(autouse=True)
def unlimited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever runs the tests may have limits of its own."""
    infinite = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: infinite)


def system(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "limit_bytes"),
    [
        pytest.param({}, PHYSICAL_BYTES, id="nothing is said"),
        pytest.param(
            {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "536870912\n"},
            512 * MIB,
            id="version 2, as a container sees itself",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "0::/pods/a\n",
                "sys/fs/cgroup/pods/memory.max": "1048576\n",
                "sys/fs/cgroup/pods/a/memory.max": "2097152\n",
            },
            MIB,
            id="version 2, the one above is less",
        ),
        pytest.param(
            {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"},
            PHYSICAL_BYTES,
            id="version 2 without limit",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "5:cpu,cpuacct:/\n4:memory:/docker/1\n0::/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "3145728\n",
            },
            3 * MIB,
            id="version 1, with the path of the host",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "4:memory:/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            },
            PHYSICAL_BYTES,
            id="version 1 without limit",
        ),
    ],
)
def test_the_least_limit_of_the_cgroup_counts(
    files: dict[str, str], limit_bytes: int, tmp_path: Path
) -> None:
    assert memory_limit_bytes(system(tmp_path, files)) == limit_bytes


def test_a_resource_limit_counts_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {resource.RLIMIT_AS: 5 * MIB, resource.RLIMIT_DATA: resource.RLIM_INFINITY}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limits[kind], limits[kind]))

    assert memory_limit_bytes(tmp_path) == 5 * MIB


def test_the_machine_that_runs_this_has_memory() -> None:
    assert 0 < memory_limit_bytes() <= PHYSICAL_BYTES
