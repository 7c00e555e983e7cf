"""`pods.max_cpu_loras` and real first tokens: a wrong value is one warning, a right one is none."""

from __future__ import annotations

import random
from dataclasses import replace

import aiohttp
import pytest

from extproc.envoy.bootstrap import Mode
from extproc.lab.engine.profiles import INSTANT
from extproc.lab.fakepod.podserver import PodConfig
from extproc.learned.cachesize import OBSERVATIONS_PER_LOOK
from tests.e2e.conftest import router_config, running_envoy
from tests.e2e.harness import Client, RouterProcess
from tests.fakepods import running_pods
from tests.waiting import eventually

PLACES = 4
ADAPTERS = [f"adapter-{number}" for number in range(12)]
PROFILE = replace(INSTANT, step_s=0.005, gpu_load_s=0.005, disk_load_s=0.2)
MAX_LOOKS = 10
WARNING = "adapters in their CPU caches"


async def run_requests(client: Client, rng: random.Random) -> None:
    """Streamed requests, one after the other, until the router looks at what they found."""
    for _ in range(OBSERVATIONS_PER_LOOK):
        answer = await client.chat(rng.choice(ADAPTERS), stream=True, max_tokens=4)
        assert answer.status == 200


async def learned(router: RouterProcess) -> list[float]:
    """The learned size, if there is one."""
    page: str = await router.admin("/metrics")
    name = 'extproc_cpu_cache_adapters{group="",source="learned"} '
    return [float(line.removeprefix(name)) for line in page.splitlines() if line.startswith(name)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("configured", "num_warnings"), [(16, 1), pytest.param(PLACES, 0, marks=pytest.mark.long)]
)
async def test_a_wrong_size_of_the_cpu_cache_is_one_warning(
    configured: int, num_warnings: int
) -> None:
    configs = [
        PodConfig(
            name=f"pod-{number}",
            adapters=ADAPTERS,
            max_loras=2,
            max_cpu_loras=PLACES,
            profile=PROFILE,
        )
        for number in range(2)
    ]
    async with running_pods(*configs) as pods:
        router = RouterProcess({**router_config(pods), "pods": {"max_cpu_loras": configured}})
        await router.start()
        try:
            async with (
                running_envoy(Mode.ORIGINAL_DST, router) as envoy,
                aiohttp.ClientSession() as http,
            ):
                client, rng = Client(envoy.url, http), random.Random(1)
                for _ in range(MAX_LOOKS):
                    if await learned(router):
                        break
                    await run_requests(client, rng)
                await run_requests(client, rng)
                sizes = await eventually(lambda: learned(router))
                if num_warnings:
                    await eventually(lambda: WARNING in router.log)
                log = router.log
        finally:
            await router.close()

    assert PLACES - 1 <= sizes[0] <= PLACES + 1
    assert log.count(WARNING) == num_warnings
