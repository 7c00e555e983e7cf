"""Which of a query's APIs a cluster has: several groups may define a kind, or none does.

Unknown is not absent. A kind that may not be listed is unknown, unless the API server says that it
has no such kind: that answer needs no right.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from extproc.discovery.kubernetes.objects import Query
from extproc.discovery.kubernetes.objectstore import ApiError

NOT_SERVED, FORBIDDEN = "status_404", "status_403"


class _Resource(Struct):
    name: str = ""


class _Resources(Struct):
    resources: tuple[_Resource, ...] = ()


_resources = msgspec.json.Decoder(_Resources)


class ServedClient(Protocol):
    """The part of the API client that is used here."""

    async def get(self, path: str, parameters: Mapping[str, str]) -> bytes:
        """Return a body."""


async def find_served(client: ServedClient, query: Query[Any], namespace: str) -> list[str]:
    """Return the APIs of a query that can be listed, in its order; none where none has the kind.

    Raises:
        ApiError: It is unknown.
    """
    served, refused = [], None
    for api in query.apis:
        try:
            await client.get(query.path(api, namespace), {"limit": "1"})
            served.append(api)
        except ApiError as error:
            if error.reason == FORBIDDEN:
                refused = error if await _is_defined(client, query, api) else refused
            elif error.reason != NOT_SERVED:
                raise
    if refused is not None and not served:
        raise refused
    return served


async def _is_defined(client: ServedClient, query: Query[Any], api: str) -> bool:
    """Return whether the server has the kind, which may not be listed.

    Raises:
        ApiError: It is unknown.
    """
    try:
        found = _resources.decode(await client.get(api, {}))
    except (msgspec.DecodeError, RecursionError):
        return True
    except ApiError as error:
        if error.reason in (FORBIDDEN, NOT_SERVED):
            return error.reason == FORBIDDEN
        raise
    return any(each.name == query.resource for each in found.resources)
