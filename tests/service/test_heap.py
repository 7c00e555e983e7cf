"""Large blocks that are freed go back to the system, whatever lies beside them."""

from __future__ import annotations

import platform
import sys

import pytest

from tests.commandline import output_of

_MEASURE = """
from pathlib import Path
from extproc.service.heap import return_large_blocks

def resident_mib():
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) // 1024

return_large_blocks()
del_me = bytes(20 * 2**20)
del del_me
before = resident_mib()
kept, pages = [], []
for number in range(100):
    pages.append(b"x" * 2**20)
    kept.append([bytes(600 + number) for _ in range(50)])
del pages
print(resident_mib() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc alone")
def test_of_large_blocks_between_small_ones_nothing_is_held_once_they_are_freed() -> None:
    found = output_of(sys.executable, "-c", _MEASURE)

    assert int(found) < 20  # of 100 MiB
