"""Requests that wait for room behind a real Envoy: who goes first, and what those hear who do not.

Every test fills its pods with a request that is streamed until the test ends it, so what comes
meanwhile is held. Answers are 200 or a 429 of the router's, never an error of the gateway's own.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import pytest

from extproc.envoy.bootstrap import Mode
from extproc.lab.engine.profiles import INSTANT
from extproc.lab.fakepod.podserver import PodConfig
from tests.e2e.conftest import SLOW, router_config, running_envoy
from tests.e2e.harness import Answer, Client, EnvoyProcess, RouterProcess
from tests.fakepods import running_pods
from tests.waiting import eventually

ADAPTERS = ["a", "b", "c", "d"]
OBJECTIVE, TENANT = "x-llm-d-inference-objective", "x-llm-d-inference-fairness-id"
ONE_AT_A_TIME = {"name": "tests.e2e.room:Room", "args": {"num": 1}}
MARGIN_S = 5.0
"""What docs/overload.md asks for between `max_hold_s` and the gateway's own timeout."""


@dataclass
class Scene:
    """A pod, a router and an Envoy."""

    client: Client
    router: RouterProcess
    envoy: EnvoyProcess

    @asynccontextmanager
    async def full(self) -> AsyncIterator[None]:
        """As long as a pod's only place is taken: by the adapter `a`."""
        async with self.client.streaming("a", max_tokens=4000):
            yield

    def send(self, *models: str, **options: Any) -> list[asyncio.Task[Answer]]:
        """Send a request for each."""
        loop = asyncio.get_running_loop()
        return [loop.create_task(self.client.chat(model, **options)) for model in models]

    async def hold(self, *models: str, **options: Any) -> list[asyncio.Task[Answer]]:
        """Send a request for each and return once they are held, in this order."""
        tasks = []
        for model in models:
            num_before = (await self.queue())["num_held"]
            tasks += self.send(model, **options)
            await self.until_held(num_before + 1)
        return tasks

    async def queue(self) -> dict[str, Any]:
        snapshot = await self.router.admin("/debug/snapshot")
        return dict(snapshot["queue"])

    async def until_held(self, num: int, for_s: float = 0.0) -> None:
        """Wait until so many are held, the oldest for so long."""

        async def are_held() -> bool:
            queue = await self.queue()
            return bool(queue["num_held"] == num and queue["oldest_s"] >= for_s)

        await eventually(are_held)

    async def ended(self) -> dict[str, int]:
        return {end: num for end, num in (await self.queue())["ended"].items() if num}

    async def held_models(self) -> list[str]:
        """The models of the requests that were held and got a pod, in that order."""
        page = await self.router.admin("/debug/decisions?n=999")
        picks = [each["pick"] for each in reversed(page["decisions"]) if "pick" in each]
        return [pick["model"] for pick in picks if pick["held_seconds"] is not None]

    async def has_no_faults(self) -> bool:
        """Whether Envoy has nothing to say against the router's answers."""
        stats = await self.envoy.stats("http.openai.ext_proc")
        names = ("streams_failed", "spurious_msgs_received", "message_timeouts")
        return not any(count for name, count in stats.items() if name.endswith(names))


@asynccontextmanager
async def queueing(
    http: aiohttp.ClientSession,
    *,
    mode: Mode = Mode.ORIGINAL_DST,
    pod: Mapping[str, Any] | None = None,
    envoy: Mapping[str, Any] | None = None,
    **sections: Any,
) -> AsyncIterator[Scene]:
    """One slow pod that has a slot, unless `pod` says otherwise."""
    options: dict[str, Any] = {"max_loras": 1, "profile": SLOW, **(pod or {})}
    async with running_pods(PodConfig(name="pod", adapters=ADAPTERS, **options)) as pods:
        # An engine says how many slots it has once it has used one.
        config = {
            **router_config(pods, server={"drain_timeout_s": 1}, **sections),
            "pods": {"max_loras": options["max_loras"]},
        }
        async with (
            RouterProcess(config) as router,
            running_envoy(mode, router, num_pods=1, **(envoy or {})) as gateway,
        ):
            yield Scene(Client(gateway.url, http), router, gateway)


