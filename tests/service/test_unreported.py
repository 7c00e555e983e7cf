"""Pods that answer while their pages fail, are late or are damaged; and that stop answering."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from tests.logs import warnings
from tests.servers import host_and_port, web_server
from tests.service.serving import configuration, serving
from tests.waiting import eventually


class Pod:
    """A pod that lists its models, and whose metrics page is what the test says."""

    def __init__(self) -> None:
        self.page = "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 0\n"
        self.status, self.models_status, self.is_late = 200, 200, False
        self.address = ""

    async def answer(self, request: web.Request) -> web.Response:
        if request.path == "/v1/models":
            listed = {"object": "list", "data": [{"id": "base", "object": "model", "parent": None}]}
            return web.json_response(listed, status=self.models_status)
        if request.path.rstrip("/") != "/metrics":
            return web.Response(status=404)
        if self.is_late:
            await asyncio.sleep(3600)
        return web.Response(text=self.page, status=self.status)

    def configuration(self, **scrape: Any) -> dict[str, Any]:
        return configuration([], discovery={"static": [self.address]}, scrape=scrape)


@pytest_asyncio.fixture
async def pod(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pod]:
    monkeypatch.setattr("extproc.service.app.UPKEEP_INTERVAL_S", 0.05)
    monkeypatch.setattr("extproc.learned.losses.PATIENCE_S", 0.2)
    made = Pod()
    async with web_server(made.answer) as url:
        made.address = host_and_port(url)
        yield made


@pytest.mark.parametrize("fault", [{"status": 500}, {"is_late": True}], ids=["fails", "late"])
async def test_a_pod_without_a_page_is_no_silent_one_and_the_operator_hears_of_it(
    pod: Pod, fault: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    vars(pod).update(fault)
    async with serving(pod.configuration(timeout_s=0.1, models_interval_s=0.05)) as service:
        await eventually(lambda: ": no reports for " in caplog.text)
        [view] = await service.endpoints()
        [warning] = await service.warnings()
        gauges = [await service.metric(f"extproc_endpoint_{name}") for name in ("known", "silent")]

    assert (view["known"], view["silent"], view["registered"]) == (False, False, ["base"])
    assert warning.startswith("1 of 1 pods give no reports: ")
    assert gauges == [0, 0]


async def test_a_pod_that_stops_answering_is_silent_though_its_models_are_seldom_asked_for(
    pod: Pod,
) -> None:
    config = pod.configuration(timeout_s=5, expiry_s=0.1, interval_s=0.05, models_interval_s=600)
    async with serving(config) as service:
        pod.status = pod.models_status = 500

        async def is_silent() -> bool:
            [view] = await service.endpoints()
            return bool(view["silent"])

        await eventually(is_silent)


async def test_a_line_that_cannot_be_read_costs_its_fact_and_one_line_of_the_log(
    pod: Pod, caplog: pytest.LogCaptureFixture
) -> None:
    pod.page += "vllm:kv_cache_usage_perc 0.5\nvllm:num_requests_waiting many\n"
    async with serving(pod.configuration(interval_s=0.01)) as service:

        async def is_known() -> bool:
            [view] = await service.endpoints()
            return bool(view["known"] and view["kv_usage_ratio"] == 0.5)

        await eventually(is_known)
        num_scrapes = await service.metric("extproc_scrape_seconds_count")

        async def has_scraped_more() -> bool:
            return await service.metric("extproc_scrape_seconds_count") > num_scrapes + 2

        await eventually(has_scraped_more)

    assert len([line for line in warnings(caplog) if "not a number in ' many'" in line]) == 1
