"""Pods, the router and Envoy stand still for a while (SIGSTOP), under load, and then go on."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from extproc.envoy.bootstrap import Mode
from extproc.stack.stack import FakePod
from tests.e2e.conftest import MAX_BODY_BYTES, NUM_PODS, pod_config, running_envoy
from tests.e2e.harness import ChildProcess, Client, EnvoyProcess, RouterProcess
from tests.e2e.load import Load
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(240)

MODES = (Mode.ORIGINAL_DST, Mode.OVERRIDE_HOST, Mode.FULL_DUPLEX)


@dataclass(frozen=True)
class Service:
    """An Envoy, its router and its pods, each a process."""

    pods: list[FakePod]
    router: RouterProcess
    envoy: EnvoyProcess

    def load(self, http: aiohttp.ClientSession) -> Load:
        return Load(Client(self.envoy.url, http), ["shared", "base"], num_clients=6)

    async def check_counts(self, load: Load) -> None:
        """Every request has one outcome, and so has every pick."""
        assert load.num_sent == len(load.answers)
        await eventually(self.router.has_none_in_flight)
        picks = await self.router.counter("extproc_picks_total")
        assert picks == await self.router.counter("extproc_completions_total")
        assert await self.router.counter("extproc_picks_expired_total") == 0


@asynccontextmanager
async def running_service(mode: Mode, **options: Any) -> AsyncIterator[Service]:
    """A service whose router notices within moments that a pod does not respond."""
    async with AsyncExitStack() as stack:
        pods = [FakePod(f"pod-{number}", pod_config(number)) for number in range(NUM_PODS)]
        for pod in pods:
            await stack.enter_async_context(pod)
        config = {
            "discovery": {"static": [pod.address for pod in pods]},
            "request": {"max_body_bytes": MAX_BODY_BYTES},
            "scrape": {"timeout_s": 0.3, "expiry_s": 0.5},
            "destination": {"num_fallbacks": 2 if mode is Mode.OVERRIDE_HOST else 0},
        }
        router = await stack.enter_async_context(RouterProcess(config))
        envoy = await stack.enter_async_context(running_envoy(mode, router, **options))
        await eventually(lambda: envoy.considers_healthy(router.address))
        yield Service(pods, router, envoy)


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=MODES, ids=str)
async def service(request: pytest.FixtureRequest) -> AsyncIterator[Service]:
    async with running_service(request.param) as running:
        yield running


@pytest.mark.few(1)
async def test_short_freezes_cost_no_request(service: Service, http: aiohttp.ClientSession) -> None:
    """Shorter than any time limit, in random order: requests wait, and the counts add up."""
    rng = random.Random(7)
    async with service.load(http).running() as load:
        await load.some()
        all_but_pods: list[ChildProcess] = [service.router, service.envoy]
        for frozen in rng.sample([*all_but_pods * 2, *service.pods], k=7):
            frozen.send(signal.SIGSTOP)
            await asyncio.sleep(rng.uniform(0.05, 1.0))
            frozen.send(signal.SIGCONT)
            await load.some()

    assert load.outcomes == load.all_served
    await service.check_counts(load)


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", MODES)
async def test_a_router_frozen_for_longer_than_envoy_waits_costs_clear_errors(
    mode: Mode, http: aiohttp.ClientSession
) -> None:
    async with running_service(mode, message_timeout_s=1.0) as service:
        async with service.load(http).running() as load:
            await load.until_served()
            service.router.send(signal.SIGSTOP)
            await asyncio.sleep(4.0)
            service.router.send(signal.SIGCONT)
            await load.until_served()
        await service.check_counts(load)

    # Once health checks have failed, Envoy asks no router and says so.
    allowed = {"served", "router_timeout", "router_unavailable"}
    assert set(load.outcomes) <= allowed, load.outcomes
