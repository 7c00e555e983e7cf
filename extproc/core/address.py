"""Addresses of endpoints: `ip:port`, as Envoy dials them."""

from __future__ import annotations

import re
from ipaddress import IPv4Address, IPv6Address

MAX_PORT = 65_535

_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:/\[\],%]+):([0-9]{1,5})")
"""No comma: the destination is a list. No `%`: a scoped address crashes older Envoys
(CVE-2026-73549)."""


def check_endpoint_address(address: str) -> str:
    """Answer the address if Envoy can dial it: `1.2.3.4:80` or `[::1]:80`, the port from 1.

    Neither an original-destination cluster nor `override_host` looks names up: with one in place of
    the IP address each request would end with a 503.

    Raises:
        ValueError: What it must be.
    """
    match = _ADDRESS.fullmatch(address)
    if match is None or not 0 < int(match[2]) <= MAX_PORT:
        raise ValueError(f"must be `ip:port`, got {address!r}")
    host = match[1]
    try:
        _ = IPv6Address(host[1:-1]) if host.startswith("[") else IPv4Address(host)
    except ValueError:
        raise ValueError(
            f"must be `ip:port`, got {address!r}: {host} is no IP address, and Envoy looks no "
            "names up here; discovery.dns does"
        ) from None
    return address
