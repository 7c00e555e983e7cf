"""Whether listeners could listen where they are to."""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Mapping
from pathlib import Path

from extproc.address import MAX_UNIX_PATH_BYTES, Address
from extproc.files.reading import describe_failure


def check_listeners(listeners: Mapping[str, str | None]) -> tuple[list[str], list[str]]:
    """Return a line for each address that cannot be listened on, and for each that is in use.

    Args:
        listeners: Addresses by the field that has them; None for no listener.
    """
    taken: dict[tuple[int, str, int], str] = {}
    errors, in_use = list[str](), list[str]()
    for name, address in listeners.items():
        if address is None:
            continue
        try:
            if address.startswith("unix:"):
                _check_unix_path(address.removeprefix("unix:"))
            else:
                _try_to_bind(name, address, taken)
        except (OSError, UnicodeError) as error:  # UnicodeError: not a host name
            line = " ".join(f"{name}: {address}: {describe_failure(error)}".split())
            is_in_use = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
            (in_use if is_in_use else errors).append(line)
    return errors, in_use


def _check_unix_path(text: str) -> None:
    """Refuse a path where no Unix socket can be made; an existing socket will be replaced."""
    path = Path(text)
    if len(os.fsencode(text)) > MAX_UNIX_PATH_BYTES:
        raise OSError(errno.ENAMETOOLONG, f"longer than {MAX_UNIX_PATH_BYTES} bytes")
    if not stat.S_ISDIR(path.parent.stat().st_mode):
        raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))
    if path.exists() and not path.is_socket():
        raise OSError(errno.EEXIST, "exists and is not a socket")


def _try_to_bind(name: str, address: str, taken: dict[tuple[int, str, int], str]) -> None:
    """Bind as a listener does, without listening, so that nobody can connect.

    Raises:
        OSError: It cannot be bound, or another listener of ours has it.
    """
    wanted = Address.parse(address)
    for family, kind, protocol, _, where in socket.getaddrinfo(
        wanted.host, wanted.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    ):
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind(where)
        if wanted.port:
            _claim(name, (int(family), str(where[0]), wanted.port), taken)


def _claim(name: str, place: tuple[int, str, int], taken: dict[tuple[int, str, int], str]) -> None:
    family, host, port = place
    for (other_family, other_host, other_port), other in taken.items():
        is_same_host = host == other_host or {host, other_host} & {"0.0.0.0", "::"}
        if (family, port) == (other_family, other_port) and is_same_host and other != name:
            raise OSError(errno.EINVAL, f"already used by {other}")
    taken[place] = name
