"""Objects of a kind that a cluster need not have a definition of. Part of `app`.

1. Several API groups may define the kind. Where more than one is served, the first alone counts.
2. Which are served is looked up every `relist_s`, as a definition may be installed or removed.
3. What was known last stands until the API server says otherwise: while it cannot be reached, and
   while a Role does not allow listing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from extproc.core.kubernetes.objects import KubeObject, Query
from extproc.core.kubernetes.store import ApiError
from extproc.shell.discovery.kubewatch import ListWatch

log = logging.getLogger(__name__)

RETRY_S = 5.0
"""After a look-up that failed."""
NOT_SERVED, FORBIDDEN = "status_404", "status_403"

T = TypeVar("T", bound=KubeObject)

OnObjects = Callable[[Query[T] | None, Collection[T]], None]
NewWatch = Callable[[Query[T], Callable[[Collection[T]], None]], ListWatch[T]]


class Client(Protocol):
    """The part of `KubernetesClient` that is used here."""

    async def namespace(self) -> str:
        """Return our own namespace."""

    async def get(self, path: str, parameters: Mapping[str, str]) -> bytes:
        """Return the body of a response."""


class OptionalKind(Generic[T]):
    """The objects of one kind, followed while `run` runs.

    Args:
        title: The kind's plural, for the log.
        queries: One for each API group, the one that counts first.
        new_watch: Makes the watch of a query.
        on_objects: Gets the query that is followed with all its objects, once known and at each
            change; None and nothing where the kind is not defined.

    Attributes:
        is_absent: It is not defined, or a Role does not allow listing.
    """

    def __init__(
        self,
        client: Client,
        title: str,
        queries: Sequence[Query[T]],
        *,
        new_watch: NewWatch[T],
        on_objects: OnObjects[T],
        relist_s: float,
    ) -> None:
        self._client = client
        self._title = title
        self._queries = queries
        self._new_watch = new_watch
        self._on_objects = on_objects
        self._relist_s = relist_s
        self._warned = ""
        self.is_absent = False
        self._followed: Query[T] | None = None
        self._watching: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Follow until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                rest_s = self._relist_s
                try:
                    query = await self._find()
                    self.is_absent = query is None
                    self._follow(query, tasks)
                except ApiError as error:
                    if error.reason == FORBIDDEN:
                        self.is_absent = True
                        self._warn(f"not read: {error}")
                    else:
                        log.debug("%s: %s", self._title, error)
                        rest_s = min(rest_s, RETRY_S)
                await asyncio.sleep(rest_s)

    def _follow(self, query: Query[T] | None, tasks: asyncio.TaskGroup) -> None:
        """Follow a query instead of the one before, if it is another; nothing for None."""
        if query == self._followed:
            return
        self._followed = query
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None
        if query is None:
            self._on_objects(None, ())
        else:
            watch = self._new_watch(query, lambda objects: self._on_objects(query, objects))
            self._watching = tasks.create_task(watch.run())

    async def _find(self) -> Query[T] | None:
        """Return the query to follow, None where the kind is not defined.

        Raises:
            ApiError: It cannot be told.
        """
        served, refused = [], None
        for query in self._queries:
            path = query.path(await self._client.namespace())
            try:
                await self._client.get(path, {"limit": "1"})
                served.append(query)
            except ApiError as error:
                if error.reason == FORBIDDEN:
                    refused = error
                elif error.reason != NOT_SERVED:
                    raise
        if len(served) > 1:
            self._warn(f"of those in two API groups, those under {served[0].api} alone count")
        if refused is not None and not served:
            raise refused
        return served[0] if served else None

    def _warn(self, what: str) -> None:
        """Log a warning, unless it is the same as the last one."""
        if what != self._warned:
            self._warned = what
            log.warning("%s: %s", self._title, what)
