"""Endpoints that the configuration lists."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from extproc.discovery.file import make_endpoints
from extproc.types import Endpoint


class StaticDiscovery:
    """Hands endpoints on, once.

    Args:
        static: Each with `address`, and maybe `name` and `group`.
        on_endpoints: Called with all endpoints.
        scheme: Of their URLs.
    """

    def __init__(
        self,
        static: Iterable[Mapping[str, Any]],
        *,
        on_endpoints: Callable[[Sequence[Endpoint]], None],
        scheme: str,
        **_unused: object,
    ) -> None:
        self._entries, self._on_endpoints, self._scheme = static, on_endpoints, scheme

    async def run(self) -> None:
        """Hand them on."""
        self._on_endpoints(make_endpoints(self._entries, scheme=self._scheme))
