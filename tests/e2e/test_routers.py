"""Several routers behind one Envoy, which sends its access log to one of them."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from extproc.envoy.bootstrap import BootstrapOptions, Mode, TlsFiles
from extproc.lab.engine.profiles import INSTANT
from tests.e2e.conftest import NUM_PODS, PATIENCE_S, own_pods, router_config, running_envoy
from tests.e2e.forwarder import Switch
from tests.e2e.harness import Client, EnvoyProcess, RouterProcess, free_port
from tests.e2e.load import Load
from tests.pki import Pki
from tests.waiting import eventually

# Several processes start at once, on whatever machine.
pytestmark = pytest.mark.timeout(300)

PATH = "/v1/chat/completions"
MESSAGE_TIMEOUT_S = BootstrapOptions().message_timeout_s
SLOW = replace(INSTANT, step_s=0.02)
"""An engine that needs 20 ms for a token."""
NUM_CLIENTS = 8
MODELS = ["base", "shared"]

# Within a test a pick ends by an access log entry or not at all.
ONLY_BY_ENTRIES = {"source": "access_log", "lost_after_s": 600.0}
# Entries on their way to a router that stops are lost; then the pods' counts decide.
WITH_REPAIR = {"source": "auto", "lost_after_s": 2.0}
LEAST_PENDING = {"name": "least_pending"}


@dataclass
class Fleet:
    """Routers that are each other's peers, behind one Envoy."""

    routers: list[RouterProcess]
    envoy: EnvoyProcess
    client: Client

    async def counters(self, name: str) -> list[float]:
        """A metric of each router."""
        return [await router.counter(f"extproc_{name}") for router in self.routers]

    async def are_linked(self) -> bool:
        """Whether every router has a link to every other."""
        num_others = len(self.routers) - 1
        return await self.counters("peers_connected") == [num_others] * len(self.routers)

    async def are_apart(self) -> bool:
        """Whether no router has a link to another."""
        return not any(await self.counters("peers_connected"))

    async def are_healthy(self) -> bool:
        """Whether Envoy considers every router healthy; its checks are up to a second behind."""
        return await self.envoy.considers_healthy(*(router.address for router in self.routers))

    def logs(self) -> str:
        """The ends of the routers' logs, for a test that failed."""
        return "\n".join(f"--- {each.address}\n{each.log[-2000:]}" for each in self.routers)

    async def have_none_in_flight(self) -> bool:
        return all([await router.has_none_in_flight() for router in self.routers])


@asynccontextmanager
async def fleet(
    http: aiohttp.ClientSession,
    *,
    num_routers: int = 2,
    router_tls: TlsFiles | None = None,
    switch: Switch | None = None,
    peers: dict[str, Any] | None = None,
    before_start: Callable[[list[RouterProcess]], None] = lambda routers: None,
    mode: Mode = Mode.ORIGINAL_DST,
    **sections: Any,
) -> AsyncIterator[Fleet]:
    """Routers that are linked; with a `switch`, only through it."""
    async with AsyncExitStack() as stack:
        pods = await stack.enter_async_context(own_pods(profile=SLOW))
        addresses = [f"127.0.0.1:{free_port()}" for _ in range(num_routers)]
        ways = [await switch.to(each) for each in addresses] if switch else addresses
        sections.setdefault("completions", ONLY_BY_ENTRIES)
        routers = []
        for number, own in enumerate(addresses):
            others = [way for each, way in enumerate(ways) if each != number]
            section = {"static": [own, *others], **(peers or {})}
            config = router_config(pods, peers=section, **sections)
            routers.append(RouterProcess(config, address=own))
            stack.push_async_callback(routers[-1].close)
        before_start(routers)
        await asyncio.gather(*(router.start(within_s=PATIENCE_S) for router in routers))
        running = running_envoy(mode, *routers, shared_access_log=True, router_tls=router_tls)
        envoy = await stack.enter_async_context(running)
        made = Fleet(routers, envoy, Client(envoy.url, http))
        await eventually(made.are_linked)
        await eventually(made.are_healthy)
        yield made