def statuses(answers: list[Answer]) -> dict[int, int]:
    return dict(Counter(answer.status for answer in answers))


def is_told_when_to_return(answer: Answer) -> bool:
    return int(answer.headers["retry-after"]) >= 1


async def test_a_crowd_at_an_idle_pod_that_is_seldom_asked_is_not_held(
    http: aiohttp.ClientSession,
) -> None:
    scrape = {"interval_s": 2.0, "timeout_s": 1.0, "expiry_s": 6.0}
    async with queueing(http, scrape=scrape, pod={"profile": INSTANT}) as scene:
        answers = await asyncio.gather(*scene.send(*["a"] * 90))

        assert statuses(answers) == {200: 90}
        assert await scene.held_models() == []


# --- Envoy's timer ----------------------------------------------------------------------------

GATEWAYS = {
    "granted": {"message_timeout_s": 0.5, "max_message_timeout_s": 120.0},
    "not-granted": {"message_timeout_s": 1.0 + MARGIN_S, "max_message_timeout_s": 0.0},
}
"""`granted`: Envoy as `extproc envoy` configures it gives a held request more time. `not-granted`:
Envoy Gateway has no field for that, so the hold must be shorter than the timeout."""


@pytest.mark.parametrize("mode", [Mode.ORIGINAL_DST, Mode.OVERRIDE_HOST])
async def test_a_hold_may_be_longer_than_the_message_timeout_where_envoy_grants_it(
    http: aiohttp.ClientSession, mode: Mode
) -> None:
    async with queueing(http, mode=mode, envoy=GATEWAYS["granted"]) as scene:
        async with scene.full():
            held = await scene.hold("b", "c", "b")
            await scene.until_held(3, for_s=2 * GATEWAYS["granted"]["message_timeout_s"])
        answers = await asyncio.gather(*held)

        assert statuses(answers) == {200: 3}
        assert await scene.ended() == {"picked": 3}
        assert await scene.has_no_faults()


@pytest.mark.parametrize("mode", [Mode.ORIGINAL_DST, Mode.OVERRIDE_HOST])
async def test_where_envoy_grants_no_time_held_requests_are_released_before_it_is_over(
    http: aiohttp.ClientSession, mode: Mode
) -> None:
    request = {"max_hold_s": 30.0}
    envoy = {"message_timeout_s": 30.0 + MARGIN_S, "max_message_timeout_s": 0.0}
    async with queueing(http, mode=mode, envoy=envoy, request=request) as scene:
        async with scene.full():
            held = await scene.hold("b", "c")
        answers = await asyncio.gather(*held)

        assert statuses(answers) == {200: 2}
        assert await scene.has_no_faults()


@pytest.mark.parametrize("gateway", GATEWAYS)
@pytest.mark.parametrize("mode", [Mode.ORIGINAL_DST, Mode.OVERRIDE_HOST])
async def test_a_hold_that_finds_no_room_ends_with_our_429(
    http: aiohttp.ClientSession, mode: Mode, gateway: str
) -> None:
    request = {"max_hold_s": 1.0}
    async with queueing(http, mode=mode, envoy=GATEWAYS[gateway], request=request) as scene:
        async with scene.full():
            answers = await asyncio.gather(*scene.send("b", "c", "b"))

        assert statuses(answers) == {429: 3}
        assert {answer.error_code for answer in answers} == {"saturated"}
        assert all(is_told_when_to_return(answer) for answer in answers)
        assert await scene.ended() == {"expired": 3}
        assert await scene.has_no_faults()


# --- who goes first, and who is refused -------------------------------------------------------


async def test_a_higher_priority_goes_first_and_takes_the_place_of_a_sheddable_request(
    http: aiohttp.ClientSession,
) -> None:
    async with queueing(
        http,
        policy=ONE_AT_A_TIME,
        queue={"max_requests": 3, "ageing_s": 3600},
        request={"trusted_headers": ["objective"]},
        admission={"priorities": {"gold": 5, "batch": -1}},
    ) as scene:
        async with scene.full():
            batch = await scene.hold("b", "b", "b", headers={OBJECTIVE: "batch"})
            gold = scene.send("c", headers={OBJECTIVE: "gold"})
            displaced = await batch[2]
            [refused] = await asyncio.gather(*scene.send("d", headers={OBJECTIVE: "batch"}))
            ended = await scene.ended()
        served = await asyncio.gather(*gold, *batch[:2])

        assert [each.status for each in (displaced, refused)] == [429, 429]
        assert {each.error_code for each in (displaced, refused)} == {"saturated"}
        assert ended == {"displaced": 1, "full": 1}
        assert statuses(served) == {200: 3}
        assert await scene.held_models() == ["c", "b", "b"]


