"""Routers that stop and start again, while Envoy's view of them is a moment old."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import yaml

from extproc.envoy.bootstrap import BootstrapOptions, Mode, render
from extproc.lab.fakepod.podserver import RunningPod
from tests.e2e.conftest import MAX_BODY_BYTES, behind_envoy, router_config, running_envoy
from tests.e2e.harness import Client, EnvoyProcess, RouterProcess
from tests.e2e.load import Load, outcome
from tests.e2e.test_faults import is_served, is_unready
from tests.waiting import eventually


def without_health_checks(mode: Mode, *routers: RouterProcess) -> str:
    """A bootstrap with which Envoy considers every router healthy."""
    addresses = tuple(router.address for router in routers)
    options = BootstrapOptions(mode, max_body_bytes=MAX_BODY_BYTES, routers=addresses)
    document = yaml.safe_load(render(options))
    for cluster in document["static_resources"]["clusters"]:
        cluster.pop("health_checks", None)
    return yaml.safe_dump(document)


def endpoints_file(pods: list[RunningPod], path: Path) -> dict[str, Any]:
    """Write a file of pods, and return the configuration of a router that reads it."""
    path.write_text(json.dumps([{"address": pod.address, "name": pod.name} for pod in pods]))
    return {"discovery": {"file": str(path), "file_interval_s": 0.1}}


async def start_unready(router: RouterProcess) -> None:
    """Start a router that cannot become ready; return once it listens."""
    with pytest.raises(AssertionError):
        await router.start(within_s=0)
    await eventually(lambda: is_unready(router))


@pytest.mark.long
async def test_a_router_that_is_not_ready_costs_no_request_where_envoy_fails_open(
    pods: list[RunningPod], http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    file = tmp_path / "pods"
    async with (
        behind_envoy(
            endpoints_file(pods, file), http, Mode.OVERRIDE_HOST, failure_mode_allow=True
        ) as (router, client),
    ):
        await router.kill()
        file.unlink()
        await start_unready(router)
        answers = [await client.chat("shared") for _ in range(30)]
        is_still_unready = await is_unready(router)

    assert is_still_unready
    assert Counter(map(outcome, answers)) == {"served": 30}


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", [Mode.ORIGINAL_DST, Mode.FULL_DUPLEX])
async def test_a_router_that_is_not_ready_leaves_requests_to_the_other(
    mode: Mode, pods: list[RunningPod], http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    """Also before Envoy's health checks have noticed: here it has none."""
    file = tmp_path / "pods"
    async with (
        RouterProcess(endpoints_file(pods, file)) as first,
        RouterProcess(router_config(pods)) as second,
        EnvoyProcess(without_health_checks(mode, first, second)) as envoy,
    ):
        client = Client(envoy.url, http)
        await eventually(lambda: is_served(client))
        await first.kill()
        file.unlink()
        await start_unready(first)
        answers = [await client.chat("only-1") for _ in range(50)]
        retries = await envoy.stats("cluster.router.upstream_rq_retry_success")
        is_still_unready = await is_unready(first)

    assert is_still_unready
    assert Counter(map(outcome, answers)) == {"served": 50}
    assert sum(retries.values()) >= 10


async def test_without_another_router_one_that_is_not_ready_costs_a_clear_error(
    pods: list[RunningPod], http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    file = tmp_path / "pods"
    router = RouterProcess(endpoints_file(pods, file))
    file.unlink()
    async with running_envoy(Mode.ORIGINAL_DST, router) as envoy:
        client = Client(envoy.url, http)
        try:
            await start_unready(router)
            early = await client.chat("only-1")
            endpoints_file(pods, file)
            await eventually(lambda: is_served(client))
        finally:
            await router.close()

    assert outcome(early) == "router_unavailable"
    assert early.headers["retry-after"] == "1"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def two_routers(pods: list[RunningPod]) -> AsyncIterator[list[RouterProcess]]:
    """A test may kill one, and starts it again."""
    async with (
        RouterProcess(router_config(pods)) as first,
        RouterProcess(router_config(pods)) as second,
    ):
        yield [first, second]


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", list(Mode))
async def test_a_restarted_router_is_asked_again_once_it_passes_a_health_check(
    mode: Mode, two_routers: list[RouterProcess], http: aiohttp.ClientSession
) -> None:
    first, _ = two_routers
    async with (
        running_envoy(mode, *two_routers) as envoy,
        Load(Client(envoy.url, http), ["shared", "base"]).running() as load,
    ):
        await load.some()
        await first.kill()
        await load.some()
        await first.start()

        async def is_asked() -> bool:
            return bool((await first.admin("/debug/decisions?n=1"))["decisions"])

        await eventually(lambda: envoy.considers_healthy(first.address))
        await eventually(is_asked)
