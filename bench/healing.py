"""How long a router takes to know what it could not read: `python -m bench.healing [ROUNDS]`.

A router starts while a store, or the LLMRoutes of a real API server, cannot be read. Then that is
mended, and the time counts until the first right answer through Envoy. What is refused meanwhile,
and that all else is served, is tested: `tests/e2e/test_unread_stores.py`,
`tests/kubernetes/test_unread.py`.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp

from extproc.envoy.bootstrap import Mode
from extproc.lab.fakepod.pod import PodConfig
from tests.e2e import test_unread_stores as stores
from tests.e2e.conftest import router_config, running_envoy, running_pods
from tests.e2e.harness import Client, RouterProcess, eventually
from tests.kubernetes import test_unread as routes
from tests.kubernetes.apiserver import PROGRAMS, ApiServer, find_crds, missing_programs
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.declared import DEFINITION, install
from tests.kubernetes.faultyproxy import FaultyProxy

KINDS = (
    stores.missing_directory,
    stores.half_written_file,
    stores.corrupt_database,
    stores.killed_redis,
    stores.redis_with_another_password,
    stores.redis_that_breaks_off,
)
BROKEN_S = 7.0
"""For which it stays unreadable: any pause between two attempts has reached its longest by then."""


async def _healed_s(
    mend: Callable[[], Awaitable[None]], ask: Callable[[], Awaitable[int]]
) -> float:
    await asyncio.sleep(BROKEN_S)
    await mend()
    began_s = time.monotonic()

    async def is_right() -> bool:
        return await ask() == 200

    await eventually(is_right)
    return time.monotonic() - began_s


async def of_store(kind: Any) -> float:
    """Return the seconds for one kind of store, with its default interval."""
    with tempfile.TemporaryDirectory() as folder:
        config = PodConfig(name="pod-0", adapters=list(stores.ADAPTERS))
        async with kind(Path(folder)) as store, running_pods(config) as pods:
            await store.fill()
            section = {
                medium: {key: value for key, value in each.items() if key != "interval_s"}
                for medium, each in store.section.items()
            }
            adapters = {"ready_wait_s": 0, "store": section}
            await store.break_it(True)
            async with (
                RouterProcess(router_config(pods, adapters=adapters)) as router,
                running_envoy(Mode.ORIGINAL_DST, router, num_pods=1) as envoy,
                aiohttp.ClientSession() as http,
            ):
                client = Client(envoy.url, http)

                async def ask() -> int:
                    return (await client.chat("stored")).status

                return await _healed_s(lambda: store.break_it(False), ask)


@asynccontextmanager
async def _cluster(server: ApiServer, name: str) -> AsyncIterator[tuple[Cluster, FaultyProxy]]:
    server.kubectl("create", "namespace", name)
    async with (
        Cluster(server, name) as cluster,
        FaultyProxy(server.url, server.ca_file, seed=7) as proxy,
    ):
        yield cluster, proxy


async def of_routes(server: ApiServer, name: str, trouble: routes.Trouble) -> float:
    """Return the seconds for LLMRoutes."""
    async with _cluster(server, name) as (cluster, proxy), routes.scene(cluster, proxy) as scene:
        await trouble(scene, True)
        await scene.router.start()
        return await _healed_s(lambda: trouble(scene, False), lambda: scene.ask("private", "acme"))


def _print(name: str, seconds: list[float]) -> None:
    title = name.replace("_", " ")
    print(f"| {title} | {median(seconds):.1f} | {max(seconds):.1f} |", flush=True)


def main(rounds: int) -> None:
    """Print a table."""
    print("| could not be read | s, median | s, longest |\n|---|---:|---:|")
    for kind in KINDS:
        _print(kind.__name__, [asyncio.run(of_store(kind)) for _ in range(rounds)])
    crds = find_crds()
    if missing_programs(*PROGRAMS) or crds is None:
        return
    with ApiServer() as server:
        server.kubectl("apply", "--server-side", "-f", str(crds))
        server.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=90s")
        install(server, DEFINITION)
        for trouble in (routes.right, routes.half_a_list, routes.server_error):
            names = (f"{trouble.__name__.replace('_', '-')}-{number}" for number in range(rounds))
            seconds = [asyncio.run(of_routes(server, name, trouble)) for name in names]
            _print(f"LLMRoutes: {trouble.__name__}", seconds)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
