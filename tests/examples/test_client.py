"""The example of a client, as a process, before a real Envoy, a router and fake pods."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from extproc.envoy.bootstrap import Mode
from extproc.lab.fakepod.podserver import PodConfig, RunningPod
from tests.commandline import run
from tests.e2e.conftest import SLOW, router_config, running_envoy
from tests.e2e.harness import Client, EnvoyProcess, RouterProcess
from tests.fakepods import running_pods
from tests.waiting import eventually

CLIENT = Path(__file__).parents[2] / "examples" / "client.py"
WITHIN_S = 60.0

pytestmark = pytest.mark.e2e

Gateway = tuple[list[RunningPod], RouterProcess, EnvoyProcess]


@asynccontextmanager
async def gateway(num_pods: int, config: dict[str, Any], **pod: Any) -> AsyncIterator[Gateway]:
    configs = [
        PodConfig(name=f"pod-{n}", base_model="base", adapters=["chat", "sql"], **pod)
        for n in range(num_pods)
    ]
    async with (
        running_pods(*configs) as pods,
        RouterProcess(router_config(pods, **config)) as router,
        running_envoy(Mode.ORIGINAL_DST, router) as envoy,
    ):
        yield pods, router, envoy


async def run_client(*arguments: str) -> tuple[int, str, str]:
    done = await asyncio.to_thread(run, sys.executable, CLIENT, *arguments, within_s=WITHIN_S)
    return done.returncode, done.stdout, done.stderr


async def test_it_lists_models_streams_from_two_adapters_and_shows_an_error() -> None:
    async with gateway(2, {}) as (_, router, envoy):
        status, said, complained = await run_client(envoy.url, "--admin", router.admin_url)

    assert (status, complained) == (0, "")
    bases, adapters, chat, chat_s_pod, sql, sql_s_pod, error = said.splitlines()
    assert (bases, adapters) == ("base models: base", "adapters: chat, sql")
    for model, text, routed in (("chat", chat, chat_s_pod), ("sql", sql, sql_s_pod)):
        # A fake pod says its name.
        found = re.match(rf"{model}, 0 retries: (pod-\d) says {model}: 1 2 3", text)
        assert found, text
        assert routed.startswith(f"  served by {found[1]} (least_harm: ")
    assert error.startswith("Error code: 404 - ")
    assert error.endswith("(type invalid_request_error, code model_not_found, param model)")


@pytest.mark.long
async def test_it_repeats_what_got_429_until_there_is_room() -> None:
    config = {"admission": {"max_pending_per_endpoint": 1}}
    async with (
        gateway(1, config, profile=SLOW) as (_, router, envoy),
        aiohttp.ClientSession() as http,
    ):

        async def has_refused() -> bool:
            return await router.counter("extproc_rejections_total") > 0

        async with (
            asyncio.TaskGroup() as tasks,
            Client(envoy.url, http).streaming("sql", max_tokens=4000),
        ):
            running = tasks.create_task(run_client(envoy.url))
            await eventually(has_refused)
    status, said, complained = running.result()

    assert (status, complained) == (0, "")
    assert re.search(r"^chat, [1-5] retries: pod-0 says", said, re.M)


@pytest.mark.long
async def test_without_pods_it_ends_with_the_error_of_the_router() -> None:
    # Each of its attempts is held for so long, should the pod come back.
    async with gateway(1, {"request": {"max_hold_s": 0.5}}) as (pods, _, envoy):
        await pods[0].stop()
        status, _, complained = await run_client(envoy.url)

    assert status == 1
    assert complained.startswith("Error code: 503 - "), complained
    assert "code endpoint_unavailable" in complained