# --- counts ----------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize("num_routers", [2, 3])
async def test_each_router_learns_how_its_picks_ended_though_one_gets_the_whole_log(
    num_routers: int, http: aiohttp.ClientSession
) -> None:
    models = [*MODELS, *(f"only-{n}" for n in range(NUM_PODS))]
    async with fleet(http, num_routers=num_routers) as routers:
        async with Load(routers.client, models).running() as load:
            await load.some(150)
        await eventually(routers.have_none_in_flight)
        picks = await routers.counters("picks_total")
        completions = await routers.counters("completions_total")
        dropped = await routers.counters("peer_entries_dropped_total")
        unmatched = await routers.counters("completions_unmatched_total")
        logs = await routers.counters("access_log_streams")
        known = await routers.counters("routers")

    assert load.outcomes == load.all_served
    assert all(picks)
    assert sum(picks) == len(load.answers)
    assert completions == picks
    assert dropped == unmatched == [0] * num_routers
    assert sorted(logs) == [0] * (num_routers - 1) + [1]
    assert known == [num_routers] * num_routers


@pytest.mark.long
async def test_each_router_counts_its_own_open_requests_while_others_end(
    http: aiohttp.ClientSession,
) -> None:
    """Long responses stay counted, short ones do not, and a client that leaves is noticed."""
    num_open = 12
    async with fleet(http) as routers, AsyncExitStack() as stack:

        async def has_in_flight(num: int) -> bool:
            return sum(await routers.counters("picks_in_flight")) == num

        answers = []
        for number in range(num_open):
            model = f"only-{number % NUM_PODS}"
            opening = routers.client.streaming(model, max_tokens=4000, ignore_eos=True)
            answers.append(await stack.enter_async_context(opening))
        own = await routers.counters("picks_total")
        counted = await routers.counters("picks_in_flight")
        async with Load(routers.client, MODELS, max_tokens=3).running() as load:
            await load.some(100)
        await eventually(lambda: has_in_flight(num_open))
        counted_after_others = await routers.counters("picks_in_flight")
        for answer in answers[: num_open // 2]:
            answer.close()
        await eventually(lambda: has_in_flight(num_open // 2))
        for answer in answers:
            answer.close()
        await eventually(routers.have_none_in_flight)

    assert sum(own) == num_open
    assert counted == counted_after_others == own


async def test_log_entries_are_passed_on_over_mutual_tls(
    http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    """With the certificate that the routers listen with, which they share."""
    pki = Pki(tmp_path)
    cert, key = (str(path) for path in pki.issue("routers"))
    envoy_cert, envoy_key = (str(path) for path in pki.issue("envoy"))
    tls = {"cert_file": cert, "key_file": key, "client_ca_file": str(pki.ca)}
    files = TlsFiles(ca=str(pki.ca), cert=envoy_cert, key=envoy_key, server_name="localhost")
    async with fleet(http, server={"tls": tls}, router_tls=files) as routers:
        async with Load(routers.client, MODELS, max_tokens=3).running() as load:
            await load.some(100)
        await eventually(routers.have_none_in_flight)
        sent = await routers.counters("peer_entries_total")

    assert load.outcomes == load.all_served
    assert all(sent)


# --- routers that stop and start ----------------------------------------------------------------


@pytest.mark.parametrize("drain_delay_s", [pytest.param(0.0, marks=pytest.mark.long), 1.5])
async def test_no_request_fails_during_a_rolling_restart_of_the_routers(
    drain_delay_s: float, http: aiohttp.ClientSession
) -> None:
    server = {"drain_delay_s": drain_delay_s}
    async with fleet(http, server=server, completions=WITH_REPAIR) as routers:
        async with Load(routers.client, MODELS, max_tokens=3).running() as load:
            for number in range(4):
                router = routers.routers[number % 2]
                await load.some()
                assert await router.stop(within_s=60) == 0
                await load.some()
                await router.start(within_s=PATIENCE_S)
                await eventually(routers.are_healthy)
            await load.some()
            await eventually(routers.are_linked)
        await eventually(routers.have_none_in_flight)
        known = await routers.counters("routers")

    assert load.outcomes == load.all_served, routers.logs()
    assert known == [2, 2]


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", [Mode.ORIGINAL_DST, Mode.OVERRIDE_HOST], ids=str)
async def test_a_router_that_hangs_costs_at_most_what_it_has_half_answered(
    http: aiohttp.ClientSession, mode: Mode
) -> None:
    """Envoy notices that before its time for an answer is over, and asks the other one."""
    async with (
        fleet(http, mode=mode, completions=WITH_REPAIR) as routers,
        Load(routers.client, MODELS, max_tokens=3).running() as load,
    ):
        await load.some()
        routers.routers[0].send(signal.SIGSTOP)
        stopped_s = time.monotonic()
        await asyncio.sleep(MESSAGE_TIMEOUT_S + 1.0)
        await load.some()
        routers.routers[0].send(signal.SIGCONT)

    assert set(load.outcomes) <= {"served", "router_unavailable"}, load.outcomes
    assert max(load.lost_s, default=0.0) < stopped_s, routers.logs()


async def test_the_log_leaves_a_router_whose_node_is_gone_and_the_counts_are_true_again(
    http: aiohttp.ClientSession,
) -> None:
    """Nothing passes between Envoy and the router that has the log, and no connection ends."""
    async with AsyncExitStack() as stack:
        switches = [await stack.enter_async_context(Switch()) for _ in range(2)]
        pods = await stack.enter_async_context(own_pods(profile=SLOW))
        addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
        config = router_config(pods, peers={"static": addresses})
        made = [RouterProcess(config, address=own) for own in addresses]
        for router in made:
            await stack.enter_async_context(router)
        ways = [
            await switch.to(router.address) for switch, router in zip(switches, made, strict=True)
        ]
        running = running_envoy(Mode.ORIGINAL_DST, *ways, shared_access_log=True)
        envoy = await stack.enter_async_context(running)
        routers = Fleet(made, envoy, Client(envoy.url, http))
        await eventually(routers.are_linked)
        async with Load(routers.client, MODELS, max_tokens=3).running() as load:
            await load.some()
            streams = await routers.counters("access_log_streams")
            has_it = streams.index(max(streams))
            other = made[1 - has_it]
            assert streams[1 - has_it] == 0
            switches[has_it].turn(on=False)

            async def has_moved() -> bool:
                return await other.counter("extproc_access_log_streams") > 0

            await eventually(has_moved)
            await load.some()
            told = 'extproc_completions_total{outcome="completed"}'
            before = await other.counter(told)
            await load.some(60)
            after = await other.counter(told)
        await eventually(other.has_none_in_flight)
        health = await other.admin("/healthz")
        in_force = health["completions"]

    assert after - before >= 50
    assert in_force == {"access_log": 1, "pages": 0, "response": 0}


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", [Mode.ORIGINAL_DST, Mode.OVERRIDE_HOST], ids=str)
async def test_a_killed_router_costs_at_most_its_undecided_requests(
    http: aiohttp.ClientSession, mode: Mode
) -> None:
    async with fleet(http, mode=mode, completions=WITH_REPAIR, policy=LEAST_PENDING) as routers:
        async with Load(routers.client, MODELS, max_tokens=3).running() as load:
            await load.some()
            await routers.routers[0].kill()
            killed_s = time.monotonic()
            await load.some()
            alone = await load.some(90)
            await routers.routers[0].start(within_s=PATIENCE_S)
            await eventually(routers.are_linked)
            await load.some()
            both = await load.some(90)
        await eventually(routers.have_none_in_flight)
        known = await routers.counters("routers")

    # A client has one request at a time: those under way at that moment, and no later one.
    assert len(load.lost_s) <= NUM_CLIENTS, (load.outcomes, routers.logs())
    assert max(load.lost_s, default=0.0) < killed_s, routers.logs()
    assert set(load.outcomes) <= {"served", "router_unavailable"}
    for answers in (alone, both):
        served = Counter(answer.served_by for answer in answers)
        assert len(served) == NUM_PODS
        assert min(served.values()) > len(answers) / NUM_PODS / 2, served
    assert known == [2, 2]


@pytest.mark.long
async def test_routers_that_cannot_reach_each_other_serve_and_catch_up_afterwards(
    http: aiohttp.ClientSession,
) -> None:
    """A network that drops every packet, without ending a connection."""
    async with Switch() as switch, fleet(http, switch=switch, peers={"hold_s": 60}) as routers:
        async with Load(routers.client, MODELS, max_tokens=3).running() as load:
            await load.some()
            switch.turn(on=False)
            await eventually(routers.are_apart)
            await load.some()
            known = await routers.counters("routers")
        had_open_counts = not await routers.have_none_in_flight()
        switch.turn(on=True)
        await eventually(routers.are_linked)
        await eventually(routers.have_none_in_flight)
        dropped = await routers.counters("peer_entries_dropped_total")

    assert load.outcomes == load.all_served
    assert known == [2, 2]
    assert had_open_counts
    assert dropped == [0, 0]


# --- what routers tell each other ---------------------------------------------------------------


async def told(router: RouterProcess) -> int:
    """How many requests of other routers it knows to be in flight, over all pods."""
    endpoints = (await router.admin("/debug/snapshot"))["endpoints"]
    return sum(each["num_told"] for each in endpoints)


@asynccontextmanager
async def open_requests(client: Client, num: int) -> AsyncIterator[None]:
    """So many responses that go on and on."""
    async with AsyncExitStack() as stack:
        for number in range(num):
            model = f"only-{number % NUM_PODS}"
            opening = client.streaming(model, max_tokens=100_000, ignore_eos=True)
            answer = await stack.enter_async_context(opening)
            stack.callback(answer.close)
        yield


async def test_routers_know_of_each_others_requests_until_one_is_killed(
    http: aiohttp.ClientSession,
) -> None:
    num_open = 12
    async with fleet(http, completions=WITH_REPAIR) as routers:
        first, second = routers.routers

        async def know_of_each_other() -> bool:
            own = await routers.counters("picks_in_flight")
            return sum(own) == num_open and [await told(second), await told(first)] == own

        async def has_forgotten() -> bool:
            return await told(second) == 0

        async def is_told_again() -> bool:
            return await told(first) == await second.counter("extproc_picks_in_flight") > 0

        async with open_requests(routers.client, num_open):
            await eventually(know_of_each_other)
            own = await routers.counters("picks_in_flight")
            async with Load(routers.client, MODELS, max_tokens=3).running() as load:
                await load.some()
                await first.kill()
                killed_s = time.monotonic()
                await eventually(has_forgotten)
                await load.some(90)
            await first.start(within_s=PATIENCE_S)
            await eventually(routers.are_linked)
            await eventually(is_told_again)

    assert all(own)
    assert len(load.lost_s) <= NUM_CLIENTS, (load.outcomes, routers.logs())
    assert max(load.lost_s, default=0.0) < killed_s, routers.logs()
    assert set(load.outcomes) <= {"served", "router_unavailable"}


@pytest.mark.long
async def test_routers_that_lose_touch_forget_each_others_requests_until_they_are_linked_again(
    http: aiohttp.ClientSession,
) -> None:
    """A network that drops every packet, without ending a connection."""
    num_open = 8
    async with Switch() as switch, fleet(http, switch=switch) as routers:

        async def all_told(num: int) -> bool:
            return sum([await told(each) for each in routers.routers]) == num

        async with open_requests(routers.client, num_open):
            await eventually(lambda: all_told(num_open))
            switch.turn(on=False)
            await eventually(lambda: all_told(0))
            async with Load(routers.client, MODELS, max_tokens=3).running() as load:
                await load.some()
            switch.turn(on=True)
            await eventually(routers.are_linked)
            await eventually(lambda: all_told(num_open))

    assert load.outcomes == load.all_served
