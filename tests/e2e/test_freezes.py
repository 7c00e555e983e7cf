"""Random breaking and freezing, with honest load: what is lost is lost for a cause, and counted.

*Ours* is what no client may see for a fault of a pod, of the router or of Envoy that lasts for
moments: a model that is registered called unknown, or the router called unavailable while there is
one. Everything else has a cause on the list of the fault that was made.
"""

from __future__ import annotations

import asyncio
import random
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web

from extproc.envoyconfig import Mode
from tests.e2e.conftest import running_envoy
from tests.e2e.harness import (
    Answer,
    ChildProcess,
    Client,
    EnvoyProcess,
    RouterProcess,
    eventually,
    free_port,
)

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

ADAPTERS = ("chaos-0", "chaos-1", "chaos-2")
MODES = (Mode.ORIGINAL_DST, Mode.OVERRIDE_HOST, Mode.FULL_DUPLEX)

OURS = {"router_unavailable", "model_not_found", "invalid_json", "without a code"}


def cause(answer: Answer) -> str:
    """`served`; `pod: N` where a pod answered N; else the error's code."""
    if answer.status == 200:
        return "served"
    if answer.served_by:
        return f"pod: {answer.status}"
    return str(answer.error_code)


class PodProcess(ChildProcess):
    """A fake pod that can be stopped, gone on with, and killed."""

    def __init__(self, name: str, profile: str = "instant") -> None:
        super().__init__(name)
        self._profile = profile
        self.address = f"127.0.0.1:{free_port()}"

    async def start(self) -> None:
        """Start; return once it listens."""
        port = self.address.rpartition(":")[2]
        options = ["--name", "chaos", "--port", port, "--adapters", ",".join(ADAPTERS)]
        options += ["--profile", self._profile]
        self.spawn([sys.executable, "-m", "extproc.sim.fakepod.pod", *options])
        await eventually(self._is_up, within_s=45)

    async def _is_up(self) -> bool:
        assert self.returncode is None, self.log
        try:
            async with (
                aiohttp.ClientSession() as http,
                http.get(f"http://{self.address}/health") as answer,
            ):
                return answer.status == 200
        except aiohttp.ClientError:
            return False

    async def __aenter__(self) -> PodProcess:
        await self.start()
        return self


class ChaosLoad:
    """Clients that ask without pause; every request has one cause in the end."""

    def __init__(self, client: Client, num_clients: int = 6) -> None:
        self.causes: Counter[str] = Counter()
        self.num_begun = 0
        self._client = client
        self._num_clients = num_clients
        self._stopped = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[ChaosLoad]:
        async with asyncio.TaskGroup() as group:
            for number in range(self._num_clients):
                group.create_task(self._ask(number))
            try:
                yield self
            finally:
                self._stopped = True

    async def _ask(self, number: int) -> None:
        while not self._stopped:
            number += 1
            self.num_begun += 1
            try:
                answer = await self._client.chat(ADAPTERS[number % len(ADAPTERS)])
            except aiohttp.ClientError as error:
                self.causes[f"connection: {type(error).__name__}"] += 1
            else:
                self.causes[cause(answer)] += 1

    async def some(self, num: int = 40) -> Counter[str]:
        """Causes of the next `num`."""
        before = self.causes.copy()

        async def has_enough() -> bool:
            return self.causes.total() >= before.total() + num

        await eventually(has_enough, within_s=60)
        return self.causes - before


async def all_served(load: ChaosLoad) -> bool:
    """Whether the service is whole again, seen by forty requests in a row."""
    return set(await load.some()) == {"served"}


async def check_books(router: RouterProcess, load: ChaosLoad) -> None:
    """Every request has one end, and so has every pick."""
    assert load.num_begun == load.causes.total()
    await eventually(router.has_none_in_flight, within_s=60)
    picks = await router.counter("extproc_picks_total")
    assert picks == await router.counter("extproc_completions_total")
    assert await router.counter("extproc_picks_expired_total") == 0


def config(pods: Sequence[str], mode: Mode, **sections: object) -> dict[str, object]:
    """A router over these pods that notices within moments."""
    return {
        "discovery": {"static": list(pods)},
        "request": {"max_body_bytes": 2 * 1024 * 1024},
        "scrape": {"timeout_s": 0.3, "expiry_s": 0.5},
        "destination": {"num_fallbacks": 2 if mode is Mode.OVERRIDE_HOST else 0},
        **sections,
    }


@dataclass(frozen=True)
class Service:
    """An Envoy, its router, and three pods; whole again after each test."""

    pods: list[PodProcess]
    router: RouterProcess
    envoy: EnvoyProcess

    def load(self, http: aiohttp.ClientSession) -> ChaosLoad:
        return ChaosLoad(Client(self.envoy.url, http))


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=MODES, ids=str)
async def service(request: pytest.FixtureRequest) -> AsyncIterator[Service]:
    mode: Mode = request.param
    async with AsyncExitStack() as stack:
        pods = [await stack.enter_async_context(PodProcess("pod")) for _ in range(3)]
        router = await stack.enter_async_context(
            RouterProcess(config([pod.address for pod in pods], mode))
        )
        envoy = await stack.enter_async_context(running_envoy(mode, router, num_pods=3))
        yield Service(pods, router, envoy)


# --- freezes ---------------------------------------------------------------------------------


