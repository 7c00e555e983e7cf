"""A gateway with several filters of the picker in one chain, as Envoy AI Gateway has them: one
decision a request."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from extproc.lab.fakepod.podserver import RunningPod
from extproc.protocol import DESTINATION_KEY, MARK_HEADER
from tests.e2e.charts import PLAIN_CHARTS, Chart, EppProcess, gateway_config
from tests.e2e.conftest import NUM_PODS, own_pods, router_config
from tests.e2e.harness import Client, EnvoyProcess
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(240)

NUM_FILTERS = 10
MODELS = [f"only-{number}" for number in range(NUM_PODS)]


async def total(routers: Sequence[EppProcess], name: str, **labels: str) -> float:
    """The sum of a metric of these routers."""
    pages = [await router.metrics() for router in routers]
    return sum(
        float(sample.value)
        for page in pages
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


@asynccontextmanager
async def gateway(
    pods: Sequence[RunningPod],
    http: aiohttp.ClientSession,
    chart: Chart = Chart.ORIGINAL_DST,
    num_routers: int = 1,
    request_body: str = "FULL_DUPLEX_STREAMED",
    response_body: str = "FULL_DUPLEX_STREAMED",
    **config: Any,
) -> AsyncIterator[tuple[Client, list[EppProcess]]]:
    async with AsyncExitStack() as stack:
        routers = [
            await stack.enter_async_context(EppProcess(router_config(pods, **config)))
            for _ in range(num_routers)
        ]
        addresses = [router.address for router in routers]
        known = [pod.address for pod in pods]
        text = gateway_config(
            chart,
            *addresses,
            pods=known,
            num_filters=NUM_FILTERS,
            request_body=request_body,
            response_body=response_body,
        )
        envoy = await stack.enter_async_context(EnvoyProcess(text))
        await eventually(envoy.has_checked_router)
        yield Client(envoy.url, http), routers


@pytest.mark.few(1)
@pytest.mark.parametrize("chart", PLAIN_CHARTS)
async def test_ten_calls_make_one_decision(
    pods: list[RunningPod], http: aiohttp.ClientSession, chart: Chart
) -> None:
    sizes = (0, 107_000, 1_000_000)
    async with gateway(pods, http, chart) as (client, routers):
        answers = [
            await client.chat(model, padding_bytes=size) for model in MODELS for size in sizes
        ]
        streamed = await client.chat(MODELS[0], stream=True)
        await eventually(routers[0].has_none_in_flight)

        num = len(answers) + 1
        assert {answer.status for answer in answers} == {200}
        assert [answer.json["model"] for answer in answers[:: len(sizes)]] == MODELS
        assert streamed.body.endswith(b"data: [DONE]\n\n")
        assert await total(routers, "extproc_picks_total") == num
        assert await total(routers, "extproc_completions_total") == num
        assert await total(routers, "extproc_completions_total", outcome="completed") == num
        answered = await total(routers, "extproc_repeated_calls_total", result="answered")
        assert answered == num * (NUM_FILTERS - 1)
        assert await total(routers, "extproc_calls_per_request") == NUM_FILTERS
        health = await routers[0].admin("/healthz")
        assert f"asks {NUM_FILTERS} times" in "".join(health["warnings"])


async def test_refusals_are_made_once(pods: list[RunningPod], http: aiohttp.ClientSession) -> None:
    async with gateway(pods, http) as (client, routers):
        answers = [
            (await client.chat("unknown")).status,
            (await client.request("GET", "/v1/models")).status,
            (await client.request("POST", "/v1/load_lora_adapter", b"{}")).status,
            (await client.request("GET", "/metrics")).status,
        ]
        assert answers == [404, 200, 404, 404]
        assert await total(routers, "extproc_rejections_total") == 3
        assert await total(routers, "extproc_repeated_calls_total") == 0


async def test_two_routers_with_a_key_make_one_decision(
    pods: list[RunningPod], http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    """The calls about one request reach one router or the other."""
    key = tmp_path / "key"
    key.write_text(secrets.token_hex(24))
    peers = {"static": [], "key_file": str(key)}
    num = 20
    async with gateway(pods, http, num_routers=2, peers=peers) as (client, routers):
        statuses = {(await client.chat(MODELS[0], padding_bytes=30_000)).status for _ in range(num)}
        assert statuses == {200}
        assert await total(routers, "extproc_picks_total") == num
        assert await total(routers, "extproc_repeated_calls_total") == num * (NUM_FILTERS - 1)
        assert await total(routers, "extproc_repeated_calls_total", result="decided") == 0


async def test_a_client_that_writes_our_headers_is_decided_as_any_other(
    http: aiohttp.ClientSession,
) -> None:
    """It repeats its own request with its id, the endpoint that it got, and the mark that its pod
    has read, once the first has ended."""
    async with own_pods(2) as pods, gateway(pods, http) as (client, routers):
        await client.chat("shared", headers={"x-request-id": "mine"})
        [seen] = [request for pod in pods for request in pod.pod.last_requests]
        read = dict(seen["headers"])
        stolen = {name: read[name] for name in ("x-request-id", DESTINATION_KEY, MARK_HEADER)}
        await eventually(routers[0].has_none_in_flight)
        for mark in (stolen[MARK_HEADER], "made-up.0.0"):
            answer = await client.chat("shared", headers=stolen | {MARK_HEADER: mark})
            assert answer.status == 200

        assert await total(routers, "extproc_picks_total") == 3
        decided = await total(routers, "extproc_repeated_calls_total", result="decided")
        assert decided == 2


@pytest.mark.few(3)
@pytest.mark.parametrize("response", ["NONE", "BUFFERED", "STREAMED", "FULL_DUPLEX_STREAMED"])
@pytest.mark.parametrize("has_log", [False, True])
async def test_ten_calls_with_a_whole_body_make_one_decision(
    pods: list[RunningPod], http: aiohttp.ClientSession, response: str, has_log: bool
) -> None:
    source = {"source": "access_log"} if has_log else {}
    async with gateway(
        pods, http, request_body="BUFFERED", response_body=response, completions=source
    ) as (client, routers):
        for model in MODELS:
            answer = await client.chat(model, padding_bytes=20_000)
            assert (answer.status, answer.json["model"]) == (200, model)

        assert await total(routers, "extproc_picks_total") == len(MODELS)
        answered = await total(routers, "extproc_repeated_calls_total", result="answered")
        assert answered == len(MODELS) * (NUM_FILTERS - 1)


async def test_two_routers_without_a_key_decide_again_and_lose_nothing(
    pods: list[RunningPod], http: aiohttp.ClientSession
) -> None:
    async with gateway(pods, http, num_routers=2) as (client, routers):
        answers = [await client.chat(MODELS[0], padding_bytes=30_000) for _ in range(10)]
        assert {answer.status for answer in answers} == {200}
        for router in routers:
            await eventually(router.has_none_in_flight)

        picks = await total(routers, "extproc_picks_total")
        decided = await total(routers, "extproc_repeated_calls_total", result="decided")
        assert picks == len(answers) + decided
        assert await total(routers, "extproc_completions_total", outcome="completed") == picks


async def test_pods_that_serve_unchosen_are_counted_and_warned_of(
    http: aiohttp.ClientSession,
) -> None:
    """Envoy does not know the pod that the router chooses, and falls back blindly."""
    async with own_pods(2) as [known, stray], EppProcess(router_config([known])) as router:
        text = gateway_config(Chart.OVERRIDE_HOST, router.address, pods=[stray.address])
        async with EnvoyProcess(text) as envoy:
            await eventually(envoy.has_checked_router)
            client = Client(envoy.url, http)
            statuses = [(await client.chat("shared")).status for _ in range(3)]
            await eventually(router.has_none_in_flight)

        assert statuses == [200] * 3
        unknown = await total([router], "extproc_served_by_total", pod="unknown")
        assert unknown == 3
        health = await router.admin("/healthz")
        assert stray.address in "".join(health["warnings"])
