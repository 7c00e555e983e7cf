"""Two routers with one store of adapters that tell each other what they want: one of them loads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp

from extproc.envoy.bootstrap import Mode
from extproc.lab.fakepod.podserver import PodConfig, RunningPod
from tests.e2e.conftest import PATIENCE_S, router_config, running_envoy
from tests.e2e.harness import Client, RouterProcess, free_port
from tests.fakepods import running_pods
from tests.waiting import eventually

PATHS = {f"/adapters/{name}": 8 for name in ("a", "b", "c")}
TOKEN = {"authorization": "Bearer secret"}


class Scene:
    """Two routers, an Envoy for each, and pods."""

    def __init__(
        self, routers: list[RouterProcess], clients: list[Client], http: aiohttp.ClientSession
    ) -> None:
        self.routers, self.clients, self._http = routers, clients, http

    async def num_calls(self) -> list[float]:
        """Calls to pods that each router has made."""
        return [await each.counter("extproc_adapter_calls_total") for each in self.routers]

    async def are_linked(self) -> bool:
        counts = [await each.counter("extproc_peers_connected") for each in self.routers]
        return counts == [1, 1]

    async def declare(self, *names: str) -> None:
        """Declare adapters that are loaded on request, and wait until both routers know them."""
        url = f"{self.routers[0].admin_url}/v1/adapters"
        for name in names:
            body = {"name": name, "source": f"/adapters/{name}", "load": "lazy"}
            async with self._http.post(url, json=body, headers=TOKEN) as response:
                assert response.status == 201

        async def are_known() -> bool:
            pages = [await each.admin("/debug/adapters") for each in self.routers]
            known = [{each["name"] for each in page["adapters"]} for page in pages]
            return all(each >= set(names) for each in known)

        await eventually(are_known)


@asynccontextmanager
async def sharing(http: aiohttp.ClientSession, folder: Path) -> AsyncIterator[Scene]:
    tokens = folder / "tokens"
    tokens.write_text("secret\n")
    store = {"sqlite": {"file": str(folder / "store"), "interval_s": 0.1}}
    adapters = {"store": store, "registration": {"token_file": str(tokens), "max_per_s": 100}}
    configs = [PodConfig(name=f"pod-{number}", ranks_by_path=PATHS) for number in range(2)]
    async with AsyncExitStack() as stack:
        pods: list[RunningPod] = await stack.enter_async_context(running_pods(*configs))
        addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
        routers = []
        for own in addresses:
            config = router_config(
                pods,
                server={"drain_timeout_s": 1},
                scrape={"interval_s": 0.1, "models_interval_s": 5},
                peers={"static": addresses},
                adapters=adapters,
            )
            routers.append(RouterProcess(config, address=own))
            stack.push_async_callback(routers[-1].close)
        await asyncio.gather(*(each.start(within_s=PATIENCE_S) for each in routers))
        clients = []
        for each in routers:
            running = running_envoy(Mode.ORIGINAL_DST, each, num_pods=2)
            envoy = await stack.enter_async_context(running)
            clients.append(Client(envoy.url, http))
        scene = Scene(routers, clients, http)
        await eventually(scene.are_linked)
        yield scene


async def test_one_router_loads_what_the_requests_of_both_wait_for_and_both_know_what_fails(
    http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    async with sharing(http, tmp_path) as scene:
        await scene.declare("a", "b", "missing")

        asked = [(client, name) for name in ("a", "b", "missing") for client in scene.clients]
        answers = await asyncio.gather(*(client.chat(name) for client, name in asked))

        assert [answer.status for answer in answers] == [200] * 4 + [503] * 2
        assert all("(files)" in each.json["error"]["message"] for each in answers[4:])
        fewest, most = sorted(await scene.num_calls())
        assert fewest == 0
        assert most >= 3


async def test_where_the_router_that_loads_is_killed_the_other_loads_at_once(
    http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    async with sharing(http, tmp_path) as scene:
        await scene.declare("a", "c")
        for client in scene.clients:
            assert (await client.chat("a")).status == 200
        calls = await scene.num_calls()
        loads = calls.index(max(calls))
        other = 1 - loads

        await scene.routers[loads].kill()

        assert (await scene.clients[other].chat("c")).status == 200
        assert await scene.routers[other].counter("extproc_adapter_calls_total") == 1