@pytest.mark.timeout(240)
async def test_freezes_of_a_moment_cost_no_request(
    service: Service, http: aiohttp.ClientSession
) -> None:
    """Shorter than any time limit, in random order: everything waits, and nothing is lost."""
    rng = random.Random(7)
    async with service.load(http).running() as load:
        await eventually(lambda: all_served(load), within_s=60)
        load.causes.clear()
        begun = load.num_begun
        all_but_pods: list[ChildProcess] = [service.router, service.envoy]
        for frozen in rng.sample([*all_but_pods * 2, *service.pods], k=7):
            frozen.send(signal.SIGSTOP)
            await asyncio.sleep(rng.uniform(0.05, 0.8))
            frozen.send(signal.SIGCONT)
            await load.some()
        assert load.num_begun > begun

    assert set(load.causes) == {"served"}, load.causes


@pytest.mark.timeout(240)
async def test_counts_add_up_after_freezes(service: Service, http: aiohttp.ClientSession) -> None:
    async with service.load(http).running() as load:
        for frozen in (service.router, service.pods[0], service.envoy):
            await load.some()
            frozen.send(signal.SIGSTOP)
            await asyncio.sleep(1.0)
            frozen.send(signal.SIGCONT)
        await eventually(lambda: all_served(load), within_s=60)
    await check_books(service.router, load)

    assert not OURS.intersection(load.causes), load.causes


@pytest.mark.timeout(240)
@pytest.mark.parametrize("mode", MODES)
async def test_a_router_frozen_for_longer_than_envoy_waits_costs_what_envoy_says(
    mode: Mode, http: aiohttp.ClientSession
) -> None:
    async with AsyncExitStack() as stack:
        pods = [await stack.enter_async_context(PodProcess("pod")) for _ in range(2)]
        router = await stack.enter_async_context(
            RouterProcess(config([pod.address for pod in pods], mode))
        )
        envoy = await stack.enter_async_context(
            running_envoy(mode, router, num_pods=2, message_timeout_s=1.0)
        )
        async with ChaosLoad(Client(envoy.url, http)).running() as load:
            await eventually(lambda: all_served(load), within_s=60)
            router.send(signal.SIGSTOP)
            await asyncio.sleep(4.0)
            router.send(signal.SIGCONT)
            await eventually(lambda: all_served(load), within_s=60)
        await check_books(router, load)

    # Health checks find out meanwhile, and from then on nobody is asked: that is said as it is.
    allowed = {"served", "router_timeout", "router_unavailable"}
    assert set(load.causes) <= allowed, load.causes
    if mode is Mode.OVERRIDE_HOST:
        assert set(load.causes) == {"served"}, load.causes


# --- fast failures ---------------------------------------------------------------------------


@asynccontextmanager
async def failing_pod(status: int) -> AsyncIterator[str]:
    """A pod whose pages are good and whose answers are `status` at once; its address."""

    async def page(request: web.Request) -> web.Response:
        return web.Response(text="vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n")

    async def models(request: web.Request) -> web.Response:
        cards = [{"id": name, "parent": "base"} for name in ADAPTERS]
        return web.json_response({"data": cards})

    async def fail(request: web.Request) -> web.Response:
        return web.json_response({"error": {}}, status=status, headers={"x-served-by": "failing"})

    app = web.Application()
    app.router.add_get("/metrics", page)
    app.router.add_get("/metrics/", page)
    app.router.add_get("/v1/models", models)
    app.router.add_post("/{path:.*}", fail)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        yield f"{host}:{port}"
    finally:
        await runner.cleanup()


@pytest.mark.timeout(240)
@pytest.mark.parametrize("mode", MODES)
async def test_a_pod_that_fails_at_once_costs_its_own_answers_and_nothing_of_ours(
    mode: Mode, http: aiohttp.ClientSession
) -> None:
    """What it fails is said by it; and it does not draw all requests by being done so fast."""
    async with AsyncExitStack() as stack:
        pods = [
            await stack.enter_async_context(PodProcess("pod", "a10g-7b-slora")) for _ in range(2)
        ]
        failing = await stack.enter_async_context(failing_pod(500))
        addresses = [*(pod.address for pod in pods), failing]
        router = await stack.enter_async_context(
            RouterProcess(config(addresses, mode, policy={"name": "least_pending"}))
        )
        envoy = await stack.enter_async_context(running_envoy(mode, router, num_pods=3))
        async with ChaosLoad(Client(envoy.url, http)).running() as load:
            await load.some(300)
            later = await load.some(300)
        await check_books(router, load)

    assert set(load.causes) <= {"served", "pod: 500"}, load.causes
    # A third is its share by right; more is what it would draw.
    assert later["pod: 500"] <= later.total() / 3, later


@pytest.mark.timeout(240)
async def test_a_pod_that_comes_to_refuse_connections_costs_a_clear_error_at_most(
    service: Service, http: aiohttp.ClientSession
) -> None:
    async with service.load(http).running() as load:
        await eventually(lambda: all_served(load), within_s=60)
        await service.pods[0].kill()
        await eventually(lambda: all_served(load), within_s=60)
        # While reports were fresh it failed some; it must not again when they are old.
        after = await load.some(300)
        await service.pods[0].start()
        await eventually(lambda: all_served(load), within_s=60)
    await check_books(service.router, load)

    assert set(load.causes) <= {"served", "endpoint_unavailable"}, load.causes
    assert set(after) == {"served"}, after
