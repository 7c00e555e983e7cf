"""Endpoints from a YAML file: a list of addresses, or of mappings with `address` and `name`.

    - 10.0.0.7:8000
    - {address: "10.0.0.8:8000", name: pod-b}

An empty list empties the pool; a file that cannot be read or understood changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import yaml

from extproc.core.types import Endpoint

_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:/\[\],%]+):([0-9]{1,5})")
"""No comma: the destination is a list. No `%`: a scoped address crashes older Envoys
(CVE-2026-73549)."""


def parse_endpoints(text: str, *, scheme: str = "http") -> list[Endpoint]:
    """Read a list of endpoints.

    Raises:
        ValueError: Says which entry is wrong, and how.
    """
    try:
        data = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"not YAML: {error}") from error
    if data is None:
        data = []
    if not isinstance(data, list):
        raise ValueError("must be a list of `ip:port` or of {address, name}")
    return make_endpoints(data, scheme=scheme)


def make_endpoints(entries: Iterable[Any], *, scheme: str = "http") -> list[Endpoint]:
    """Make endpoints of strings and mappings; our own calls to them use `scheme`.

    Raises:
        ValueError: As `parse_endpoints`; also an address that stands twice.
    """
    endpoints = [_endpoint(index, entry, scheme) for index, entry in enumerate(entries)]
    seen: set[str] = set()
    for index, endpoint in enumerate(endpoints):
        if endpoint.address in seen:
            raise ValueError(f"entry {index}: {endpoint.address} stands twice")
        seen.add(endpoint.address)
    return endpoints


def _endpoint(index: int, entry: Any, scheme: str) -> Endpoint:
    fields = {"address": entry} if isinstance(entry, str) else entry
    if not isinstance(fields, dict) or not fields.keys() <= {"address", "name"}:
        raise ValueError(f"entry {index}: must be `ip:port` or {{address, name}}, got {entry!r}")
    address, name = fields.get("address"), fields.get("name", "")
    match = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
    if match is None or not 0 < int(match[2]) < 65_536:
        raise ValueError(f"entry {index}: address must be `ip:port`, got {address!r}")
    if not isinstance(name, str):
        raise ValueError(f"entry {index}: name must be a string, got {name!r}")
    return Endpoint(match[0], f"{scheme}://{match[0]}", name)
