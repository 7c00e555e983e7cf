"""A pod that became slow is found from what a router tells: a metric, the log, the live page, the
time to first token by pod, and one request in words. Behind a real Envoy."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from extproc.envoy.bootstrap import Mode
from extproc.lab.engine.profiles import INSTANT
from extproc.lab.fakepod.podserver import RunningPod
from tests.browser import running_browser
from tests.commandline import error_line, invoke
from tests.e2e.conftest import own_pods, router_config, running_envoy
from tests.e2e.harness import Client, RouterProcess
from tests.waiting import eventually

FAST = replace(INSTANT, step_s=0.02)
SLOW = replace(INSTANT, step_s=0.1)
NUM_CLIENTS = 6
NUM_TOKENS = 20
WITHIN_S = 120.0


class Scene:
    """Three pods behind a router that asks them in turn, and clients that go on asking."""

    def __init__(
        self, pods: list[RunningPod], router: RouterProcess, url: str, http: aiohttp.ClientSession
    ) -> None:
        self.pods, self.router = pods, router
        self._client, self._http = Client(url, http), http

    async def go_on(self) -> None:
        while True:
            await self._client.served("shared", max_tokens=NUM_TOKENS)

    async def values(self, name: str) -> dict[str, float]:
        """Of a metric without other labels, by the value of its label."""
        page = await self.router.admin("/metrics")
        return {
            label: float(value)
            for label, value in re.findall(rf'^{name}{{\w+="([^"]*)"}} (\S+)', page, re.M)
        }

    async def frame(self) -> Any:
        """One frame of the live page's feed."""
        async with self._http.get(f"{self.router.admin_url}/live/feed") as feed:
            async for line in feed.content:
                if line.startswith(b"data: "):
                    return json.loads(line.removeprefix(b"data: "))
        raise AssertionError("the feed has ended")

    async def slow_in_page(self) -> dict[str, bool]:
        return {each["address"]: each["slow"] for each in (await self.frame())["pods"]}

    async def decision_of(self, address: str) -> Any:
        """A decision for that pod which has ended."""
        for _ in range(100):
            page = await self.router.admin("/debug/decisions?n=500")
            for decision in page["decisions"]:
                outcome = decision["outcome"]
                if outcome is not None and outcome["served_by"] == address:
                    return decision
            await asyncio.sleep(0.1)
        raise AssertionError(f"no decision for {address} has ended")


@asynccontextmanager
async def running() -> AsyncIterator[Scene]:
    async with own_pods(3, profile=FAST) as pods:
        config = router_config(pods, policy={"name": "round_robin"})
        config["pods"] = {"slow_ratio": 2.0, "slow_for_s": 3.0}
        async with (
            RouterProcess(config) as router,
            running_envoy(Mode.ORIGINAL_DST, router) as envoy,
            aiohttp.ClientSession() as http,
        ):
            scene = Scene(pods, router, envoy.url, http)
            clients = [asyncio.create_task(scene.go_on()) for _ in range(NUM_CLIENTS)]
            try:
                yield scene
            finally:
                for client in clients:
                    client.cancel()
                await asyncio.gather(*clients, return_exceptions=True)


async def test_a_pod_that_becomes_slow_is_shown_everywhere_until_it_recovers() -> None:
    async with running() as scene:
        *_, slow = scene.pods
        others = [pod.address for pod in scene.pods[:-1]]

        async def is_slow_to(ratio_from: float, ratio_to: float) -> bool:
            ratio = (await scene.values("extproc_endpoint_slowness_ratio")).get(slow.address, 0.0)
            is_slow = await scene.slow_in_page()
            said = ratio_from < ratio < ratio_to and not any(is_slow[each] for each in others)
            return said and is_slow[slow.address] is (ratio > 2)

        await eventually(lambda: is_slow_to(0.3, 2.0), within_s=WITHIN_S)
        slow.pod.runner.engine.change_profile(SLOW)
        await eventually(lambda: is_slow_to(2.0, 20.0), within_s=WITHIN_S)
        (line,) = re.findall(r"is slower than its peers: .*", scene.router.log)
        assert re.search(r"\d+ ms per output token, \d\.\d times the \d+ ms of", line)
        assert f"pod-2 ({slow.address}) is slower" in scene.router.log

        means = await mean_ttft_s(scene)
        assert means.keys() == {pod.address for pod in scene.pods}
        assert set(await scene.values("extproc_model_ttft_seconds_count")) == {"shared"}

        slow.pod.runner.engine.change_profile(FAST)
        await eventually(lambda: is_slow_to(0.3, 2.0), within_s=WITHIN_S)
        assert scene.router.log.count("is slower than its peers") == 1
        assert scene.router.log.count("is as fast as its peers again") == 1


async def mean_ttft_s(scene: Scene) -> dict[str, float]:
    sums = await scene.values("extproc_endpoint_ttft_seconds_sum")
    counts = await scene.values("extproc_endpoint_ttft_seconds_count")
    return {address: sums[address] / count for address, count in counts.items()}


@pytest.mark.long
async def test_the_live_page_has_a_column_of_times_per_token_and_says_how_requests_ended() -> None:
    async with running() as scene, running_browser() as browser:
        *_, slow = scene.pods
        slow.pod.runner.engine.change_profile(SLOW)
        page = await browser.open(f"{scene.router.admin_url}/")
        cell = "document.querySelector('#pods tr td[data-label=\"Time per token\"]').textContent"
        # Pods that are not well come first.
        await page.wait_for(f"/^[0-9.]+ ms .[2-9][.][0-9]...$/.test({cell})")
        state = "document.querySelector('#pods tbody .state').textContent"
        await page.wait_for(f"/^! slower than its peers/.test({state})")
        await page.wait_for(
            "[...document.querySelectorAll('#decisions .end')]"
            ".some(e => e.textContent.includes('with status 200, its first token after'))"
        )
        assert page.problems == []


async def test_a_request_of_the_slow_pod_is_told_in_words() -> None:
    async with running() as scene:
        *_, slow = scene.pods
        slow.pod.runner.engine.change_profile(SLOW)
        decision = await scene.decision_of(slow.address)
        outcome = decision["outcome"]
        assert (outcome["outcome"], outcome["status"], outcome["attempts"]) == ("completed", 200, 1)
        assert 0 < outcome["ttft_seconds"] < outcome["duration_seconds"]

        for name in (outcome["request_id"], decision["pick"]["id"]):
            told = await asyncio.to_thread(invoke, "watch", scene.router.address, "--request", name)
            assert told.exit_code == 0, told.output
            assert "shared  ->  pod-2  round_robin/" in told.stdout
            assert decision["explanation"] in told.stdout
            assert "with status 200, its first token after" in told.stdout
            assert "served by pod-2." in told.stdout

        unknown = await asyncio.to_thread(
            invoke, "watch", scene.router.address, "--request", "nobody"
        )
        said = error_line(unknown)
        assert "no decision about nobody is known here" in said
        assert "keeps its last 1000 decisions (admin.max_decisions)" in said
