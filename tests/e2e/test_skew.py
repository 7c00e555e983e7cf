"""A router beside one of the release before, as in a roll: messages of peers, and stores."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.adapters.stores.media import KINDS, RedisServer
from tests.e2e.conftest import PATIENCE_S, own_pods, router_config
from tests.e2e.harness import RouterProcess
from tests.e2e.load import Load
from tests.e2e.previous import become_previous, previous_wheel, unpacked
from tests.e2e.test_routers import MODELS, fleet, open_requests
from tests.waiting import eventually

# A wheel is built first, with what its build needs from a package index.
pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

TOKEN = {"authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def previous(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages of the release before."""
    folder = tmp_path_factory.mktemp("previous")
    return unpacked(previous_wheel(folder), folder / "packages")


def runs_from(router: RouterProcess) -> str:
    """Where a router's program was imported from."""
    given = Path(f"/proc/{router.pid}/environ").read_bytes().split(b"\0")
    (found,) = [each.partition(b"=")[2] for each in given if each.startswith(b"PYTHONPATH=")]
    return found.decode()


async def test_routers_of_both_releases_serve_all_and_tell_each_other_how_picks_end(
    previous: Path, http: aiohttp.ClientSession
) -> None:
    """Their counts of each other's requests may differ: see docs/several-routers.md."""
    num_open = 12

    def prepare(routers: list[RouterProcess]) -> None:
        become_previous(routers[0], previous)

    async with fleet(http, before_start=prepare) as routers:
        old, _ = routers.routers

        async def have_all() -> bool:
            return sum(await routers.counters("picks_in_flight")) == num_open

        assert runs_from(old) == str(previous)
        async with open_requests(routers.client, num_open):
            await eventually(have_all)
            own = await routers.counters("picks_in_flight")
        async with Load(routers.client, MODELS).running() as load:
            await load.some(100)
        await eventually(routers.have_none_in_flight)
        picks = await routers.counters("picks_total")
        completions = await routers.counters("completions_total")
        relayed = await routers.counters("peer_entries_total")
        dropped = await routers.counters("peer_entries_dropped_total")

    assert all(own)
    assert load.outcomes == load.all_served
    assert completions == picks
    assert all(relayed)  # out of one, in at the other
    assert dropped == [0, 0]


async def test_no_request_fails_while_routers_are_rolled_to_this_release_and_back(
    previous: Path, http: aiohttp.ClientSession
) -> None:
    def prepare(routers: list[RouterProcess]) -> None:
        for each in routers:
            become_previous(each, previous)

    async with fleet(http, before_start=prepare) as routers:
        commands = [(each.command, each.env) for each in routers.routers]
        async with Load(routers.client, MODELS).running() as load:
            await load.some()
            for is_new in (True, False):
                for router, (command, env) in zip(routers.routers, commands, strict=True):
                    await router.stop()
                    router.command = [word for word in command if not (is_new and word == "-P")]
                    router.env = {} if is_new else env
                    await router.start(within_s=PATIENCE_S)
                    await eventually(routers.are_linked)
                    await eventually(routers.are_healthy)
                    await load.some()

    assert load.outcomes == load.all_served, routers.logs()


# --- stores ----------------------------------------------------------------------------------


@asynccontextmanager
async def store_of(kind: str, folder: Path) -> AsyncIterator[dict[str, Any]]:
    """The section of a store of a kind."""
    if kind != "redis":
        name = "file" if kind == "sqlite" else "path"
        yield {kind: {name: str(folder / "store"), "interval_s": 0.1}}
        return
    server = RedisServer(folder)
    server.start()
    try:
        yield {"redis": {"url": server.url, "interval_s": 0.1}}
    finally:
        server.kill()


async def declare(http: aiohttp.ClientSession, router: RouterProcess, name: str) -> None:
    body = {"name": name, "source": f"/adapters/{name}", "load": "lazy"}
    url = f"{router.admin_url}/v1/adapters"
    async with http.post(url, json=body, headers=TOKEN) as response:
        assert response.status == 201, await response.text()


async def know(routers: list[RouterProcess], *names: str) -> None:
    """Wait until all routers know these adapters alone."""

    async def do() -> bool:
        pages = [await each.admin("/debug/adapters") for each in routers]
        known = [{each["name"] for each in page["adapters"]} for page in pages]
        return known == [set(names)] * len(routers)

    await eventually(do)


@pytest.mark.parametrize("kind", KINDS)
async def test_both_releases_read_what_the_other_has_declared_and_deleted(
    kind: str, previous: Path, http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    (tmp_path / "tokens").write_text("secret\n")
    if kind == "directory":
        (tmp_path / "store").mkdir()
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(store_of(kind, tmp_path))
        pods = await stack.enter_async_context(own_pods())
        registration = {"token_file": str(tmp_path / "tokens"), "max_per_s": 100}
        config = router_config(pods, adapters={"store": store, "registration": registration})
        old, new = routers = [RouterProcess(config), RouterProcess(config)]
        become_previous(old, previous)
        for each in routers:
            stack.push_async_callback(each.close)
        await asyncio.gather(*(each.start(within_s=PATIENCE_S) for each in routers))
        assert runs_from(old) == str(previous)

        await declare(http, old, "by-old")
        await know(routers, "by-old")
        await declare(http, new, "by-new")
        await know(routers, "by-new", "by-old")
        for router, name in ((old, "by-new"), (new, "by-old")):
            url = f"{router.admin_url}/v1/adapters/{name}"
            async with http.delete(url, headers=TOKEN) as response:
                assert response.status in {200, 202, 204}, await response.text()
        await know(routers)
