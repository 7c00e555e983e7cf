"""Addresses as `host:port`, and which of them Envoy can dial as an endpoint."""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address

MAX_PORT = 65_535

_ADDRESS = re.compile(
    r"(?:\[(?P<v6>[0-9A-Fa-f.]*:[0-9A-Fa-f:.]*)\]|(?P<name>[^\s:/\[\],%]+)):(?P<port>[0-9]{1,5})"
)
"""No comma: the destination is a list. No `%`: a scoped address crashes older Envoys
(CVE-2026-73549)."""


@dataclass(frozen=True, slots=True)
class Address:
    """A host and a port, written `host:port`, or `[host]:port` where the host is IPv6.

    Attributes:
        host: An IP address or a name, without brackets.
        port: From 0, which stands for any free one, to `MAX_PORT`.
    """

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Parse an address; raise ValueError if it is not `host:port`."""
        match = _ADDRESS.fullmatch(text)
        if match is None or int(match["port"]) > MAX_PORT:
            raise ValueError(f"{text!r} is not host:port")
        return cls(match["v6"] or match["name"], int(match["port"]))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def host_of(address: str) -> str:
    """Return the host, without brackets, of a valid address."""
    return address.rpartition(":")[0].strip("[]")


def check_endpoint_address(address: str) -> str:
    """Return the address if Envoy can dial it: `1.2.3.4:80` or `[::1]:80`, the port from 1.

    Neither an original-destination cluster nor `override_host` resolves names: with a name instead
    of the IP address each request would end with 503.

    Raises:
        ValueError: It cannot; the message says what is allowed.
    """
    problem = f"must be `ip:port`, got {address!r}"
    try:
        parsed = Address.parse(address)
    except ValueError:
        raise ValueError(problem) from None
    if not parsed.port:
        raise ValueError(problem)
    host = parsed.host
    try:
        _ = IPv6Address(host) if ":" in host else IPv4Address(host)
    except ValueError:
        raise ValueError(
            f"{problem}: {host} is no IP address, and Envoy looks no names up here; "
            "discovery.dns does"
        ) from None
    return address
