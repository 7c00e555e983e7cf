"""Declared adapters on real vLLM servers, behind a real Envoy and under traffic.

Two servers start without any adapter; a third one joins them late. Two cores carry no more at a
time than that.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from extproc.envoy.bootstrap import BootstrapOptions, Mode, render
from tests.e2e.harness import Answer, Client, EnvoyProcess, RouterProcess
from tests.vllm.conftest import StartServers
from tests.vllm.gateway import NUM_TOKENS, PATH, completion, text_of
from tests.vllm.server import ADAPTERS, MAX_CPU_LORAS, MAX_LORAS, VllmClient, VllmServer
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(900)

PATIENCE_S = 120.0


def route(name: str, source: Path, **adapter: Any) -> dict[str, Any]:
    return {"name": name, "models": [name], "adapter": {"source": str(source), **adapter}}


@dataclass
class Scene:
    """A gateway over servers that join and leave by a file."""

    servers: list[VllmServer]
    router: RouterProcess
    client: Client
    http: aiohttp.ClientSession
    file: Path

    def join(self, servers: Sequence[VllmServer]) -> None:
        """Have the router use exactly these servers."""
        new = self.file.with_suffix(".new")
        new.write_text(yaml.safe_dump([server.address for server in servers]))
        new.replace(self.file)

    async def listed(self, server: VllmServer) -> set[str]:
        return set(await VllmClient(server, self.http).adapters())

    async def all_listed(self) -> set[str]:
        lists = [await self.listed(server) for server in self.servers if server.is_running]
        return set[str]().union(*lists)

    async def ask(self, model: str, max_tokens: int = NUM_TOKENS) -> Answer:
        async with asyncio.timeout(PATIENCE_S):
            return await self.client.request("POST", PATH, completion(model, max_tokens))

    async def statuses(self) -> dict[str, dict[str, Any]]:
        page = await self.router.admin("/debug/adapters")
        return {each["name"]: each for each in page["adapters"]}


@asynccontextmanager
async def declaring(
    servers: list[VllmServer], routes: Sequence[dict[str, Any]], folder: Path
) -> AsyncIterator[Scene]:
    file = folder / "endpoints.yaml"
    file.write_text(yaml.safe_dump([server.address for server in servers]))
    config = {
        "discovery": {"file": str(file)},
        "pods": {"max_loras": MAX_LORAS, "max_cpu_loras": MAX_CPU_LORAS, "max_lora_rank": 8},
        "adapters": {"roots": [{"pod": "/", "router": "/"}]},
        "scrape": {"timeout_s": 5.0, "expiry_s": 6.0},
        "routes": list(routes),
    }
    async with (
        RouterProcess(config) as router,
        EnvoyProcess(
            render(BootstrapOptions(mode=Mode.ORIGINAL_DST, routers=(router.address,)))
        ) as envoy,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http,
    ):
        yield Scene(servers, router, Client(envoy.url, http), http, file)


@dataclass
class Traffic:
    """Requests for adapters in turn, one after the other, until it is stopped."""

    scene: Scene
    models: Sequence[str]
    answers: list[tuple[str, Answer]] = field(default_factory=list)

    @asynccontextmanager
    async def flowing(self, num_clients: int = 2) -> AsyncIterator[None]:
        is_over = asyncio.Event()

        async def client(number: int) -> None:
            place = number
            while not is_over.is_set():
                model = self.models[place % len(self.models)]
                try:
                    answer = await self.scene.ask(model)
                except aiohttp.ClientPayloadError as cut:  # after its head, by a server's kill
                    answer = Answer(0, {}, str(cut).encode())
                self.answers.append((model, answer))
                place += num_clients

        async with asyncio.TaskGroup() as tasks:
            for number in range(num_clients):
                tasks.create_task(client(number))
            try:
                yield
            finally:
                is_over.set()

    @property
    def failed(self) -> list[tuple[str, int, str]]:
        return [
            (model, each.status, each.body.decode())
            for model, each in self.answers
            if each.status != 200
        ]


@pytest.mark.slow
async def test_adapters_survive_kills_and_restarts_and_a_server_that_joins_gets_its_share(
    start_vllm_servers: StartServers, tiny_models: Path, tmp_path: Path
) -> None:
    servers = await start_vllm_servers(2, adapters=())
    routes = [route(name, tiny_models / name) for name in ADAPTERS]
    async with declaring(servers, routes, tmp_path) as scene:

        async def are_all_listed() -> bool:
            return await scene.all_listed() >= set(ADAPTERS)

        await eventually(are_all_listed, within_s=PATIENCE_S)
        victim = servers[0]
        before = await scene.listed(victim)
        assert before, "each server has its share"

        traffic = Traffic(scene, ADAPTERS)
        async with traffic.flowing():
            await asyncio.sleep(3.0)
            num_answers = len(traffic.answers)
            await victim.kill()
            await victim.start()
            healthy_s = time.monotonic()

            async def is_whole() -> bool:
                return await scene.listed(victim) >= before

            await eventually(is_whole, within_s=PATIENCE_S)
            print(f"adapters listed {time.monotonic() - healthy_s:.1f} s after /health")
        # Of each client the one that ran there.
        assert len(traffic.failed) <= 2, traffic.failed
        print(f"{len(traffic.failed)} of {len(traffic.answers)} requests failed")
        assert len(traffic.answers) > num_answers
        assert {text_of(answer) for _, answer in traffic.answers if answer.status == 200}

        # In order: discovery says that it leaves, its requests end, and it gets SIGTERM.
        calm = Traffic(scene, ADAPTERS)
        async with calm.flowing():
            scene.join(servers[1:])

            async def is_idle() -> bool:
                return (await scene.router.in_flight()).keys() == {servers[1].address}

            await eventually(is_idle, within_s=PATIENCE_S)
            await asyncio.sleep(2.0)
            await victim.stop()
            num_before = len(calm.answers)

            async def has_answered_all() -> bool:
                return {model for model, _ in calm.answers[num_before:]} == set(ADAPTERS)

            # Places for four of the six: they take turns.
            await eventually(has_answered_all, within_s=PATIENCE_S)
        assert calm.failed == []

        [third] = await start_vllm_servers(1, adapters=())
        servers.append(third)
        scene.join(servers[1:])

        async def has_share() -> bool:
            return bool(await scene.listed(third))

        await eventually(has_share, within_s=PATIENCE_S)
        answers = [await scene.ask(name) for name in ADAPTERS]
        assert {answer.status for answer in answers} == {200}
    for server in servers:
        await server.close()


async def test_a_new_version_takes_over_under_load_without_a_failed_or_a_mixed_answer(
    vllm_server: VllmServer, tiny_models: Path, tmp_path: Path
) -> None:
    old, new = tiny_models / "a1", tiny_models / "a2"
    async with declaring([vllm_server], [route("sql", old, version="1")], tmp_path) as scene:
        texts = {}
        for version, folder in (("1", "a1"), ("2", "a2")):
            direct = VllmClient(vllm_server, scene.http)
            texts[version] = await direct.complete(folder, max_tokens=NUM_TOKENS)
        assert texts["1"] != texts["2"]
        assert text_of(await scene.ask("sql")) == texts["1"]

        traffic = Traffic(scene, ["sql"])
        async with traffic.flowing():
            scene.router.change_config(routes=[route("sql", new, version="2")])

            async def is_old_gone() -> bool:
                return "sql@1" not in await scene.listed(vllm_server)

            await eventually(is_old_gone, within_s=PATIENCE_S)
        seen = [text_of(answer) for _, answer in traffic.answers]
        assert set(seen) <= set(texts.values())
        assert seen[-1] == texts["2"]
        assert (await scene.statuses())["sql"]["versions"][-1]["removable"]


async def test_broken_adapters_harm_no_others_say_why_and_heal_once_repaired(
    vllm_server: VllmServer, tiny_models: Path, tmp_path: Path
) -> None:
    good = [f"good-{number}" for number in range(5)]
    folders = {name: tmp_path / name for name in (*good, "wide", "module", "dora")}
    for number, folder in enumerate(folders.values()):
        shutil.copytree(tiny_models / ADAPTERS[number % 6], folder)
    change(folders["wide"], r=64)
    weights = folders["module"] / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes().replace(b"self_attn.q_proj", b"self_attn.x_proj"))
    change(folders["dora"], use_dora=True)
    folders["none"] = tmp_path / "none"
    routes = [route(name, folder, load="lazy") for name, folder in folders.items()]
    async with declaring([vllm_server], routes, tmp_path) as scene:
        answers = {name: await scene.ask(name) for name in folders}

        assert {name: answers[name].status for name in good} == dict.fromkeys(good, 200)
        broken = {name: answer for name, answer in answers.items() if name not in good}
        assert {answer.status for answer in broken.values()} == {503}
        statuses = await scene.statuses()
        reasons = {name: statuses[name]["reason"] for name in broken}
        assert reasons == {
            "wide": "refused",
            "module": "refused",
            "dora": "refused",
            "none": "files",
        }
        for name, word in {"wide": "64", "module": "x_proj", "dora": "DoRA"}.items():
            assert word in statuses[name]["message"], statuses[name]

        shutil.copytree(tiny_models / "a0", folders["none"])
        repaired_s = time.monotonic()

        async def is_healed() -> bool:
            return (await scene.ask("none")).status == 200

        await eventually(is_healed, within_s=PATIENCE_S)
        print(f"healed {time.monotonic() - repaired_s:.1f} s after the repair")


def change(folder: Path, **fields: object) -> None:
    config = folder / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | fields))
