"""Findings about a cluster's objects, written to their status.

1. A status is written when its text changes, and after a list that shows another. A write by
   someone else is no reason: two routers that disagree write once each. A part that was left to
   other routers for a while is written in any case: their text is not known.
2. One write at a time, by server-side apply: other writers' parts of an object stay.
3. A part that is for nobody else to say (`ManagedFields.is_last`) replaces nothing that was
   written since.
4. A Role that does not grant it costs one warning, and the next attempt is `relist_s` later.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Protocol

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from extproc.discovery.kubernetes.declarers import origin_of
from extproc.discovery.kubernetes.objects import DeclaringObject, Query
from extproc.discovery.kubernetes.objectstatus import ManagedFields, patch
from extproc.discovery.kubernetes.objectstore import ApiError
from extproc.wire.yielding import yield_to_requests

log = logging.getLogger(__name__)

MIN_REST_S, MAX_REST_S = 1.0, 60.0
"""After a write that failed."""
NUM_AT_ONCE = 100
"""Objects that are looked at before other work has its turn; so many take 2 ms."""
_UNKNOWN = Raw(b"null")
_PERMANENT = ("status_400", "status_404", "status_409", "status_422")
"""The object, or the status' schema, is another by now: nothing to try again."""


class StatusClient(Protocol):
    """The part of `KubernetesClient` that is used here."""

    async def namespace(self) -> str:
        """Return our own namespace."""

    async def apply(self, path: str, manager: str, body: Mapping[str, Any]) -> bytes:
        """Apply a part of an object; return the object."""


class Statuses:
    """The status of the objects of one kind, written while `run` runs.

    Args:
        wall_clock: Wall seconds.
        relist_s: Until the next attempt where a Role does not allow it.
        patience_s: Before each round of writes: others may have more to say.
    """

    def __init__(
        self,
        client: StatusClient,
        query: Query[Any],
        *,
        wall_clock: Callable[[], float],
        relist_s: float,
        patience_s: float = 0.0,
    ) -> None:
        self._client = client
        self._query = query
        self._wall_clock = wall_clock
        self._relist_s = relist_s
        self._patience_s = patience_s
        self._api = ""
        self._objects: dict[str, DeclaringObject] = {}
        self._wanted: Mapping[str, Collection[ManagedFields]] = {}
        self._settled: dict[tuple[str, str], ManagedFields] = {}
        self._left: set[tuple[str, str]] = set()  # to others
        self._woken = asyncio.Event()
        self._warned = False

    def know(self, api: str, objects: Collection[DeclaringObject]) -> None:
        """Take note of an API's objects as they are, after a list or a change; "" for no API."""
        before = self._objects if api == self._api else {}
        self._api, self._objects = api, {origin_of(each): each for each in objects}
        self._settled = {
            key: part
            for key, part in self._settled.items()
            if key[0] in before and self._objects.get(key[0]) is before[key[0]]
        }
        self._woken.set()

    def want(self, parts: Mapping[str, Collection[ManagedFields]]) -> None:
        """Have this written about the objects, by their origin; about other objects nothing is
        written.
        """
        keys = _keys(parts)
        left = self._left | (_keys(self._wanted) - keys)
        self._left = {key for key in left if key[0] in parts}
        self._settled = {key: part for key, part in self._settled.items() if key in keys}
        self._wanted = parts
        self._woken.set()

    async def run(self) -> None:
        """Write until cancelled."""
        rest_s = MIN_REST_S
        while True:
            await self._woken.wait()
            await asyncio.sleep(self._patience_s)
            self._woken.clear()
            try:
                await self._write_all()
                rest_s = MIN_REST_S
            except ApiError as error:
                is_refused = error.reason == "status_403"
                if is_refused and not self._warned:
                    self._warned = True
                    log.warning("status not written: %s", error)
                log.debug("status not written: %s", error)
                await asyncio.sleep(self._relist_s if is_refused else rest_s)
                rest_s = min(2 * rest_s, MAX_REST_S)
                self._woken.set()

    async def _write_all(self) -> None:
        for number, (origin, parts) in enumerate(self._wanted.items()):
            for part in parts:
                if self._settled.get((origin, part.manager)) != part:
                    await self._write(origin, part)
            if number % NUM_AT_ONCE == 0:
                await yield_to_requests()

    async def _write(self, origin: str, part: ManagedFields) -> None:
        source = self._objects.get(origin)
        if source is None:
            return
        key = origin, part.manager
        known = replace(source, status=_UNKNOWN) if key in self._left else source
        wall_time = datetime.fromtimestamp(self._wall_clock(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        status = patch(known, part, wall_time=wall_time)
        if status is not None:
            try:
                await self._apply(source, part, status)
            except ApiError as error:
                if error.reason not in _PERMANENT:
                    raise
                log.debug("%s: status not written: %s", origin, error)
        self._settled[key] = part
        self._left.discard(key)

    async def _apply(
        self, source: DeclaringObject, part: ManagedFields, status: Mapping[str, Any]
    ) -> None:
        api, query, metadata, origin = self._api, self._query, source.metadata, origin_of(source)
        version = {"resourceVersion": metadata.resource_version} if part.is_last else {}
        path = f"{query.path(api, await self._client.namespace())}/{metadata.name}/status"
        body = {
            "apiVersion": api.removeprefix("/apis/"),
            "kind": query.kind.__name__,
            "metadata": {"name": metadata.name, "uid": metadata.uid} | version,
            "status": status,
        }
        written = await self._client.apply(path, part.manager, body)
        if self._objects.get(origin) is source:
            with suppress(ValueError):
                kept = query.kept(msgspec.json.decode(written, type=query.kind))
                self._objects[origin] = source if kept is None else kept


def _keys(parts: Mapping[str, Collection[ManagedFields]]) -> set[tuple[str, str]]:
    return {(origin, part.manager) for origin, said in parts.items() for part in said}
