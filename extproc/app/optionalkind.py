"""Objects of a kind that a cluster need not have a definition of. Part of `app`.

1. Several API groups may define the kind. Where more than one is served, the first alone counts.
2. Which are served is looked up every `relist_s`, as a definition may be installed or removed.
3. What was known last stands until the API server says otherwise: while it cannot be reached, and
   while a Role does not allow listing.
4. What may not be listed is unknown, unless the API server says that it has no such kind: it does
   not ask who may know that. Either way it is tried again within seconds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from random import Random
from typing import Generic, Protocol, TypeVar

import msgspec
from msgspec import Struct

from extproc.core.kubernetes.objects import KubeObject, Query
from extproc.core.kubernetes.store import ApiError
from extproc.shell.discovery.kubewatch import ListWatch

log = logging.getLogger(__name__)

RETRY_S = 5.0
"""After a look-up that failed, and up to a fifth less: routers do not ask all at once."""
NOT_SERVED, FORBIDDEN = "status_404", "status_403"

T = TypeVar("T", bound=KubeObject)

OnObjects = Callable[[Query[T] | None, Collection[T]], None]
NewWatch = Callable[[Query[T], Callable[[Collection[T]], None]], ListWatch[T]]


class _Resource(Struct):
    name: str = ""


class _Resources(Struct):
    resources: tuple[_Resource, ...] = ()


_resources = msgspec.json.Decoder(_Resources)


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
        relist_s: Between two look-ups that succeed.
        clock: Monotonic seconds.
        rng: For jitter.
        hint: What to do where a Role does not allow listing, for the log.

    Attributes:
        is_absent: It is not defined.
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
        clock: Callable[[], float],
        rng: Random,
        hint: str = "",
    ) -> None:
        self._client = client
        self._title = title
        self._queries = queries
        self._new_watch = new_watch
        self._on_objects = on_objects
        self._relist_s = relist_s
        self._clock = clock
        self._rng = rng
        self._hint = hint
        self._warned = ""
        self._problem, self._found_at_s = "", clock()
        self.is_absent = False
        self._followed: Query[T] | None = None
        self._watch: ListWatch[T] | None = None
        self._watching: asyncio.Task[None] | None = None

    @property
    def problem(self) -> str:
        """Why its objects cannot be read now; "" if they can, or if it is not defined."""
        return self._problem if self._watch is None else self._watch.problem

    @property
    def age_s(self) -> float:
        """Seconds since the API server last said something of it."""
        if self.is_absent and not self._problem:
            return 0.0  # asked again every `relist_s`
        at_s = self._found_at_s if self._watch is None else self._watch.contact_s
        return self._clock() - max(at_s, self._found_at_s)

    async def run(self) -> None:
        """Follow until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                rest_s = self._relist_s
                try:
                    query = await self._find()
                    self.is_absent = query is None
                    self._follow(query, tasks)
                    self._found()
                except ApiError as error:
                    if str(error) != self._problem:
                        self._log_failure(error)
                    self._problem = str(error)
                    rest_s = min(rest_s, RETRY_S * self._rng.uniform(0.8, 1))
                await asyncio.sleep(rest_s)

    def _log_failure(self, error: ApiError) -> None:
        if error.reason == FORBIDDEN:
            log.warning("%s: not read: %s%s", self._title, error, self._hint)
        else:
            log.debug("%s: not read: %s", self._title, error)

    def _found(self) -> None:
        if self._problem:
            log.info("%s: can be read again", self._title)
        self._problem, self._found_at_s = "", self._clock()

    def _follow(self, query: Query[T] | None, tasks: asyncio.TaskGroup) -> None:
        """Follow a query instead of the one before, if it is another; nothing for None."""
        if query == self._followed:
            return
        self._followed = query
        if self._watching is not None:
            self._watching.cancel()
            self._watching = self._watch = None
        if query is None:
            self._on_objects(None, ())
        else:
            watch = self._new_watch(query, lambda objects: self._on_objects(query, objects))
            self._watch, self._watching = watch, tasks.create_task(watch.run())

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
                    refused = error if await self._is_defined(query) else refused
                elif error.reason != NOT_SERVED:
                    raise
        if len(served) > 1:
            self._warn(f"of those in two API groups, those under {served[0].api} alone count")
        if refused is not None and not served:
            raise refused
        return served[0] if served else None

    async def _is_defined(self, query: Query[T]) -> bool:
        """Return whether the API server has the kind of a query that may not be listed.

        Raises:
            ApiError: It cannot be told.
        """
        try:
            found = _resources.decode(await self._client.get(query.api, {}))
        except msgspec.DecodeError:
            return True
        except ApiError as error:
            if error.reason == FORBIDDEN:
                return True
            if error.reason == NOT_SERVED:
                return False
            raise
        return any(each.name == query.resource for each in found.resources)

    def _warn(self, what: str) -> None:
        """Log a warning, unless it is the same as the last one."""
        if what != self._warned:
            self._warned = what
            log.warning("%s: %s", self._title, what)
