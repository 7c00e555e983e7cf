"""A store that cannot be read, behind a real Envoy: unknown is not absent, nor absent public.

What was deleted must not come back, and everybody else is served.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from extproc.adapters.declared import Declaration
from extproc.adapters.stores.store import Store as Declarations
from extproc.adapters.stores.writing import ANY_TAG
from extproc.config.adapters import StoreConfig
from extproc.envoy.bootstrap import Mode
from extproc.lab.fakepod.podserver import PodConfig
from extproc.service.stores import make_medium
from tests.adapters.stores.cutter import Cut, Cutter
from tests.adapters.stores.media import KEY, RedisServer
from tests.e2e.conftest import router_config, running_envoy
from tests.e2e.harness import Client, RouterProcess
from tests.fakepods import running_pods
from tests.waiting import eventually

ADAPTERS = ("gone", "own", "configured", "stored")
"""What pods list: `gone` is deleted in the store and `stored` declared there; `configured` is
declared by the configuration, and `own` by nobody."""


def opened(section: dict[str, Any]) -> Declarations:
    return Declarations(make_medium(StoreConfig.model_validate(section), clock=time.monotonic))


@dataclass
class Store:
    """A store that can be made unreadable.

    Attributes:
        section: Of `adapters.store`.
        good: The same, past whatever breaks it.
        break_it: Makes it unreadable, or readable again.
    """

    section: dict[str, Any]
    good: dict[str, Any]
    break_it: Callable[[bool], Awaitable[None]]

    async def fill(self) -> None:
        store = opened(self.good)
        for name in ("gone", "stored"):
            await store.put(Declaration(name, f"/adapters/{name}", origin="store"))
        await store.delete("gone")
        await store.aclose()
        if "directory" in self.good:  # keeps no deleted ones but those that somebody writes down
            path = Path(self.good["directory"]["path"]) / "gone.json"
            path.write_text('{"name": "gone", "source": "/adapters/gone", "deleted": true}')


@asynccontextmanager
async def missing_directory(folder: Path) -> AsyncIterator[Store]:
    path, away = folder / "store", folder / "away"
    path.mkdir()
    section = {"directory": {"path": str(path), "interval_s": 0.1}}

    async def break_it(is_broken: bool) -> None:
        (path if is_broken else away).rename(away if is_broken else path)

    yield Store(section, section, break_it)


@asynccontextmanager
async def half_written_file(folder: Path) -> AsyncIterator[Store]:
    """The file that says that `gone` was deleted, and later the one about `stored`."""
    section = {"directory": {"path": str(folder), "interval_s": 0.1}}
    contents: dict[Path, bytes] = {}

    async def break_it(is_broken: bool) -> None:
        for path in folder.glob("*.json"):
            contents.setdefault(path, path.read_bytes())
            whole = contents[path]
            path.write_bytes(whole[: len(whole) // 2] if is_broken else whole)

    yield Store(section, section, break_it)


@asynccontextmanager
async def corrupt_database(folder: Path) -> AsyncIterator[Store]:
    path, away = folder / "adapters.db", folder / "away.db"
    section = {"sqlite": {"file": str(path), "interval_s": 0.1}}

    async def break_it(is_broken: bool) -> None:
        if is_broken:
            path.rename(away)
            path.write_bytes(b"no database at all, and longer than a header of one " * 100)
        else:
            away.replace(path)

    yield Store(section, section, break_it)


@asynccontextmanager
async def killed_redis(folder: Path) -> AsyncIterator[Store]:
    server = _server(folder)
    section = _redis(server.port)

    async def break_it(is_broken: bool) -> None:
        await asyncio.to_thread(server.kill if is_broken else server.start)

    try:
        yield Store(section, section, break_it)
    finally:
        server.kill()


@asynccontextmanager
async def redis_with_another_password(folder: Path) -> AsyncIterator[Store]:
    server = _server(folder)
    section = _redis(server.port)

    async def break_it(is_broken: bool) -> None:
        await asyncio.to_thread(server.kill)
        options = ("--requirepass", "changed") if is_broken else ()
        await asyncio.to_thread(server.start, *options)

    try:
        yield Store(section, section, break_it)
    finally:
        server.kill()


@asynccontextmanager
async def redis_that_breaks_off(folder: Path) -> AsyncIterator[Store]:
    """All answers end within the value about `stored`, and connections within any answer."""
    server, ranks = _server(folder), iter((8, 4))
    try:
        async with Cutter(server.port, b'"name":"stored"') as cutter:

            async def break_it(is_broken: bool) -> None:
                cutter.cut = Cut.CLOSED if is_broken else Cut.NOT
                if is_broken:  # only what has changed is read again
                    store = opened(good)
                    edited = Declaration("stored", "/adapters/stored", rank=next(ranks))
                    await store.put(edited, if_match=ANY_TAG)
                    await store.aclose()

            good = _redis(server.port)
            yield Store(_redis(cutter.port), good, break_it)
    finally:
        server.kill()


def _server(folder: Path) -> RedisServer:
    pytest.importorskip("redis")
    (folder / "redis").mkdir()
    server = RedisServer(folder / "redis")
    server.start()
    return server


def _redis(port: int) -> dict[str, Any]:
    return {"redis": {"url": f"redis://127.0.0.1:{port}/0", "key": KEY, "interval_s": 0.1}}


async def statuses(client: Client) -> dict[str, int]:
    return {name: (await client.chat(name)).status for name in ("base", *ADAPTERS)}


async def listed(client: Client) -> set[str]:
    answer = await client.request("GET", "/v1/models")
    return {model["id"] for model in answer.json["data"]}


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "kind",
    [
        missing_directory,
        half_written_file,
        corrupt_database,
        killed_redis,
        redis_with_another_password,
        redis_that_breaks_off,
    ],
)
async def test_what_only_a_store_that_cannot_be_read_could_permit_is_refused_and_all_else_served(
    http: aiohttp.ClientSession, tmp_path: Path, kind: Any
) -> None:
    """At a start; and once it has been read, it stays as it was, whatever becomes of the store."""
    config = PodConfig(name="pod-0", adapters=list(ADAPTERS))
    async with kind(tmp_path) as store, running_pods(config) as pods:
        await store.fill()
        adapters = {"undeclared": "admit", "ready_wait_s": 0, "store": store.section}
        route = {"name": "c", "models": ["configured"], "adapter": {}}
        router = RouterProcess(router_config(pods, adapters=adapters, routes=[route]))
        await store.break_it(True)
        async with router, running_envoy(Mode.ORIGINAL_DST, router, num_pods=1) as envoy:
            client = Client(envoy.url, http)
            refused = dict.fromkeys(("gone", "own", "stored"), 503)
            assert await statuses(client) == {"base": 200, "configured": 200, **refused}
            assert (await client.chat("gone")).json["error"]["code"] == "adapters_unknown"
            assert await listed(client) == {"base", "configured"}
            assert await router.counter("extproc_declarations_known") == 0

            await store.break_it(False)

            async def knows() -> bool:
                return await router.counter("extproc_declarations_known") == 1

            await eventually(knows)
            known = {"base": 200, "configured": 200, "own": 200, "stored": 200, "gone": 404}
            assert await statuses(client) == known

            await store.break_it(True)

            async def is_behind() -> bool:
                return bool((await router.admin("/healthz"))["warnings"])

            await eventually(is_behind)
            assert await statuses(client) == known
            assert (await router.admin("/healthz"))["reasons"] == []
