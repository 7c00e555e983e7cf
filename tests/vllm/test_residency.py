"""Inferred residency against what a real engine holds, after random sequences of requests.

Two adapters that were last in the batch of the same step have no order that could be known: the
engine touches them in the order of a Python set. Where such a pair lies on the edge of a cache,
either of the two is accepted; the engine's own step numbers say when. Nothing else is excused.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from extproc.pods.residency import Residency
from extproc.reports.engines import PROFILES
from extproc.reports.exposition import parse_report
from extproc.types import LoadReport
from tests.vllm.conftest import StartServers
from tests.vllm.server import (
    ADAPTERS,
    BASE_MODEL,
    MAX_CPU_LORAS,
    MAX_LORAS,
    EngineAdapter,
    EngineCaches,
    VllmClient,
    VllmServer,
    seeds,
)

STARTED_WITH, LOADED_LATER = ADAPTERS[:-1], ADAPTERS[-1]
PROFILE = PROFILES["vllm"]
SCRAPE_INTERVAL_S = 0.05
MAX_TOKENS = 40


@dataclass
class Router:
    """The part of a router that knows one endpoint: it scrapes, it polls, it sends."""

    client: VllmClient
    residency: Residency
    num_scrapes: int = 0

    async def scrape(self) -> LoadReport:
        asked_at_s = time.monotonic()
        query = "&".join(f"name[]={family}" for family in PROFILE.families)
        page = await self.client.get(f"/metrics/?{query}")
        report = parse_report(page, PROFILE)
        self.residency.reported(report, now=time.monotonic(), asked_at_s=asked_at_s)
        self.num_scrapes += 1
        return report

    async def scraped_twice(self) -> None:
        """Wait for two scrapes that begin after now."""
        wanted = self.num_scrapes + 3
        while self.num_scrapes < wanted:
            await asyncio.sleep(SCRAPE_INTERVAL_S / 5)

    async def poll(self) -> None:
        adapters = await self.client.adapters()
        self.residency.listed(adapters, now=time.monotonic())

    async def send(self, model: str, max_tokens: int) -> None:
        if model != BASE_MODEL:
            self.residency.picked(model)
        await self.client.complete(model, max_tokens=max_tokens)
        if model != BASE_MODEL:
            self.residency.ended(model, 1, True, time.monotonic())

    @asynccontextmanager
    async def scraping(self) -> AsyncIterator[None]:
        """Scrape all the while, and once more at the end."""

        async def scrape_on() -> None:
            while True:
                await self.scrape()
                await asyncio.sleep(SCRAPE_INTERVAL_S)

        async with asyncio.TaskGroup() as group:
            scraping = group.create_task(scrape_on())
            yield
            scraping.cancel()
        await self.scrape()


@pytest.fixture(scope="module")
def vllm_server(start_vllm_servers: StartServers) -> Iterator[VllmServer]:
    """A server of its own, whose history is known from its start."""
    [server] = asyncio.run(start_vllm_servers(1, adapters=STARTED_WITH))
    yield server
    asyncio.run(server.close())


@pytest.fixture(scope="module")
def residency() -> Residency:
    """The view of a router that has run since the engine came up."""
    return Residency(max_loras=MAX_LORAS, max_cpu_loras=MAX_CPU_LORAS)


@pytest.fixture
def router(vllm_client: VllmClient, residency: Residency) -> Router:
    return Router(vllm_client, residency)


@pytest.fixture
def newcomer(vllm_client: VllmClient) -> Router:
    """A router that starts now and has seen nothing."""
    return Router(vllm_client, Residency(max_loras=None, max_cpu_loras=MAX_CPU_LORAS))


def assert_holds(
    inferred: Sequence[str], held: Sequence[EngineAdapter], ever: Sequence[EngineAdapter]
) -> None:
    """`inferred` is what the engine holds, but for a tie on the edge of the cache.

    `ever` has the adapters that could be asked for, by their present id.
    """
    present = {adapter.id for adapter in ever}
    edge = min(adapter.touched_step for adapter in held)
    expected = {adapter.name for adapter in held if adapter.id in present}
    tied = {adapter.name for adapter in ever if adapter.touched_step == edge}
    assert len(inferred) == len(expected), (inferred, held, ever)
    assert set(inferred) ^ expected <= tied, (inferred, held, ever)


async def assert_caches(
    client: VllmClient, gpu_adapters: Sequence[str], cpu_adapters: Sequence[str]
) -> EngineCaches:
    """The inferred GPU slots and CPU cache are what the worker holds, which is returned."""
    caches = await client.caches()
    newest = {a.name: a for a in sorted(caches.ever, key=lambda a: a.id)}
    present = [newest[name] for name in await client.adapters()]
    assert_holds(gpu_adapters, caches.gpu, present)
    assert_holds(cpu_adapters, caches.cpu, present)
    return caches


async def assert_equals_engine(router: Router) -> EngineCaches:
    """The caches agree, and the probe agrees with the engine's own `list_loras`."""
    residency = router.residency
    caches = await assert_caches(router.client, residency.gpu_adapters, residency.cpu_adapters)
    assert {adapter.id for adapter in caches.cpu} == await router.client.listed_loras()
    return caches


