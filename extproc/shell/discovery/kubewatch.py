"""Keeps the objects of one query current: list, watch, and again.

1. After the first list, a watch continues from the last resource version, with bookmarks. A new
   list follows when the server demands it (410, as status or as event), after repeated failures,
   and every `relist_s`: a list repairs a lost event.
2. Every watch has an end that we set, by `timeoutSeconds` and by a deadline of our own a little
   later: a silently dead connection is noticed by then.
3. After a failure there is a rest that doubles with each one, with jitter, and is at least as long
   as the server asks for. It is short again once a watch has delivered something, or has held for a
   while.
4. Where a page is longer than the client reads, pages of fewer objects are asked for: whoever may
   create large objects must not keep the others from being read.
5. Only a response of the server changes the state: while it is unreachable, the last state stands.
   No failure ends the loop.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from contextlib import aclosing
from dataclasses import KW_ONLY, dataclass, field
from random import Random
from typing import Generic, Protocol, TypeVar

from extproc.core.kubernetes.objects import KubeObject, Query
from extproc.core.kubernetes.store import ApiError, Store
from extproc.shell.loops import choose_backoff_s

log = logging.getLogger(__name__)

T = TypeVar("T", bound=KubeObject)

PAGE_SIZE = 250
"""Objects per response. So many Pods take 5 ms to decode, during which nothing else runs."""
MIN_REST_S = 0.1
MAX_REST_S = 5.0
MAX_RETRY_AFTER_S = 60.0
HEALTHY_S = 1.0
"""A watch that held for so long was a success, even without events."""
GRACE_S = 5.0
"""Time beyond `timeoutSeconds` for the server to end the watch itself."""
MAX_RESUMES = 3
"""Failures in a row after which a new list replaces the watch."""
MIN_WARNED = 2
"""Failures in a row that are logged as a warning."""


class Client(Protocol):
    """The API client; see `KubernetesClient`."""

    async def namespace(self) -> str:
        """Return our own namespace."""

    async def get(self, path: str, parameters: Mapping[str, str]) -> bytes:
        """Return a body."""

    def watch(
        self, path: str, parameters: Mapping[str, str], *, within_s: float
    ) -> AsyncGenerator[list[bytes], None]:
        """Yield lines, some at a time; an empty list at the start of the response."""


@dataclass(slots=True)
class WatchStats:
    """Counts of all watches together.

    Attributes:
        lists: Complete lists, by resource.
        failures: Failed lists and watches, by reason.
        contacts_s: Time of each running watch's last contact with the API server, or of its start,
            in the clock's seconds.
    """

    lists: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    contacts_s: dict[object, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WatchTimes:
    """Seconds.

    Attributes:
        watch_s: Longest watch.
        relist_s: Longest time between two lists, up to the end of the watch then open.
    """

    watch_s: float = 60.0
    relist_s: float = 600.0


@dataclass(eq=False)
class ListWatch(Generic[T]):
    """One query, followed while `run` runs.

    Attributes:
        on_change: Called with all objects after a list, and once per batch of changes.
        clock: Monotonic seconds.
        problem: Why the last request failed; "" once the server has answered again.
    """

    client: Client
    query: Query[T]
    _: KW_ONLY
    on_change: Callable[[Collection[T]], None]
    stats: WatchStats
    clock: Callable[[], float]
    rng: Random
    times: WatchTimes | None = None
    problem: str = ""
    _must_list: bool = True
    _listed_at_s: float = 0.0
    _num_failures: int = 0
    _page_size: int = PAGE_SIZE

    def __post_init__(self) -> None:
        self._times = self.times or WatchTimes()
        self._store = Store(self.query)
        self._healthy_at_s = math.inf

    @property
    def contact_s(self) -> float:
        """When the server last sent something; not before `run`."""
        return self.stats.contacts_s.get(self, -math.inf)

    async def run(self) -> None:
        """Follow until cancelled."""
        self.stats.contacts_s[self] = self.clock()
        try:
            while True:
                rest_s = await self._follow()
                await asyncio.sleep(rest_s)
        finally:
            del self.stats.contacts_s[self]

    async def _follow(self) -> float:
        """List if needed, then watch to the end; return the seconds to rest."""
        self._healthy_at_s = math.inf
        try:
            path = self.query.path(await self.client.namespace())
            if self._must_list:
                await self._list(path)
            await self._watch(path)
        except ApiError as error:
            return self._failed(error)
        except Exception as error:
            log.exception("%s: broke", self.query.resource)
            return self._failed(ApiError("internal", repr(error)))
        if self.clock() < self._healthy_at_s:
            return self._failed(ApiError("short", "the watch ended early"))
        self._recovered()
        return 0.0

    async def _list(self, path: str) -> None:
        parameters = {**self.query.selector, "limit": str(self._page_size)}
        is_first = True
        while is_first or parameters["continue"]:
            body = await self.client.get(path, parameters)
            parameters["continue"] = self._store.read_page(body, is_first=is_first)
            is_first = False
            self._note_contact()
        self._must_list = False
        self._listed_at_s = self.clock()
        self.stats.lists[self.query.resource] += 1
        self.on_change(self._store.objects)

    async def _watch(self, path: str) -> None:
        watch_s = max(1, round(self._times.watch_s * self.rng.uniform(0.8, 1)))
        parameters = {
            **self.query.selector,
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._store.resource_version,
            "timeoutSeconds": str(watch_s),
        }
        lines = self.client.watch(path, parameters, within_s=watch_s + GRACE_S)
        async with aclosing(lines):
            async for some in lines:
                self._note_contact()
                if not some:
                    self._healthy_at_s = self.clock() + min(HEALTHY_S, watch_s / 2)
                self._read(some)
        if self.clock() - self._listed_at_s > self._times.relist_s:
            self._must_list = True

    def _read(self, lines: list[bytes]) -> None:
        is_changed = False
        try:
            for line in lines:
                is_changed |= self._store.read_event(line)
                self._recovered()
        finally:
            self._store.bound()
            if is_changed:
                self.on_change(self._store.objects)

    def _note_contact(self) -> None:
        self.problem = ""
        self.stats.contacts_s[self] = self.clock()

    def _recovered(self) -> None:
        if self._num_failures >= MIN_WARNED:
            log.info("%s: the Kubernetes API responds again", self.query.resource)
        self._num_failures = 0

    def _failed(self, error: ApiError) -> float:
        if self.clock() >= self._healthy_at_s:
            self._num_failures = 0
        self._num_failures += 1
        self.problem = str(error)
        self.stats.failures[error.reason] += 1
        if error.reason == "too_long":
            self._page_size = max(1, self._page_size // 8)
        if error.is_gone or self._num_failures >= MAX_RESUMES:
            self._must_list = True
        # A single failure is normal. A second in a row is logged, once.
        level = logging.WARNING if self._num_failures == MIN_WARNED else logging.DEBUG
        log.log(level, "%s: the Kubernetes API: %s", self.query.resource, error)
        rest_s = choose_backoff_s(
            self._num_failures - 1, interval_s=MIN_REST_S, max_backoff_s=MAX_REST_S, rng=self.rng
        )
        return max(rest_s, min(error.retry_after_s, MAX_RETRY_AFTER_S))
