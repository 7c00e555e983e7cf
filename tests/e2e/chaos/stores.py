"""Where `tests.e2e.chaos.run` declares adapters, and what can go wrong there."""

from __future__ import annotations

import asyncio
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from itertools import cycle
from pathlib import Path
from typing import Any

import aiohttp

from tests.adapters.stores.media import RedisServer

_HEADERS = {"authorization": "Bearer chaos"}
_ATTEMPT_S, _PAUSE_S = 3.0, 0.2
MIN_REPLICAS: Mapping[str, int] = {"a0": 2, "a1": 2}
"""Of adapters that more than one pod is to have."""

Attempt = Callable[[str, bool], Awaitable[bool]]
Opened = tuple[dict[str, Any], Callable[[float], Awaitable[None]]]
"""A section of the configuration, and what breaks the store for a while."""


def served_name(name: str, version: int) -> str:
    """Return what pods call a version; the first has none."""
    return f"{name}@{version}" if version else name


def source_of(name: str, version: int) -> str:
    """Return where its files are."""
    return f"/{name}/{version}"


def as_declared(name: str, version: int) -> dict[str, Any]:
    """Return a declaration."""
    return {
        "name": name,
        "source": source_of(name, version),
        "version": str(version) if version else "",
        "replicas": {"min": MIN_REPLICAS.get(name, 1)},
    }


class Keeper(ABC):
    """Where adapters are declared.

    Attributes:
        name: For messages.
        kinds: Of its own faults.
        forgets: What is deleted is known to those alone that ran before.
        doubtful: Names of which a request may still arrive that nobody waits for any more.
        lost: Changes that were confirmed and are not there.
    """

    name = "store"
    kinds: tuple[str, ...] = ("break",)
    forgets = True

    def __init__(self) -> None:
        self.doubtful: set[str] = set()
        self.lost: list[str] = []

    @abstractmethod
    async def sections(self, pods: Sequence[str]) -> dict[str, Any]:
        """Return sections of the routers' configuration, for pods at addresses."""

    @abstractmethod
    async def put(self, name: str, version: int, routers: Sequence[str]) -> None:
        """Declare a version, at routers in this order; return once that is confirmed."""

    @abstractmethod
    async def delete(self, name: str, routers: Sequence[str]) -> None:
        """Delete an adapter, at routers in this order; return once that is confirmed."""

    @abstractmethod
    async def declared(self, router: str) -> dict[str, str]:
        """Return the version of each adapter that a router says is declared."""

    async def unready(self) -> list[str]:
        """Return what the store itself says of adapters that are not ready."""
        return []

    @abstractmethod
    async def suffer(self, kind: str, for_s: float) -> None:
        """Let something go wrong, to its end."""


