"""The one reader of a cluster's objects: list, watch, and again, for whatever kind a query names.

1. After the first list, a watch continues from the last resource version, with bookmarks. A new
   list follows when the server demands it (410, as status or as event), after repeated failures,
   and within `relist_s`. A list repairs a lost event.
2. Every watch has an end that we set, by `timeoutSeconds` and by a deadline of our own a little
   later. A connection that broke without notice is noticed by then.
3. After a failure there is a rest that doubles with each one, with jitter, and is at least as long
   as the server asks for. It is short again once a watch has delivered something, or has held for a
   while.
4. Where a page is longer than the client reads, pages of fewer objects are asked for: large objects
   must not keep the rest from being read.
5. Only a response of the server changes the state: while it is unreachable, the last state stands.
   No failure ends the loop.
6. A cluster need not have a definition of an optional kind, and several API groups may define it.
   The served ones are looked up before each list (`served`), and only the first counts. Of a kind
   that none serves there are no objects, which is looked up again `relist_s` later.
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

from extproc.discovery.kubernetes.objects import KubeObject, Query
from extproc.discovery.kubernetes.objectstore import ApiError, ObjectStore
from extproc.discovery.kubernetes.served import FORBIDDEN, ServedClient, find_served
from extproc.reports.loops import choose_backoff_s

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


class WatchClient(ServedClient, Protocol):
    """The API client; see `KubernetesClient`."""

    async def namespace(self) -> str:
        """Return our own namespace."""

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
        contacts_s: Time of the last contact with the API server, or of the start, of each running
            watch of what every cluster defines, in the clock's seconds.
        troubles: Of those watches that have failed again and again, until the server answers:
            which, and why, for people.
    """

    lists: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    contacts_s: dict[object, float] = field(default_factory=dict)
    troubles: dict[object, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WatchTimes:
    """Seconds.

    Attributes:
        watch_s: Longest watch.
        relist_s: Longest time between two lists, and between two looks at what is defined.
    """

    watch_s: float = 60.0
    relist_s: float = 600.0


@dataclass(eq=False)
class ListWatch(Generic[T]):
    """One query, followed while `run` runs.

    Attributes:
        on_change: Called with all objects after a list, and once per batch of changes; with none
            when the kind is not defined any more.
        clock: Monotonic seconds.
        hint: Advice for the log, where a Role does not allow listing.
        problem: Why the last request failed; "" once the server has answered again.
        api: The API that is followed; "" for none.
        is_absent: None defines the kind.
    """

    client: WatchClient
    query: Query[T]
    _: KW_ONLY
    on_change: Callable[[Collection[T]], None]
    stats: WatchStats
    clock: Callable[[], float]
    rng: Random
    times: WatchTimes = field(default_factory=WatchTimes)
    hint: str = ""
    problem: str = ""
    api: str = ""
    is_absent: bool = False
    _must_list: bool = True
    _listed_at_s: float = 0.0
    _num_failures: int = 0
    _warned_of: str = ""
    _warned_of_apis: tuple[str, ...] = ()
    _page_size: int = PAGE_SIZE

    def __post_init__(self) -> None:
        self._store = ObjectStore(self.query)
        self._healthy_at_s = math.inf
        self._contact_at_s = self.clock()

    @property
    def age_s(self) -> float:
        """Seconds since the server last said something of it; 0 of what it does not define."""
        is_known = self.is_absent and not self.problem
        return 0.0 if is_known else self.clock() - self._contact_at_s

    async def run(self) -> None:
        """Follow until cancelled."""
        self._note_contact()
        try:
            while True:
                rest_s = await self._follow()
                await asyncio.sleep(rest_s)
        finally:
            self.stats.contacts_s.pop(self, None)
            self.stats.troubles.pop(self, None)

    async def _follow(self) -> float:
        """List if needed, then watch to the end; return the seconds to rest."""
        self._healthy_at_s = math.inf
        try:
            namespace = await self.client.namespace()
            if self._must_list:
                await self._choose(namespace)
                if self.is_absent:
                    self._recovered()
                    return self.times.relist_s
                await self._list(self.query.path(self.api, namespace))
            await self._watch(self.query.path(self.api, namespace))
        except ApiError as error:
            return self._failed(error)
        except Exception as error:
            log.exception("%s: broke", self.query.title)
            return self._failed(ApiError("internal", repr(error)))
        if self.clock() < self._healthy_at_s:
            return self._failed(ApiError("short", "the watch ended early"))
        self._recovered()
        return 0.0

    async def _choose(self, namespace: str) -> None:
        """Choose the API to follow, and note whether there is one.

        Raises:
            ApiError: It is unknown, and none is followed that may be listed all the same.
        """
        if not self.query.is_optional:
            self.api = self.query.apis[0]
            return
        try:
            api = await self._find(namespace)
        except ApiError:
            if self.api:
                return
            raise
        self._note_contact()
        before, self.api, self.is_absent = self.api, api, not api
        if api != before:
            self._store = ObjectStore(self.query)
            if not api:
                self.on_change(())

    async def _find(self, namespace: str) -> str:
        """Return the API to follow, "" where the kind is not defined.

        Raises:
            ApiError: It is unknown.
        """
        served = await find_served(self.client, self.query, namespace)
        if len(served) > 1 and tuple(served) != self._warned_of_apis:
            self._warned_of_apis = tuple(served)
            what = "of those in two API groups, those under"
            log.warning("%s: %s %s alone count", self.query.title, what, served[0])
        return served[0] if served else ""

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
        left_s = self._listed_at_s + self.times.relist_s - self.clock()
        longest_s = min(self.times.watch_s, left_s)
        watch_s = max(1, round(longest_s * self.rng.uniform(0.8, 1)))
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
        self._must_list = left_s <= self.times.watch_s

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
        self.stats.troubles.pop(self, None)
        self._contact_at_s = self.clock()
        if not self.query.is_optional:
            self.stats.contacts_s[self] = self._contact_at_s

    def _recovered(self) -> None:
        if self._warned_of:
            log.info("%s: can be read again", self.query.title)
        self._num_failures, self._warned_of = 0, ""

    def _failed(self, error: ApiError) -> float:
        if self.clock() >= self._healthy_at_s:
            self._recovered()
        self._num_failures += 1
        self.problem = str(error)
        self.stats.failures[error.reason] += 1
        if error.reason == "too_long":
            self._page_size = max(1, self._page_size // 8)
        if error.is_gone or self._num_failures >= MAX_RESUMES:
            self._must_list = True
        self._log(error)
        rest_s = choose_backoff_s(
            self._num_failures - 1, interval_s=MIN_REST_S, max_backoff_s=MAX_REST_S, rng=self.rng
        )
        return max(rest_s, min(error.retry_after_s, MAX_RETRY_AFTER_S))

    def _log(self, error: ApiError) -> None:
        """Log a failure, each trouble once: a single one is normal, but for what a Role lacks."""
        is_refused = self.query.is_optional and error.reason == FORBIDDEN
        is_first = self._warned_of != FORBIDDEN if is_refused else not self._warned_of
        is_warned = is_first and (is_refused or self._num_failures >= MIN_WARNED)
        if is_warned:
            self._warned_of = error.reason
        hint = self.hint if is_refused else ""
        level = logging.WARNING if is_warned else logging.DEBUG
        log.log(level, "%s: not read: %s%s", self.query.title, error, hint)
        if self._warned_of and not self.query.is_optional:
            self.stats.troubles[self] = f"{self.query.title}: not read: {error}"
