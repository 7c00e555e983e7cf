"""A policy on trial, by what a real Envoy tells of its requests."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import aiohttp

from extproc.envoy.bootstrap import Mode
from extproc.lab.engine.profiles import INSTANT
from tests.e2e.conftest import behind_envoy, pod_config, router_config
from tests.fakepods import running_pods
from tests.waiting import eventually

STEP_S = 0.5  # a busy machine slows both arms
NUM_AT_ONCE = 30


async def test_a_policy_that_is_worse_is_ended_and_all_traffic_returns() -> None:
    slow = replace(INSTANT, step_s=STEP_S)
    async with (
        running_pods(pod_config(0), pod_config(1, profile=slow)) as (good, bad),
        aiohttp.ClientSession() as http,
    ):
        place = "tests.e2e.policies:Place"
        trial = {"name": place, "args": {"pod": bad.name}, "share": 0.3}
        config = router_config(
            [good, bad],
            policy={"name": place, "args": {"pod": good.name}, "trial": trial},
        )
        async with behind_envoy(config, http, Mode.ORIGINAL_DST, num_pods=2) as (router, client):

            async def ask() -> str:
                return (await client.served("shared", max_tokens=2)).served_by

            async def is_worse() -> bool:
                served_by.update(await asyncio.gather(*[ask() for _ in range(NUM_AT_ONCE)]))
                return await router.counter("extproc_trial_worse") == 1

            served_by = set[str]()
            await eventually(is_worse)

            assert len(served_by) == 2
            after = {await ask() for _ in range(3 * NUM_AT_ONCE)}
            assert len(after) == 1
            (warning,) = (await router.admin("/healthz"))["warnings"]
            assert "tests.e2e.policies:Place is worse in " in warning
            page = await router.admin("/metrics")
            assert 'extproc_trial_requests_total{arm="trial",outcome="completed"}' in page
