"""A router that decides for those that Envoy asks: killed, frozen and cut off under load.

Envoy does not ask the leader itself, so that no request is lost with it.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import aiohttp
import pytest

from extproc.envoyconfig import Mode
from tests.e2e.conftest import PATIENCE_S, own_pods, router_config, running_envoy
from tests.e2e.forwarder import Switch
from tests.e2e.harness import Client, RouterProcess, eventually, free_port
from tests.e2e.load import Load
from tests.e2e.test_routers import LEAST_PENDING, MODELS, SLOW, told

# Several processes start at once, on whatever machine.
pytestmark = pytest.mark.timeout(300)


@dataclass
class Led:
    """Three routers; Envoy asks the two that do not lead."""

    leader: RouterProcess
    followers: list[RouterProcess]
    client: Client

    def load(self) -> Load:
        return Load(self.client, MODELS, max_tokens=3)

    async def asked(self, outcome: str) -> int:
        """How many requests of the followers had this outcome at the leader."""
        name = f'extproc_lead_asked_total{{outcome="{outcome}"}}'
        pages = [await each.admin("/metrics") for each in self.followers]
        lines = [line for page in pages for line in page.splitlines() if line.startswith(name)]
        return sum(int(float(line.rpartition(" ")[2])) for line in lines)

    async def grows(self, outcome: str) -> None:
        """Wait until that has happened again."""
        before = await self.asked(outcome)

        async def has_grown() -> bool:
            return await self.asked(outcome) > before

        await eventually(has_grown)

    async def have_one_leader(self) -> bool:
        """Whether exactly one follower believes that it leads."""
        return sum([await is_leader(each) for each in self.followers]) == 1

    async def all_counts_are_zero(self) -> bool:
        routers = [self.leader, *self.followers]
        alive = [each for each in routers if each.is_running]
        own = [await each.has_none_in_flight() for each in alive]
        return all(own) and not any([await told(each) for each in alive])


async def is_leader(router: RouterProcess) -> bool:
    return await router.counter("extproc_lead_is_leader") == 1


@asynccontextmanager
async def led(http: aiohttp.ClientSession, switch: Switch | None = None) -> AsyncIterator[Led]:
    """Routers that are linked, only through the `switch` where there is one."""
    async with AsyncExitStack() as stack:
        pods = await stack.enter_async_context(own_pods(profile=SLOW))
        addresses = [f"127.0.0.1:{free_port()}" for _ in range(3)]
        ways = [await switch.to(each) for each in addresses] if switch else addresses
        routers = []
        for number, own in enumerate(addresses):
            others = [way for each, way in enumerate(ways) if each != number]
            peers = {"static": [own, *others], "lead": True}
            completions = {"source": "auto", "lost_after_s": 2.0}
            config = router_config(pods, peers=peers, policy=LEAST_PENDING, completions=completions)
            routers.append(RouterProcess(config, address=own))
            stack.push_async_callback(routers[-1].close)
        await asyncio.gather(*(router.start(within_s=PATIENCE_S) for router in routers))

        async def have_one_leader() -> bool:
            links = [await each.counter("extproc_peers_connected") for each in routers]
            return links == [2, 2, 2] and sum([await is_leader(each) for each in routers]) == 1

        await eventually(have_one_leader)
        [leader] = [each for each in routers if await is_leader(each)]
        followers = [each for each in routers if each is not leader]
        envoy = await stack.enter_async_context(
            running_envoy(Mode.ORIGINAL_DST, *followers, shared_access_log=True)
        )
        await eventually(lambda: envoy.considers_healthy(*(each.address for each in followers)))
        yield Led(leader, followers, Client(envoy.url, http))


async def test_one_router_decides_for_the_others_until_it_is_killed(
    http: aiohttp.ClientSession,
) -> None:
    async with led(http) as routers:
        async with routers.load().running() as load:
            await routers.grows("answered")
            await load.some()
            decisions = (await routers.followers[0].admin("/debug/decisions?explain"))["decisions"]
            await routers.leader.kill()
            await load.some()
            await eventually(routers.have_one_leader)
            await routers.grows("answered")  # by the next one
        await eventually(routers.all_counts_are_zero)

    assert load.outcomes == load.all_served
    assert any("the router that leads" in str(each) for each in decisions)


async def test_a_frozen_leader_costs_no_request_and_leads_again_afterwards(
    http: aiohttp.ClientSession,
) -> None:
    async with led(http) as routers:
        async with routers.load().running() as load:
            await routers.grows("answered")
            routers.leader.send(signal.SIGSTOP)
            await routers.grows("timeout")
            await load.some(100)
            routers.leader.send(signal.SIGCONT)
            await routers.grows("answered")
            await load.some()
        await eventually(routers.all_counts_are_zero)

    assert load.outcomes == load.all_served


async def test_a_leader_that_is_cut_off_costs_no_request_and_leads_again_afterwards(
    http: aiohttp.ClientSession,
) -> None:
    """A network that drops every packet between routers, without ending a connection."""
    async with Switch() as switch, led(http, switch) as routers:
        async with routers.load().running() as load:
            await routers.grows("answered")
            switch.turn(on=False)
            await load.some(100)
            switch.turn(on=True)
            await routers.grows("answered")
            await load.some()
        await eventually(routers.all_counts_are_zero)

    assert load.outcomes == load.all_served
