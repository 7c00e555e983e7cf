"""What declared adapters cost: the plan alone, and changes by store.

Only `--quick`, the plan, measures CPU time and starts nothing. The rest starts eight fake pods in
this process, a router and an Envoy; its clocks are the wall's, so other work on the machine shows.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import sys
import time
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
import yaml

from bench.chaoskube import InCluster, api_server, in_cluster
from bench.figures import percentile, render_table
from bench.processes import RedisServer
from extproc.adapters.declared import Declaration
from extproc.adapters.planner import Planner
from extproc.adapters.states import Action, Kind, Result
from extproc.envoy.bootstrap import BootstrapOptions, Mode, render
from extproc.fleet.podstate import PodState
from extproc.lab.engine.profiles import INSTANT, EngineProfile
from extproc.lab.fakepod.pod import PodConfig, RunningPod, start_pod
from extproc.service.app import GC_THRESHOLDS
from extproc.stack.envoy import Envoy
from extproc.stack.processes import free_port
from extproc.stack.routers import Router
from extproc.types import ModelCard

NUM_DECLARED, NUM_PODS, SLOTS = 2_000, 8, 8
STORES = ("directory", "sqlite", "redis", "file", "kubernetes")
NUM_HELD = 20
_ROUNDS = 21
_TOKEN = "bench"
_POLL_S = 0.01
_PATIENCE_S = 120.0


# --- the plan -----------------------------------------------------------------------------------


class Fleet:
    """Pods in name only, that do at once what they are asked to."""

    def __init__(self) -> None:
        self.models = {f"10.0.0.{number}:8000": {"base": ModelCard("base")} for number in range(8)}

    def states(self, now: float) -> list[PodState]:
        """Return what a router knows of them."""
        return [
            PodState(
                address, models=models, listed_at_s=now, max_loras=SLOTS, max_cpu_loras=2 * SLOTS
            )
            for address, models in self.models.items()
        ]

    def carry_out(self, action: Action) -> None:
        """Load or unload."""
        models = dict(self.models[action.address])
        models.pop(action.name, None)
        if action.kind is Kind.LOAD:
            models[action.name] = ModelCard(action.name, action.path, "base")
        self.models[action.address] = models


def plan() -> str:
    """Return a table of the planner's CPU time and memory."""
    names = [f"adapter-{number}" for number in range(NUM_DECLARED)]
    declarations = [Declaration(name, f"/adapters/{name}") for name in names]
    fleet, now, rng = Fleet(), 0.0, random.Random(1)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    planner, demand = _declared(declarations), {name: 0.01 for name in names[: NUM_DECLARED // 2]}
    while now < 120:
        _tick_ms(planner, fleet, demand, names[:NUM_HELD], now)
        now += 1
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    gc.set_threshold(*GC_THRESHOLDS)
    first = [_tick_ms(_declared(declarations), Fleet(), {}, (), 0.0) for _ in range(_ROUNDS)]
    quiet, busy = [], []
    for _ in range(_ROUNDS):
        now += 1
        quiet.append(_tick_ms(planner, fleet, demand, (), now))
        demand = dict(demand)
        for name in rng.sample(names, NUM_DECLARED // 2):
            demand[name] = rng.random() / NUM_DECLARED
        held = rng.sample(names, NUM_HELD)
        now += 1
        busy.append(_tick_ms(planner, fleet, demand, held, now))
    rows = [
        [name, f"{percentile(times, 50):.1f}", f"{max(times):.1f}"]
        for name, times in (("first", first), ("quiet", quiet), ("busy", busy))
    ]
    size = f"CPU ms of a plan; {NUM_DECLARED:,} adapters, {NUM_PODS} pods of {SLOTS} slots"
    table = render_table([size, "p50", "most"], rows)
    return f"{table}\n\nMemory of the plan: {(used - before) / 1e6:.1f} MB"


def _declared(declarations: Sequence[Declaration]) -> Planner:
    planner = Planner()
    planner.declare(declarations, now=0.0)
    return planner


def _tick_ms(
    planner: Planner, fleet: Fleet, demand: Mapping[str, float], held: Sequence[str], now: float
) -> float:
    """Return the CPU milliseconds of a look at the fleet; its calls are carried out at once."""
    states = fleet.states(now)
    began_s = time.process_time()
    actions = planner.tick(states, demand, held, now=now)
    taken_s = time.process_time() - began_s
    for action in actions:
        fleet.carry_out(action)
        planner.finished(action, Result(), now=now)
    return 1e3 * taken_s


# --- a real router and Envoy -------------------------------------------------------------------


class Scene:
    """A gateway, the store behind its router, and a client."""

    def __init__(self, url: str, router: Router, store: str, http: aiohttp.ClientSession) -> None:
        self.url, self.router, self.store, self.http = url, router, store, http
        self.pods: list[RunningPod] = []
        self.routes: dict[str, dict[str, Any]] = {}
        self.tags: dict[str, str] = {}
        self.cluster: InCluster | None = None

    async def chat(self, model: str) -> tuple[int, str]:
        """Send a request; return its status and the name that the pod read."""
        body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
        async with self.http.post(f"{self.url}/v1/chat/completions", json=body) as response:
            await response.read()
            return response.status, response.headers.get("x-served-model", "")

    async def declare(self, name: str, version: str) -> None:
        """Declare an adapter, or another version of it."""
        if self.cluster is not None:
            return await self.cluster.put(name, int(version), 0)
        body = {"name": name, "source": f"/adapters/{name}-{version}", "version": version}
        if self.store == "file":
            adapter = {"source": body["source"], "version": version}
            self.routes[name] = {"name": name, "models": [name], "adapter": adapter}
            return self._write()
        url, headers = f"{self.router.admin_url}/v1/adapters", {"authorization": f"Bearer {_TOKEN}"}
        if name in self.tags:
            headers["if-match"] = self.tags[name]
        async with self.http.post(url, json=body, headers=headers) as response:
            assert response.status < 300, await response.text()
        async with self.http.get(f"{url}/{name}", headers=headers) as response:
            self.tags[name] = response.headers["etag"]

    async def delete(self, name: str) -> None:
        """Declare it no longer."""
        if self.cluster is not None:
            return await self.cluster.delete(name, 0)
        if self.store == "file":
            del self.routes[name]
            return self._write()
        url = f"{self.router.admin_url}/v1/adapters/{name}"
        headers = {"authorization": f"Bearer {_TOKEN}"}
        async with self.http.delete(url, headers=headers) as response:
            assert response.status == 204, await response.text()

    def _write(self) -> None:
        path = self.router._config_path
        document = yaml.safe_load(path.read_text())
        new = path.with_suffix(".new")
        new.write_text(yaml.safe_dump({**document, "routes": list(self.routes.values())}))
        new.replace(path)


@asynccontextmanager
async def running(
    store: str, folder: Path, max_cpu_loras: int = SLOTS, profile: EngineProfile = INSTANT
) -> AsyncIterator[Scene]:
    """Eight pods with these costs, a router with this store, and an Envoy.

    Raises:
        StackError: Something did not start.
    """
    async with AsyncExitStack() as exits:
        pods, port = [], free_port()
        for number in range(NUM_PODS):
            config = PodConfig(
                f"pod-{number}", max_loras=SLOTS, max_cpu_loras=max_cpu_loras, profile=profile
            )
            # An InferencePool has one port.
            pods.append(await start_pod(config, f"127.0.0.{number + 10}", port))
            exits.push_async_callback(pods[-1].stop)
        addresses, cluster = [pod.address for pod in pods], None
        if store == "kubernetes":
            server = exits.enter_context(api_server())
            cluster = await exits.enter_async_context(in_cluster(server))
            sections = await cluster.sections(addresses, [])
            del sections["peers"]
        else:
            sections = {"discovery": {"static": [{"address": each} for each in addresses]}}
        if store not in ("file", "kubernetes"):
            (folder / "tokens").write_text(f"{_TOKEN}\n")
            token = {"token_file": str(folder / "tokens"), "max_per_s": 1000}
            sections["adapters"] = {
                "store": await _store(store, folder, exits),
                "registration": token,
            }
        router = Router(
            {
                **sections,
                "pods": {"max_cpu_loras": max_cpu_loras},
                "scrape": {"expiry_s": 30.0},
                "log": {"level": "warning", "json_lines": False},
            }
        )
        exits.push_async_callback(router.close)
        await router.start()
        envoy = Envoy(render(BootstrapOptions(mode=Mode.ORIGINAL_DST, routers=(router.address,))))
        exits.push_async_callback(envoy.close)
        await envoy.start()
        timeout = aiohttp.ClientTimeout(total=_PATIENCE_S)
        connector = aiohttp.TCPConnector(limit=0)
        http = aiohttp.ClientSession(timeout=timeout, connector=connector)
        await exits.enter_async_context(http)
        scene = Scene(envoy.url, router, store, http)
        scene.pods, scene.cluster = pods, cluster
        yield scene


async def _store(kind: str, folder: Path, exits: AsyncExitStack) -> dict[str, Any]:
    if kind == "redis":
        server = RedisServer()
        exits.push_async_callback(server.close)
        await server.start()
        return {"redis": {"url": server.url}}
    if kind == "sqlite":
        return {"sqlite": {"file": str(folder / "adapters.db")}}
    (folder / "adapters").mkdir(exist_ok=True)
    return {"directory": {"path": str(folder / "adapters")}}


# --- changes, by store --------------------------------------------------------------------------


async def changes(store: str, count: int, at_once: int) -> list[str]:
    """Return a row: seconds from each change to the first right answer."""
    found: dict[str, list[float]] = {"declare": [], "edit": [], "roll back": [], "delete": []}
    with TemporaryDirectory() as name:
        async with running(store, Path(name), 2 * SLOTS) as scene:
            gate = asyncio.Semaphore(at_once)

            async def one(name: str) -> None:
                async with gate:
                    for what, version in (("declare", "1"), ("edit", "2"), ("roll back", "1")):
                        change = scene.declare(name, version)
                        right = (200, f"{name}@{version}")
                        found[what].append(await _until(scene, name, change, right))
                    found["delete"].append(await _until(scene, name, scene.delete(name), (404, "")))

            await asyncio.gather(*(one(f"a{number}") for number in range(count)))
    return [store, str(count), *(_two(times) for times in found.values())]


async def _until(scene: Scene, name: str, change: Awaitable[None], right: tuple[int, str]) -> float:
    began_s = time.monotonic()
    await change
    while await scene.chat(name) != right:
        if time.monotonic() > began_s + _PATIENCE_S:
            raise TimeoutError(f"{name}: {right} has not come within {_PATIENCE_S} s")
        await asyncio.sleep(_POLL_S)
    return time.monotonic() - began_s


def _two(times_s: Sequence[float]) -> str:
    if not times_s:
        return "-"
    return f"{percentile(times_s, 50):.2f} / {percentile(times_s, 99):.2f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.adapters", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the plan only")
    parser.add_argument("--changes", type=int, default=100, help="of each kind on each store")
    parser.add_argument("--at-once", type=int, default=4, help="adapters that change at a time")
    parser.add_argument("--stores", nargs="*", choices=STORES, default=STORES)
    args = parser.parse_args(arguments)
    print(f"{plan()}\n", flush=True)
    if args.quick:
        return 0
    rows = [asyncio.run(changes(store, args.changes, args.at_once)) for store in args.stores]
    header = ["store", "of each", "declare", "edit", "roll back", "delete"]
    print(render_table([f"{each}" for each in header], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
