"""Several routers behind one Envoy, which sends its access log to one of them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from extproc.envoyconfig import Mode, TlsFiles
from extproc.sim.engine.profiles import INSTANT
from extproc.sim.fakepod.pod import start_pod
from tests.e2e.conftest import NUM_PODS, pod_config, router_config, running_envoy
from tests.e2e.harness import (
    Answer,
    Client,
    EnvoyProcess,
    RouterProcess,
    chat,
    eventually,
    free_port,
)
from tests.shell.pki import Pki

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(300),  # several processes start at once, on whatever machine
]

PATH = "/v1/chat/completions"
SLOW = replace(INSTANT, step_s=0.02)
"""An engine that needs 20 ms for a token."""
NUM_CLIENTS = 8
PATIENCE_S = 60.0

# So that a pick ends by an entry or, within a test, not at all.
ONLY_BY_ENTRIES = {"source": "access_log", "lost_after_s": 600.0}
# Entries that were on their way to a router when it went are lost; then the pods' counts tell.
WITH_REPAIR = {"source": "auto", "lost_after_s": 2.0}
LEAST_PENDING = {"name": "least_pending"}


def outcome(answer: Answer) -> str:
    """`served`, or the code of an error."""
    return "served" if answer.status == 200 else str(answer.error_code)


@dataclass
class Fleet:
    """Routers that know each other, one Envoy before them, pods behind."""

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
        return not any(await self.counters("peers_connected"))

    async def are_believed_in(self) -> bool:
        """Whether Envoy's health checks have found every router. They are up to a second behind."""
        return await self.envoy.believes_in(*(router.address for router in self.routers))

    def story(self) -> str:
        """What the routers wrote last, for a test that failed."""
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
    **sections: Any,
) -> AsyncIterator[Fleet]:
    """Routers that are linked. With a `switch` they reach each other through it alone."""
    async with AsyncExitStack() as stack:
        pods = [await start_pod(pod_config(n, profile=SLOW)) for n in range(NUM_PODS)]
        for pod in pods:
            stack.push_async_callback(pod.stop)
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
        await asyncio.gather(*(router.start(within_s=PATIENCE_S) for router in routers))
        running = running_envoy(
            Mode.ORIGINAL_DST, *routers, shared_access_log=True, router_tls=router_tls
        )
        envoy = await stack.enter_async_context(running)
        made = Fleet(routers, envoy, Client(envoy.url, http))
        await eventually(made.are_linked)
        await eventually(made.are_believed_in)
        yield made


class Load:
    """Clients that ask without pause, until told to stop; what came of it is kept."""

    def __init__(self, client: Client, models: Sequence[str] = ("base", "shared")) -> None:
        self.answers: list[tuple[float, Answer]] = []
        self._client = client
        self._models = models
        self._stopped = False

    @property
    def outcomes(self) -> Counter[str]:
        """`served`, or the code of the error."""
        return Counter(outcome(answer) for _, answer in self.answers)

    @property
    def all_served(self) -> dict[str, int]:
        """What `outcomes` is if nothing failed."""
        return {"served": len(self.answers)}

    async def _ask(self, number: int) -> None:
        while not self._stopped:
            began_s = time.monotonic()
            model = self._models[number % len(self._models)]
            async with asyncio.timeout(60):
                answer = await self._client.chat(model, max_tokens=3)
            self.answers.append((began_s, answer))
            number += 1

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Load]:
        async with asyncio.TaskGroup() as group:
            for number in range(NUM_CLIENTS):
                group.create_task(self._ask(number))
            try:
                yield self
            finally:
                self._stopped = True

    async def some(self, num: int = 40) -> list[Answer]:
        """The next `num` answers."""
        seen = len(self.answers)

        async def has_enough() -> bool:
            return len(self.answers) >= seen + num

        await eventually(has_enough, within_s=PATIENCE_S)
        return [answer for _, answer in self.answers[seen : seen + num]]


