"""Every query of every panel has data from a real run: a real Prometheus reads real routers, and
fake pods with vLLM's metrics."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from extproc.envoy.bootstrap import Mode
from extproc.lab.engine.profiles import INSTANT
from extproc.lab.fakepod.podserver import PodConfig, RunningPod
from extproc.stack.processes import free_port
from tests.compose.test_dashboard import dashboard, panels
from tests.e2e.conftest import router_config, running_envoy
from tests.e2e.harness import Client, RouterProcess
from tests.e2e.prometheus import PATIENCE_S, PrometheusProcess, watched
from tests.e2e.trouble import asked, never_ready, unreachable_cluster
from tests.fakepods import running_pods
from tests.waiting import beside, eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

WINDOW = "20s"
"""For `$__rate_interval`: dozens of scrapes."""
ADAPTERS = [f"customer-{number}" for number in range(6)]
WITHOUT_DATA: dict[str, str] = {}
"""Panels that nothing here gives data, and why."""


@asynccontextmanager
async def two_linked(pods: list[RunningPod]) -> AsyncIterator[list[RouterProcess]]:
    """Two routers over these pods and a dead one, with room for few requests."""
    own = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    config = router_config(
        pods,
        peers={"static": own},
        queue={"max_requests": 5},
        request={"max_hold_s": 5},
        routes=[{"name": "customers", "models": ["customer-*"]}],
    )
    config["discovery"]["static"].append({"address": f"127.0.0.1:{free_port()}", "name": "dead"})
    async with (
        RouterProcess(config, address=own[0]) as first,
        RouterProcess(config, address=own[1]) as second,
    ):
        yield [first, second]


async def say_nothing(router: RouterProcess) -> None:
    """Open connections to a router without a word, which it ends."""
    host, port = router.address.rsplit(":", 1)
    async with AsyncExitStack() as stack:
        while True:
            _, writer = await asyncio.open_connection(host, int(port))
            stack.callback(writer.close)
            await asyncio.sleep(1)


async def leave(client: Client) -> None:
    """Ask, and leave in the middle of the response."""
    while True:
        with suppress(AssertionError, aiohttp.ClientError):  # some are refused
            async with client.streaming(ADAPTERS[0], max_tokens=200):
                await asyncio.sleep(0.2)
        await asyncio.sleep(1)


async def lacking(
    prometheus: PrometheusProcess, queries: set[tuple[str, str]], variables: Mapping[str, str]
) -> set[tuple[str, str]]:
    """The queries that return no series, or none with a number."""
    found = set()
    for title, expr in queries:
        filled = expr
        for name, value in variables.items():
            filled = filled.replace(f"${name}", value)
        samples = await prometheus.query(filled)
        if all(math.isnan(float(sample["value"][1])) for sample in samples):
            found.add((title, expr))
    return found


@pytest.mark.long
async def test_every_query_of_every_panel_has_data(
    http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    profile = replace(INSTANT, step_s=0.05, gpu_load_s=0.1, max_num_seqs=3)
    pods_like = [
        PodConfig(name=f"pod-{number}", adapters=ADAPTERS, max_loras=2, profile=profile)
        for number in range(2)
    ]
    nowhere = {"dns": {"name": "nowhere.invalid", "port": 8000, "interval_s": 1}}
    async with AsyncExitStack() as stack:
        start = stack.enter_async_context
        pods = await start(running_pods(*pods_like))
        routers = await start(two_linked(pods))
        failing = [
            await start(never_ready(source)) for source in (unreachable_cluster(tmp_path), nowhere)
        ]
        envoy = await start(running_envoy(Mode.ORIGINAL_DST, *routers, shared_access_log=True))
        engines = {pod.name: pod.address for pod in pods}
        prometheus = await start(watched(*routers, *failing, vllm=engines))
        client = Client(envoy.url, http)
        await start(asked(client, *ADAPTERS, num_clients=24, max_tokens=20, stream=True))
        await start(asked(client, "nobody", num_clients=1, pause_s=0.5))
        await start(beside(leave(client)))
        await start(beside(say_nothing(routers[0])))

        jobs = {each["metric"]["job"] for each in await prometheus.query("extproc_build_info")}
        variables = {"__rate_interval": WINDOW, "job": "|".join(sorted(jobs))}
        missing = {
            (panel["title"], target["expr"])
            for panel in panels()
            if panel["title"] not in WITHOUT_DATA
            for target in panel["targets"]
        }

        async def have_data() -> bool:
            nonlocal missing
            missing = await lacking(prometheus, missing, variables)
            return not missing

        with suppress(AssertionError):
            await eventually(have_data, within_s=PATIENCE_S, every_s=0.5)
    assert missing == set()


def test_only_panels_that_exist_are_said_to_have_no_data() -> None:
    variables = {each["name"] for each in dashboard()["templating"]["list"]}

    assert WITHOUT_DATA.keys() <= {panel["title"] for panel in panels()}
    assert variables == {"datasource", "job"}