def random_bursts(
    rng: random.Random, names: Sequence[str], *, min_tokens: int
) -> list[list[tuple[str, int]]]:
    """Bursts of requests at once, as (model, tokens); lengths differ within a burst."""
    bursts = []
    for _ in range(rng.randint(4, 7)):
        size = rng.choice((1, 1, 1, 2, 3, 5))
        lengths = rng.sample(range(min_tokens, MAX_TOKENS), size)
        bursts.append([(rng.choice(names), length) for length in lengths])
    return bursts


async def test_adapters_given_at_the_start_are_loaded_in_listing_order(router: Router) -> None:
    """Nothing was asked yet: the engine holds the last ones of the listing."""
    await router.poll()
    await router.scrape()

    caches = await assert_equals_engine(router)

    newest_first = tuple(reversed(STARTED_WITH))
    assert router.residency.gpu_adapters == newest_first[:MAX_LORAS]
    assert router.residency.cpu_adapters == newest_first[:MAX_CPU_LORAS]
    assert tuple(adapter.name for adapter in caches.cpu) == newest_first[:MAX_CPU_LORAS]


@pytest.mark.parametrize("seed", seeds(0, 24))
async def test_inferred_residency_equals_that_of_the_engine(router: Router, seed: int) -> None:
    """Base and adapter traffic mixed, one at a time and at once, also answers of one token."""
    rng = random.Random(seed)

    async with router.scraping():
        for burst in random_bursts(rng, [BASE_MODEL, *STARTED_WITH], min_tokens=1):
            await asyncio.gather(*(router.send(*request) for request in burst))
    await router.poll()

    await assert_equals_engine(router)


@pytest.mark.parametrize("seed", seeds(100, 24))
async def test_residency_is_inferred_from_scrapes_alone(
    router: Router, newcomer: Router, seed: int
) -> None:
    """A router that just started infers it from one page and one listing.

    The last use of what is resident must show in the log, so answers have two tokens or more, and
    each sequence begins with as many adapters as the CPU cache holds.
    """
    rng = random.Random(seed)
    first = [[(name, 2)] for name in rng.sample(STARTED_WITH, MAX_CPU_LORAS)]

    for burst in first + random_bursts(rng, [BASE_MODEL, *STARTED_WITH], min_tokens=2):
        await asyncio.gather(*(router.send(*request) for request in burst))
    await newcomer.poll()
    await newcomer.scrape()

    await assert_equals_engine(newcomer)


@pytest.mark.parametrize("seed", seeds(200, 12))
async def test_requests_of_other_routers_are_inferred_from_the_log(
    router: Router, newcomer: Router, seed: int
) -> None:
    """Two routers share the engine, take turns, and each knows of its own requests alone.

    The turns are two scrapes apart: the end of our own request is seen where the answer arrives,
    the log is written elsewhere, and a busy machine can delay either by some steps.
    """
    rng = random.Random(seed)
    first = [[(name, 8)] for name in rng.sample(STARTED_WITH, MAX_CPU_LORAS)]

    async with router.scraping(), newcomer.scraping():
        await newcomer.poll()
        for burst in first + random_bursts(rng, [BASE_MODEL, *STARTED_WITH], min_tokens=2):
            sender = rng.choice((router, newcomer))
            await asyncio.gather(*(sender.send(*request) for request in burst))
            await router.scraped_twice()
            await newcomer.scraped_twice()

    await assert_equals_engine(newcomer)
    await assert_equals_engine(router)


