"""Endpoints from a YAML file: a list of addresses, or of mappings, of which `address` is required.

    - 10.0.0.7:8000
    - {address: "10.0.0.8:8000", name: pod-b, group: l4}

An empty list, `[]`, empties the pool. An empty file changes nothing: writers that do not replace a
file atomically (write another, rename it) truncate it first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from extproc.address import check_endpoint_address
from extproc.files.filewatch import FileWatch
from extproc.files.yamltext import load_yaml
from extproc.types import Endpoint

_MAX_SHOWN_CHARS = 200
"""Length of a wrong entry in the message."""


class FileDiscovery:
    """Follows the file while `run` runs.

    Args:
        file: Its path.
        file_interval_s: Seconds between two reads.
        on_endpoints: Called with all endpoints, at first and at each change.
        on_failure: Called with a message, once per new failure.
        on_recovery: Called when the file can be used again.
        scheme: Of the endpoints' URLs.
    """

    def __init__(
        self,
        file: Path,
        file_interval_s: float,
        *,
        on_endpoints: Callable[[Sequence[Endpoint]], None],
        on_failure: Callable[[str], None],
        on_recovery: Callable[[], None],
        scheme: str,
        **_unused: object,
    ) -> None:
        self.run = FileWatch(
            file,
            interval_s=file_interval_s,
            on_change=lambda text: on_endpoints(parse_endpoints(text, scheme=scheme)),
            on_failure=on_failure,
            on_recovery=on_recovery,
        ).run


def parse_endpoints(text: str, *, scheme: str = "http") -> list[Endpoint]:
    """Parse a list of endpoints.

    Raises:
        ValueError: The message names the wrong entry, and why.
    """
    data = load_yaml(text)
    if data is None:
        raise ValueError("empty; for no endpoints write []")
    if not isinstance(data, list):
        raise ValueError("must be a list of `ip:port` or of {address, name, group}")
    return make_endpoints(data, scheme=scheme)


def make_endpoints(entries: Iterable[Any], *, scheme: str = "http") -> list[Endpoint]:
    """Make endpoints of strings and mappings; our own calls to them use `scheme`.

    Raises:
        ValueError: As `parse_endpoints`; also for a duplicate address.
    """
    endpoints = [_endpoint(index, entry, scheme) for index, entry in enumerate(entries)]
    seen: set[str] = set()
    for index, endpoint in enumerate(endpoints):
        if endpoint.address in seen:
            raise ValueError(f"entry {index}: {endpoint.address} is a duplicate")
        seen.add(endpoint.address)
    return endpoints


def _endpoint(index: int, entry: Any, scheme: str) -> Endpoint:
    fields = {"address": entry} if isinstance(entry, str) else entry
    if not isinstance(fields, dict) or not fields.keys() <= {"address", "name", "group"}:
        raise ValueError(
            f"entry {index}: must be `ip:port` or {{address, name, group}}, got {_short(entry)}"
        )
    address, texts = fields.get("address"), {key: fields.get(key, "") for key in ("name", "group")}
    if not isinstance(address, str):
        raise ValueError(f"entry {index}: address must be `ip:port`, got {_short(address)}")
    try:
        address = check_endpoint_address(address)
    except ValueError as error:
        raise ValueError(f"entry {index}: address {_short(address)}: {error}") from error
    for key, value in texts.items():
        if not isinstance(value, str):
            raise ValueError(f"entry {index}: {key} must be a string, got {_short(value)}")
    return Endpoint(address, f"{scheme}://{address}", **texts)


def _short(value: Any) -> str:
    return repr(value)[:_MAX_SHOWN_CHARS]
