"""Objectives, by Envoy's access log: on the first token, where the headers before do not count, and
on the time per output token, of which the log knows bytes alone."""

from __future__ import annotations

import asyncio
import re
from contextlib import suppress
from dataclasses import replace

import aiohttp
import pytest

from extproc.envoy.bootstrap import Mode
from extproc.lab.engine.profiles import INSTANT
from tests.e2e.conftest import pod_config, router_config, running_envoy
from tests.e2e.harness import Client, RouterProcess
from tests.fakepods import running_pods
from tests.waiting import eventually

SLO_S = 1.0
LONG_S = 3.0
STEP_S = 0.1  # stalls of a busy machine are short beside a response
NUM_TOKENS = 25


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", list(Mode))
async def test_a_streamed_response_is_judged_by_its_first_token(mode: Mode) -> None:
    """The pod sends the headers at once in each case."""
    slow = replace(INSTANT, step_s=LONG_S)
    async with running_pods(pod_config(0), pod_config(1, profile=slow)) as pods:
        config = router_config(pods, admin={"slo_ttft_s": SLO_S})
        async with (
            RouterProcess(config) as router,
            running_envoy(mode, router, num_pods=2) as envoy,
            aiohttp.ClientSession() as http,
        ):
            client = Client(envoy.url, http)

            async def leave_after(within_s: float) -> None:
                with suppress(TimeoutError):
                    async with asyncio.timeout(within_s):
                        await client.served("only-1", max_tokens=1)

            async def are(attained: int, missed: int) -> bool:
                pattern = r'extproc_slo_requests_total\{.*"(true|false)".*\} (\d+)'
                found = dict(re.findall(pattern, await router.admin("/metrics")))
                return (int(found.get("true", 0)), int(found.get("false", 0))) == (attained, missed)

            await client.served("only-0", max_tokens=1)
            await eventually(lambda: are(1, 0))
            await client.served("only-1", max_tokens=1)
            await eventually(lambda: are(1, 1))
            await leave_after(2 * SLO_S)
            await eventually(lambda: are(1, 2))


@pytest.mark.long
async def test_the_time_per_output_token_is_that_of_the_pods() -> None:
    slow = replace(INSTANT, step_s=STEP_S)
    async with (
        running_pods(pod_config(0, profile=slow), pod_config(1, profile=slow)) as pods,
        RouterProcess(router_config(pods)) as router,
        running_envoy(Mode.ORIGINAL_DST, router, num_pods=2) as envoy,
        aiohttp.ClientSession() as http,
    ):
        client = Client(envoy.url, http)

        async def metric(name: str) -> float:
            found = re.search(name + r"\{.*\} (\S+)", await router.admin("/metrics"))
            return float(found[1]) if found else 0.0

        async def totals() -> tuple[float, float]:
            each = ("extproc_tpot_seconds_total", "extproc_tpot_responses_total")
            return await metric(each[0]), await metric(each[1])

        async def of_pods() -> tuple[float, float]:
            pages = [await (await http.get(f"{pod.url}/metrics")).text() for pod in pods]
            pattern = r"vllm:inter_token_latency_seconds_%s\{.*\} (\S+)"
            sum_s, num = (
                sum(float(found) for page in pages for found in re.findall(pattern % part, page))
                for part in ("sum", "count")
            )
            return sum_s, num

        async def agrees() -> bool:
            """Ask until eight more are judged, and compare the seconds per token of the same time:
            a machine that stands still delays single responses, and not all."""
            (before_s, before), (pods_before_s, pods_before) = await totals(), await of_pods()
            sum_s, num = before_s, before
            while num < before + 8:
                await client.ask(8, "shared", stream=True, max_tokens=NUM_TOKENS)
                sum_s, num = await totals()
            pods_s, pods_num = await of_pods()
            told_s = (sum_s - before_s) / (num - before)
            between_s = (pods_s - pods_before_s) / (pods_num - pods_before)
            error = await metric("extproc_token_bytes_error_ratio")
            return 0 < error < 0.2 and told_s == pytest.approx(between_s, rel=max(3 * error, 0.15))

        await eventually(agrees)
