"""The C library's heap: large blocks go back to the system at once."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from typing import Final

LARGE_BYTES: Final = 256 * 1024
"""A block from here on is a mapping of its own. Requests are smaller, but for large bodies."""

_M_MMAP_THRESHOLD: Final = -3  # malloc.h


def return_large_blocks() -> None:
    """Have glibc map large blocks one by one.

    By itself it raises its threshold to the largest block that was ever freed, up to 32 MiB. Then
    long pages lie among small objects, and what they leave is never given back: a router that read
    32 pods' longest pages held 225 MiB afterwards, and 120 so. Other C libraries have no such call.
    """
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)
