"""How requests end, as far as the response phases of a gateway tell: never better than the client
saw it."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from extproc.envoy.bootstrap import Mode
from tests.e2e.charts import Chart, EppProcess, gateway_config
from tests.e2e.conftest import running_envoy
from tests.e2e.cuttingpod import CUT, CUT_HEADER, ID_HEADER, MODEL, Answer, CuttingPod, cutting_pod
from tests.e2e.harness import EnvoyProcess, RouterProcess
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(240)

ACCESS_LOG = "access log"
NUM_ASKED = 150
MODES = ("NONE", "STREAMED", "BUFFERED", "FULL_DUPLEX_STREAMED")


@dataclass(frozen=True)
class Gateway:
    """A running Envoy before a pod that cuts, and its router."""

    mode: str
    url: str
    http: aiohttp.ClientSession
    router: RouterProcess
    pod: CuttingPod

    async def ask(self, answer: Answer) -> str:
        """How a client sees its request end: whole, with its status, or not."""
        prompt = secrets.randbelow(1000) * "p"
        body = json.dumps({"model": MODEL, "prompt": prompt, "stream": True})
        id_ = secrets.token_hex(8)
        headers = {CUT_HEADER: answer, ID_HEADER: id_, "content-type": "application/json"}
        status = 0
        sent = self.http.post(f"{self.url}/v1/completions", data=body, headers=headers)
        try:
            if answer is Answer.SILENT or (answer is Answer.SLOW and self.mode == "BUFFERED"):
                asking = asyncio.ensure_future(sent)
                await self.pod.arrived[id_].wait()
                asking.cancel()
                return "left before its answer"
            async with sent as got:
                status = got.status
                if answer is Answer.SLOW:
                    await got.content.readany()
                    return "left in its answer"
                await got.read()
        except aiohttp.ClientError:
            return "cut in its answer" if status else "cut before its answer"
        return f"whole {status}"

    async def outcomes(self) -> Counter[str]:
        families = text_string_to_metric_families(await self.router.admin("/metrics"))
        return Counter(
            {
                sample.labels["outcome"]: int(sample.value)
                for family in families
                for sample in family.samples
                if sample.name == "extproc_completions_total"
            }
        )


@asynccontextmanager
async def gateway(
    mode: str,
    http: aiohttp.ClientSession,
    *,
    is_http2: bool = False,
    pods: Sequence[CuttingPod] = (),
    **config: Any,
) -> AsyncIterator[Gateway]:
    """A gateway whose responses' bodies pass the router in a mode, or whose Envoy logs to it."""
    async with AsyncExitStack() as stack:
        pods = pods or [await stack.enter_async_context(cutting_pod())]
        static = [{"address": pod.address} for pod in pods]
        document = {"discovery": {"static": static}, "outliers": {"enabled": False}, **config}
        if mode == ACCESS_LOG:
            router = await stack.enter_async_context(RouterProcess(document))
            envoy = await stack.enter_async_context(running_envoy(Mode.ORIGINAL_DST, router))
        else:
            router = await stack.enter_async_context(EppProcess(document))
            text = gateway_config(
                Chart.ORIGINAL_DST, router.address, response_body=mode, is_http2=is_http2
            )
            envoy = await stack.enter_async_context(EnvoyProcess(text))
            await eventually(envoy.has_checked_router)
        yield Gateway(mode, envoy.url, http, router, pods[0])


async def check(running: Gateway, answers: Sequence[Answer]) -> None:
    """Have clients ask for all of these, some at a time; compare what they saw with the router's
    count."""
    before, room = await running.outcomes(), asyncio.Semaphore(16)

    async def ask(answer: Answer) -> tuple[Answer, str]:
        async with room:
            return answer, await running.ask(answer)

    seen = Counter(await asyncio.gather(*[ask(answer) for answer in answers]))
    wanted: Counter[str] = Counter()
    for (answer, how), num in seen.items():
        wanted[outcome_of(running.mode, answer, how)] += num

    async def is_counted() -> bool:
        return sum((await running.outcomes()).values()) == sum(before.values()) + len(answers)

    await eventually(is_counted)
    found = await running.outcomes() - before
    if running.mode == "BUFFERED":  # who leaves before the body is whole has seen no answer
        found["unknown"] += found.pop("cancelled", 0)
        wanted["unknown"] += wanted.pop("cancelled", 0)
    print("FOUND", running.mode, dict(found), dict(seen))
    assert found == wanted, seen


def outcome_of(mode: str, answer: Answer, seen: str) -> str:
    """The outcome that the router has to count where its client saw this."""
    if answer is Answer.SILENT or (answer is Answer.SLOW and mode == ACCESS_LOG):
        return "cancelled"
    if mode == ACCESS_LOG and answer in CUT:
        return "failed"
    if answer is Answer.SLOW or (answer in CUT and answer is not Answer.NO_HEADERS):
        return "unknown"  # whatever Envoy says to a client in the pod's place
    assert seen.startswith("whole"), seen
    if seen.startswith("whole 5"):
        return "failed"
    return "completed" if mode != "NONE" or answer is Answer.EMPTY else "unknown"


@pytest.mark.few(3)
@pytest.mark.parametrize("is_http2", [False, True], ids=["http1", "http2"])
@pytest.mark.parametrize("mode", MODES)
async def test_what_was_not_seen_whole_is_never_completed(
    http: aiohttp.ClientSession, mode: str, is_http2: bool
) -> None:
    async with gateway(mode, http, is_http2=is_http2) as running:
        await check(running, 2 * list(Answer))


async def test_an_access_log_tells_a_cut_from_a_client_that_left(
    http: aiohttp.ClientSession,
) -> None:
    async with gateway(ACCESS_LOG, http) as running:
        await check(running, 2 * list(Answer))


async def test_responses_of_a_killed_pod_have_failed(http: aiohttp.ClientSession) -> None:
    """Nobody answers there any more: it was no client that left."""
    num = 8
    async with AsyncExitStack() as stack:
        pod = await stack.enter_async_context(cutting_pod())
        running = await stack.enter_async_context(gateway(MODES[-1], http, pods=[pod]))
        headers = {CUT_HEADER: Answer.SLOW, ID_HEADER: "x", "content-type": "application/json"}
        body = json.dumps({"model": MODEL, "prompt": "p"})
        answers = [
            await stack.enter_async_context(
                http.post(f"{running.url}/v1/completions", data=body, headers=headers)
            )
            for _ in range(num)
        ]
        for answer in answers:
            await answer.content.readany()
        await pod.kill()

        async def are_counted() -> bool:
            return sum((await running.outcomes()).values()) == num

        await eventually(are_counted)
        assert +(await running.outcomes()) == Counter(failed=num)


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", MODES[1:])
async def test_a_pod_that_fails_gets_few_requests_without_an_access_log(
    http: aiohttp.ClientSession, mode: str
) -> None:
    async with AsyncExitStack() as stack:
        pods = [await stack.enter_async_context(cutting_pod()) for _ in range(3)]
        pods[1].always = Answer.ERROR
        outliers = {"enabled": True}
        running = await stack.enter_async_context(gateway(mode, http, pods=pods, outliers=outliers))
        seen = Counter([await running.ask(Answer.LENGTH) for _ in range(NUM_ASKED)])

        # A third without the evidence: it is a suspect after three.
        assert seen["whole 500"] + seen["whole 200"] == NUM_ASKED
        assert seen["whole 500"] <= NUM_ASKED // 10, seen