class Switch:
    """TCP forwarders between routers. Off: nothing passes any more, and nobody is told."""

    def __init__(self) -> None:
        self._is_on = asyncio.Event()
        self._is_on.set()
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def turn(self, *, on: bool) -> None:
        if on:
            self._is_on.set()
        else:
            self._is_on.clear()

    async def to(self, target: str) -> str:
        """An address that leads to `target`."""

        async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.ensure_future(self._join(target, reader, writer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        server = await asyncio.start_server(forward, "127.0.0.1", 0)
        self._servers.append(server)
        return f"127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _join(
        self, target: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await self._is_on.wait()
        host, _, port = target.rpartition(":")
        try:
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.close()
            return
        async with asyncio.TaskGroup() as group:
            group.create_task(self._pump(reader, far_writer))
            group.create_task(self._pump(far_reader, writer))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65_536):
                await self._is_on.wait()
                writer.write(data)
        except OSError:
            pass
        finally:
            writer.close()

    async def __aenter__(self) -> Switch:
        return self

    async def __aexit__(self, *_: object) -> None:
        for server in self._servers:
            server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


# --- counts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_routers", [2, 3])
async def test_each_router_hears_how_its_own_picks_ended_though_one_gets_the_whole_log(
    num_routers: int, http: aiohttp.ClientSession
) -> None:
    models = ["base", "shared", *(f"only-{n}" for n in range(NUM_PODS))]
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


async def test_each_routers_count_is_what_it_has_open_while_others_requests_end(
    http: aiohttp.ClientSession,
) -> None:
    """Long answers stay counted, short ones do not, and a client that leaves is noticed."""
    num_open = 12
    async with fleet(http) as routers, AsyncExitStack() as stack:

        async def has_in_flight(num: int) -> bool:
            return sum(await routers.counters("picks_in_flight")) == num

        answers = []
        for number in range(num_open):
            body = chat(f"only-{number % NUM_PODS}", stream=True, max_tokens=4000, ignore_eos=True)
            asking = http.post(
                routers.envoy.url + PATH, data=body, headers={"content-type": "application/json"}
            )
            answer = await stack.enter_async_context(asking)
            await answer.content.readline()
            answers.append(answer)
        own = await routers.counters("picks_total")
        counted = await routers.counters("picks_in_flight")
        async with Load(routers.client).running() as load:
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


async def test_entries_are_passed_on_over_mutual_tls(
    http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    """With the files that the routers listen with, which they share."""
    pki = Pki(tmp_path)
    cert, key = (str(path) for path in pki.issue("routers"))
    envoy_cert, envoy_key = (str(path) for path in pki.issue("envoy"))
    tls = {"cert_file": cert, "key_file": key, "client_ca_file": str(pki.ca)}
    files = TlsFiles(ca=str(pki.ca), cert=envoy_cert, key=envoy_key, server_name="localhost")
    async with fleet(http, server={"tls": tls}, router_tls=files) as routers:
        async with Load(routers.client).running() as load:
            await load.some(100)
        await eventually(routers.have_none_in_flight)
        sent = await routers.counters("peer_entries_total")

    assert load.outcomes == load.all_served
    assert all(sent)


# --- routers that go and come ----------------------------------------------------------------


@pytest.mark.parametrize("drain_delay_s", [0.0, 1.5])
async def test_no_request_fails_while_one_router_after_the_other_is_restarted(
    drain_delay_s: float, http: aiohttp.ClientSession
) -> None:
    server = {"drain_delay_s": drain_delay_s}
    async with fleet(http, server=server, completions=WITH_REPAIR) as routers:
        async with Load(routers.client).running() as load:
            for number in range(4):
                router = routers.routers[number % 2]
                await load.some()
                assert await router.stop(within_s=60) == 0
                await load.some()
                await router.start(within_s=PATIENCE_S)
                await eventually(routers.are_believed_in)
            await load.some()
            await eventually(routers.are_linked)
        await eventually(routers.have_none_in_flight)
        known = await routers.counters("routers")

    assert load.outcomes == load.all_served, routers.story()
    assert known == [2, 2]


async def test_a_killed_router_costs_at_most_what_it_was_deciding_and_balance_stays(
    http: aiohttp.ClientSession,
) -> None:
    async with fleet(http, completions=WITH_REPAIR, policy=LEAST_PENDING) as routers:
        async with Load(routers.client).running() as load:
            await load.some()
            await routers.routers[0].kill()
            gone_s = time.monotonic()
            await load.some()
            alone = await load.some(90)
            await routers.routers[0].start(within_s=PATIENCE_S)
            await eventually(routers.are_linked)
            await load.some()
            both = await load.some(90)
        await eventually(routers.have_none_in_flight)
        known = await routers.counters("routers")

    failed = [(began_s, answer) for began_s, answer in load.answers if answer.status != 200]
    print(f"a killed router: {load.outcomes}")
    # A client has one request at a time: those under way at that moment, and none that came later.
    assert len(failed) <= NUM_CLIENTS, (load.outcomes, routers.story())
    assert all(began_s < gone_s for began_s, _ in failed), routers.story()
    assert {outcome(answer) for _, answer in failed} <= {"router_unavailable"}
    for answers in (alone, both):
        served = Counter(answer.served_by for answer in answers)
        assert len(served) == NUM_PODS
        assert min(served.values()) > len(answers) / NUM_PODS / 2, served
    assert known == [2, 2]


async def test_routers_that_cannot_reach_each_other_go_on_and_catch_up_afterwards(
    http: aiohttp.ClientSession,
) -> None:
    """A network that swallows everything: nobody is told that a connection has ended."""
    async with Switch() as switch, fleet(http, switch=switch, peers={"hold_s": 60}) as routers:
        async with Load(routers.client).running() as load:
            await load.some()
            switch.turn(on=False)
            await eventually(routers.are_apart)
            await load.some()
            known = await routers.counters("routers")
        has_lost_sight = not await routers.have_none_in_flight()
        switch.turn(on=True)
        await eventually(routers.are_linked)
        await eventually(routers.have_none_in_flight)
        dropped = await routers.counters("peer_entries_dropped_total")

    assert load.outcomes == load.all_served
    assert known == [2, 2]
    assert has_lost_sight
    assert dropped == [0, 0]