class OverHttp(Keeper):
    """A store, written to by the routers' admin ports."""

    def __init__(
        self,
        store: Mapping[str, Any],
        folder: Path,
        http: aiohttp.ClientSession,
        *,
        lease_s: float,
        broken: Callable[[float], Awaitable[None]],
    ) -> None:
        super().__init__()
        self.forgets = "directory" in store
        self._lease_s = lease_s
        self._store, self._folder, self._http, self._broken = store, folder, http, broken
        self._tags: dict[str, str] = {}

    async def sections(self, pods: Sequence[str]) -> dict[str, Any]:
        """See `Keeper`."""
        tokens = self._folder / "tokens"
        tokens.write_text("chaos\n")
        adapters = {
            "store": self._store,
            "lease_s": self._lease_s,
            "registration": {"token_file": str(tokens), "max_per_s": 1000},
        }
        return {"discovery": {"static": list(pods)}, "adapters": adapters}

    async def put(self, name: str, version: int, routers: Sequence[str]) -> None:
        """See `Keeper`."""
        body = as_declared(name, version)

        async def attempt(url: str, in_doubt: bool) -> bool:
            match = {"if-match": self._tags[name]} if name in self._tags else {}
            headers = {**_HEADERS, **match}
            async with self._http.post(url, json=body, headers=headers) as response:
                status, tag = response.status, response.headers.get("etag", "")
            if status in (409, 412):
                there = await self._entry(url, name)
                is_it = not there.get("deleted") and there.get("source") == body["source"]
                if not is_it and not in_doubt:
                    self.lost.append(f"{name}: {version} is refused by {status}: {there}")
                    return True
                status, tag = (200 if is_it else 0), f'"{there.get("tag", "")}"'
            if status not in (200, 201):
                return False
            self._tags[name] = tag
            return True

        await self._until_confirmed(attempt, name, routers)

    async def delete(self, name: str, routers: Sequence[str]) -> None:
        """See `Keeper`."""

        async def attempt(url: str, in_doubt: bool) -> bool:
            headers = {**_HEADERS, "if-match": self._tags[name]}
            async with self._http.delete(f"{url}/{name}", headers=headers) as response:
                status = response.status
            if status not in (404, 412):
                return status == 204
            if in_doubt:
                return bool((await self._entry(url, name)).get("deleted", True))
            self.lost.append(f"{name}: its deletion is refused by {status}")
            return True

        await self._until_confirmed(attempt, name, routers)
        del self._tags[name]

    async def declared(self, router: str) -> dict[str, str]:
        """See `Keeper`."""
        async with self._http.get(f"{router}/v1/adapters", headers=_HEADERS) as response:
            found = (await response.json())["data"]
        return {each["name"]: each["version"] for each in found if not each["deleted"]}

    async def suffer(self, kind: str, for_s: float) -> None:
        """See `Keeper`."""
        await self._broken(for_s)

    async def _entry(self, url: str, name: str) -> dict[str, Any]:
        async with self._http.get(f"{url}/{name}", headers=_HEADERS) as response:
            found: dict[str, Any] = await response.json()
        return found if response.status == 200 else {}

    async def _until_confirmed(self, attempt: Attempt, name: str, routers: Sequence[str]) -> None:
        """Ask the routers in turn. A request without an answer may arrive whenever it likes."""
        in_doubt = False
        for router in cycle(routers):
            try:
                async with asyncio.timeout(_ATTEMPT_S):
                    if await attempt(f"{router}/v1/adapters", in_doubt):
                        return
            except aiohttp.ClientConnectorError:
                pass
            except (aiohttp.ClientError, OSError, TimeoutError):
                in_doubt = True
                self.doubtful.add(name)
            await asyncio.sleep(_PAUSE_S)


@asynccontextmanager
async def over_http(kind: str, folder: Path, lease_s: float) -> AsyncIterator[OverHttp]:
    """A store of this kind."""
    stores = {"redis": _redis, "sqlite": _sqlite, "directory": _directory}
    timeout = aiohttp.ClientTimeout(total=_ATTEMPT_S)
    async with aiohttp.ClientSession(timeout=timeout) as http, stores[kind](folder) as opened:
        store, broken = opened
        yield OverHttp({kind: store}, folder, http, lease_s=lease_s, broken=broken)


@asynccontextmanager
async def _redis(folder: Path) -> AsyncIterator[Opened]:
    """One that keeps its data on the disk, and is killed and started again."""
    server = RedisServer(folder)

    async def restarted(for_s: float) -> None:
        server.kill()
        await asyncio.sleep(for_s)
        await asyncio.to_thread(server.start)

    try:
        await asyncio.to_thread(server.start)
        yield {"url": server.url}, restarted
    finally:
        server.kill()


@asynccontextmanager
async def _sqlite(folder: Path) -> AsyncIterator[Opened]:
    """One whose writers wait for another one, which waits for them, also for one that is frozen."""
    path = folder / "store"

    async def held(for_s: float) -> None:
        link = sqlite3.connect(path, timeout=60, isolation_level=None, check_same_thread=False)
        with closing(link):
            await asyncio.to_thread(link.execute, "BEGIN IMMEDIATE")
            await asyncio.sleep(for_s)

    yield {"file": str(path)}, held


@asynccontextmanager
async def _directory(folder: Path) -> AsyncIterator[Opened]:
    """One whose mount is lost for a while."""
    path, away = folder / "store", folder / "away"
    path.mkdir()

    async def lost(for_s: float) -> None:
        path.rename(away)
        await asyncio.sleep(for_s)
        away.rename(path)

    yield {"path": str(path)}, lost