def _under_way(report: LoadReport) -> int:
    return report.num_running + report.num_waiting


async def test_requests_that_wait_for_a_slot_have_loaded_nothing(router: Router) -> None:
    """Three adapters in flight over two slots: the two that came first hold them."""
    first, second, third, *rest = STARTED_WITH
    for adapter in (third, *rest):
        await router.send(adapter, 4)

    async with asyncio.TaskGroup() as group:
        for num_sent, adapter in enumerate((first, second, third), start=1):
            group.create_task(router.send(adapter, 400))
            while _under_way(report := await router.scrape()) < num_sent:
                await asyncio.sleep(0.02)
        caches = await router.client.caches()
        inferred = router.residency.gpu_adapters

    assert report.num_deferred == 1
    assert {adapter.name for adapter in caches.gpu} == {first, second}
    assert set(inferred) == {first, second}
    await assert_equals_engine(router)


async def test_a_client_that_leaves_ends_what_its_adapter_holds(router: Router) -> None:
    """An abandoned request has touched its adapter until it was abandoned, and not after."""
    gone, *others = STARTED_WITH[:3]
    task = asyncio.create_task(router.client.complete(gone, max_tokens=450))
    router.residency.picked(gone)
    await asyncio.sleep(0.2)
    task.cancel()
    await asyncio.sleep(0.2)
    router.residency.ended(gone, 1, True, time.monotonic())
    await assert_equals_engine(router)

    for adapter in others:
        await router.send(adapter, 4)
    await router.scrape()

    caches = await assert_equals_engine(router)
    assert gone not in {adapter.name for adapter in caches.gpu}


async def test_a_response_of_one_token_does_not_show_in_the_log(router: Router) -> None:
    """Why our own requests are followed at all: the log alone would miss this one."""
    silent, *others = STARTED_WITH
    for adapter in others:
        await router.send(adapter, 4)
    before = await router.scrape()

    await router.send(silent, 1)
    after = await router.scrape()

    assert dict(after.adapter_log).get(silent) == dict(before.adapter_log).get(silent)
    assert router.residency.gpu_adapters[0] == silent
    await assert_equals_engine(router)


async def test_requests_for_the_base_model_load_no_adapter(router: Router) -> None:
    """They write a series that names none, and evict nothing."""
    await router.send(STARTED_WITH[0], 4)
    await router.scrape()
    before = router.residency.cpu_adapters

    await router.send(BASE_MODEL, 8)
    report = await router.scrape()

    assert report.active_adapters == frozenset()
    assert router.residency.cpu_adapters == before
    await assert_equals_engine(router)


async def test_loads_and_unloads_are_followed(router: Router) -> None:
    """A load takes a slot; an unload frees none; a second load takes another."""
    client = router.client
    used = STARTED_WITH[0]
    await router.send(used, 4)
    await client.load(LOADED_LATER)
    await router.poll()
    assert list(router.residency.gpu_adapters) == [LOADED_LATER, used]
    await assert_equals_engine(router)

    await client.unload(LOADED_LATER)
    await router.poll()
    caches = await assert_equals_engine(router)
    assert LOADED_LATER in {adapter.name for adapter in caches.gpu}
    assert list(router.residency.gpu_adapters) == [used]

    await client.load(LOADED_LATER)
    await router.poll()
    caches = await assert_equals_engine(router)
    assert [adapter.name for adapter in caches.gpu] == [LOADED_LATER] * 2
    assert list(router.residency.gpu_adapters) == [LOADED_LATER]
    assert len(router.residency.cpu_adapters) == MAX_CPU_LORAS - 1

    for adapter in STARTED_WITH[1:4]:
        await router.send(adapter, 4)
    await router.scrape()
    await assert_equals_engine(router)
    await client.unload(LOADED_LATER)
    await router.poll()
    await assert_equals_engine(router)
