"""Addresses as `host:port`, and which of them Envoy can dial as an endpoint."""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address

MAX_PORT = 65_535
MAX_UNIX_PATH_BYTES = 107
"""Of a Unix socket's path on Linux: `sun_path` has 108, the last of them zero (unix(7))."""

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
    """Return the address as Envoy writes it if Envoy can dial it: `1.2.3.4:80` or `[::1]:80`.

    Neither an original-destination cluster nor `override_host` resolves names: with a name instead
    of the IP address each request would end with 503. `override_host` compares addresses as text:
    written in another way, such as `[0::1]:80`, it would not find the endpoint and take any.

    Raises:
        ValueError: It cannot; the message says what is allowed.
    """
    try:
        parsed = Address.parse(address)
    except ValueError:
        raise ValueError(f"must be `ip:port`{_cure(address)}") from None
    if not parsed.port:
        raise ValueError("must be `ip:port`, the port from 1")
    host = parsed.host
    try:
        ip = IPv6Address(host) if ":" in host else IPv4Address(host)
    except ValueError:
        local = "; this host is 127.0.0.1" if host == "localhost" else ""
        raise ValueError(
            f"must be `ip:port`: {host} is no IP address, and Envoy looks no names up here; "
            f"discovery.dns does{local}"
        ) from None
    return str(Address(_as_envoy_writes(ip), parsed.port))


def _cure(address: str) -> str:
    """Return what to change in an address that is not `host:port`; empty if that is not clear."""
    if "://" in address:
        return ", without `http://` or `https://`; for HTTPS set pods.tls"
    if "/" in address:
        return ", without a path"
    if ":" not in address:
        return ": the port is missing"
    if address.count(":") > 1 and "[" not in address:
        return ", an IPv6 address in brackets: `[2001:db8::1]:8000`"
    return ""


def _as_envoy_writes(ip: IPv4Address | IPv6Address) -> str:
    """Return an IP address as inet_ntop(3) writes it: some of IPv6 end like one of IPv4."""
    packed = ip.packed
    head, tail = packed[:-4], packed[-4:]
    is_mapped = head == bytes(10) + b"\xff\xff"
    if is_mapped or (head == bytes(12) and tail[:2] != bytes(2)):
        return f"::{'ffff:' if is_mapped else ''}{IPv4Address(tail)}"
    return str(ip)


def as_envoy_writes(text: str) -> str:
    """Return `ip` or `ip:port` as pods' addresses are written, to be compared as text: `[::1]` for
    `0::1`. Any other text stays as it is."""
    if text.count(":") < 2:
        return text
    host, _, port = text.removeprefix("[").partition("]")
    try:
        return f"[{_as_envoy_writes(IPv6Address(host))}]{port}"
    except ValueError:
        return text


def is_in_subset(address: str, subset: frozenset[str]) -> bool:
    """Return whether the data plane allows `address`: `ip:port`, or a bare `ip` for every port."""
    if address in subset:
        return True
    host = host_of(address)
    return host in subset or f"[{host}]" in subset
