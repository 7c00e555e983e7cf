"""A network namespace for the tests of one module: programs with fixed ports do not collide there.

A namespace is a thread's: what the thread that entered it opens or starts is inside, child
processes and new threads among it. What was open before stays where it was.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_CLONE_NEWNET = 0x40000000
_CAN_ENTER = "import ctypes, sys; sys.exit(ctypes.CDLL(None).unshare(0x40020000) != 0)"
"""Network and mounts."""


def missing_rights() -> str:
    """Why there can be no namespace here, as a sentence; empty where there can."""
    if sys.platform != "linux" or shutil.which("ip") is None or shutil.which("unshare") is None:
        return "no network namespaces: needs Linux, iproute2 and util-linux"
    done = subprocess.run([sys.executable, "-S", "-c", _CAN_ENTER], check=False)
    if done.returncode:
        return "no right to make network namespaces: be root, or `unshare --map-root-user --net`"
    return ""


@contextmanager
def own_network(*addresses: str) -> Iterator[None]:
    """Be in a new network namespace that has loopback and these IPv4 addresses, no more."""
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        _call("unshare", _CLONE_NEWNET)
        try:
            _ip("link", "set", "lo", "up")
            for address in addresses:
                add_address(address)
            yield
        finally:
            _call("setns", before, _CLONE_NEWNET)
    finally:
        os.close(before)


def add_address(address: str) -> None:
    """One more for the namespace that this thread is in."""
    _ip("address", "add", f"{address}/32", "dev", "lo")


def remove_address(address: str) -> None:
    """One less. Connections to it stay, and nothing passes: as where its node has gone."""
    _ip("address", "del", f"{address}/32", "dev", "lo")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=10)


def _call(name: str, *arguments: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