async def test_tenants_have_turns_though_one_has_ten_times_as_many_held(
    http: aiohttp.ClientSession,
) -> None:
    async with queueing(
        http,
        policy=ONE_AT_A_TIME,
        queue={"ageing_s": 3600},
        request={"trusted_headers": ["fairness_id"]},
        pod={"profile": replace(SLOW, step_s=0.01)},
    ) as scene:
        async with scene.full():
            noisy = await scene.hold(*["b"] * 20, headers={TENANT: "noisy"})
            quiet = await scene.hold(*["c"] * 2, headers={TENANT: "quiet"})
        answers = await asyncio.gather(*noisy, *quiet)
        order = await scene.held_models()

        assert statuses(answers) == {200: 22}
        assert sorted(order[:4]) == ["b", "b", "c", "c"]
        assert order[4:] == ["b"] * 18


async def test_a_route_that_rejects_is_answered_at_once_and_one_that_waits_is_served(
    http: aiohttp.ClientSession,
) -> None:
    routes = [
        {"name": "now", "models": ["b"], "on_unavailable": "reject"},
        {"name": "later", "models": ["c"], "on_unavailable": "wait"},
    ]
    async with queueing(http, routes=routes) as scene:
        async with scene.full():
            waits = await scene.hold("c")
            [rejected] = await asyncio.gather(*scene.send("b"))
            metrics = await scene.router.admin("/metrics")
        [served] = await asyncio.gather(*waits)

        async def is_served() -> bool:
            return (await scene.client.chat("b")).status == 200

        await eventually(is_served)
        assert (rejected.status, rejected.error_code) == (429, "saturated")
        assert is_told_when_to_return(rejected)
        assert 'extproc_held_requests{priority="0",route="later"} 1.0' in metrics
        assert 'extproc_holds_total{end="no_wait"} 1.0' in metrics
        assert served.status == 200


async def test_a_deadline_that_cannot_be_met_is_refused_at_once(
    http: aiohttp.ClientSession,
) -> None:
    """A thousand tokens take longer than a millisecond on any pod."""
    async with queueing(http, request={"trusted_headers": ["slo"]}) as scene:
        async with scene.full():
            late = await scene.client.chat("b", padding_bytes=4000, headers={"x-slo-ttft-ms": "1"})
            ended = await scene.ended()
            [said] = (await scene.router.admin("/debug/decisions?n=1"))["decisions"]

        assert (late.status, late.error_code) == (429, "late")
        assert is_told_when_to_return(late)
        assert late.json["error"]["type"] == "rate_limit_error"
        assert ended == {"late": 1}
        assert "Its first token would come late: 0 held." in said["explanation"]


# --- overload ---------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("gateway", GATEWAYS)
async def test_a_burst_beyond_the_bounds_ends_with_200_or_429_for_each(
    http: aiohttp.ClientSession, gateway: str
) -> None:
    num_requests = 2000
    async with queueing(
        http,
        envoy={**GATEWAYS[gateway], "message_timeout_s": 30.0},  # of a busy machine
        queue={"max_requests": 500},
        request={"max_hold_s": 30.0 - MARGIN_S},
    ) as scene:
        tasks = scene.send(*ADAPTERS * (num_requests // len(ADAPTERS)))
        answers = await asyncio.gather(*tasks)
        found, ended = statuses(answers), await scene.ended()

        refused = {(each.status, each.error_code) for each in answers if each.status != 200}
        assert refused == {(429, "saturated")}
        assert found[200] > 0
        assert ended["full"] > 0
        assert await scene.has_no_faults()
        await eventually(scene.router.has_none_in_flight)
