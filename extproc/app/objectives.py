"""The priorities that a cluster's InferenceObjectives give. Part of `app`.

1. Two API groups define the kind. Where both are served, the newer one alone counts.
2. Which are served is looked up every `relist_s`, as a definition may be installed or removed.
3. What was known last stands until the API server says otherwise: while it cannot be reached, and
   while a Role does not allow listing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping

from extproc.app.inferencepool import Client
from extproc.core.kubernetes.objectives import priorities
from extproc.core.kubernetes.objects import InferenceObjective, Query, objective_queries
from extproc.core.kubernetes.store import ApiError
from extproc.shell.discovery.kubewatch import ListWatch

log = logging.getLogger(__name__)

RETRY_S = 5.0
"""After a look-up that failed."""
NOT_SERVED, FORBIDDEN = "status_404", "status_403"

OnPriorities = Callable[[Mapping[str, int]], None]
NewWatch = Callable[
    [Query[InferenceObjective], Callable[[Collection[InferenceObjective]], None]],
    ListWatch[InferenceObjective],
]


class Objectives:
    """The InferenceObjectives of one pool, followed while `run` runs.

    Args:
        pool: Its name.
        namespace: Empty for our own.
        new_watch: Makes the watch of a query.
        on_priorities: Gets the priorities by the objectives' names, once known and at each change.
    """

    def __init__(
        self,
        client: Client,
        pool: str,
        namespace: str,
        *,
        new_watch: NewWatch,
        on_priorities: OnPriorities,
        relist_s: float,
    ) -> None:
        self._client = client
        self._pool = pool
        self._queries = objective_queries(namespace)
        self._new_watch = new_watch
        self._on_priorities = on_priorities
        self._relist_s = relist_s
        self._warned = ""
        self._followed: Query[InferenceObjective] | None = None
        self._watching: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Follow until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                rest_s = self._relist_s
                try:
                    self._follow(await self._find(), tasks)
                except ApiError as error:
                    if error.reason == FORBIDDEN:
                        self._warn(f"not read: {error}")
                    else:
                        log.debug("inferenceobjectives: %s", error)
                        rest_s = min(rest_s, RETRY_S)
                await asyncio.sleep(rest_s)

    def _follow(self, query: Query[InferenceObjective] | None, tasks: asyncio.TaskGroup) -> None:
        """Follow a query instead of the one before, if it is another; nothing for None."""
        if query == self._followed:
            return
        self._followed = query
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None
        if query is None:
            self._on_priorities({})
        else:
            self._watching = tasks.create_task(self._new_watch(query, self._on_objectives).run())

    async def _find(self) -> Query[InferenceObjective] | None:
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

    def _on_objectives(self, objectives: Collection[InferenceObjective]) -> None:
        self._on_priorities(priorities(objectives, self._pool))

    def _warn(self, what: str) -> None:
        """Log a warning, unless it is the same as the last one."""
        if what != self._warned:
            self._warned = what
            log.warning("InferencePool %s: InferenceObjectives: %s", self._pool, what)
