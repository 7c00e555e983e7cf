"""The stack of docker-compose.yml, every service started as a plain process (see stack.py)."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from tests.compose.files import services
from tests.compose.promql import with_variables
from tests.compose.stack import NUM_PODS, Container, Network
from tests.compose.test_dashboard import queries
from tests.compose.test_files import needs
from tests.e2e.harness import Client, eventually

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),
]
ADAPTERS = services()["pods"]["environment"]["ADAPTERS"].split(",")
NOT_EMPTY = (
    "extproc_picks_total",
    "extproc_decision_seconds_bucket",
    "vllm:time_to_first_token_seconds_bucket",
    "extproc_access_log_lag_seconds_bucket",
    "extproc_endpoint_in_flight",
    "extproc_adapter_loads_total",
    "process_cpu_seconds_total",
)
"""What must show something once there was traffic."""


class Stack:
    """What runs, and a client of the gateway."""

    def __init__(self, http: aiohttp.ClientSession) -> None:
        self.http = http
        self.network = Network()
        self.containers: list[Container] = []

    async def start(self, service: str, *, number: int = 1) -> list[Container]:
        """Start containers of a service, and wait until they are healthy."""
        fresh = [Container(service, self.network) for _ in range(number)]
        self.containers += fresh
        for each in fresh:
            each.start()
        await asyncio.gather(*(each.healthy() for each in fresh))
        return fresh

    async def remove(self, container: Container) -> None:
        self.containers.remove(container)
        await container.remove()

    def one(self, service: str) -> Container:
        return next(each for each in self.containers if each.service == service)

    @property
    def client(self) -> Client:
        return Client(f"http://{self.one('gateway').address}:8080", self.http)

    async def get(self, service: str, port: int, path: str, **params: str) -> Any:
        url = f"http://{self.one(service).address}:{port}{path}"
        async with self.http.get(url, params=params) as response:
            return await response.json()

    async def endpoints(self) -> set[str]:
        """Addresses, as the picker knows them."""
        found = await self.get("picker", 9901, "/debug/snapshot")
        return {each["address"].partition(":")[0] for each in found["endpoints"]}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[Stack]:
    """The services without a profile, started in the order in which they depend on each other."""
    async with aiohttp.ClientSession() as http:
        running = Stack(http)
        async with running.network.dns:
            try:
                await running.start("picker")
                await running.start("pods", number=NUM_PODS)
                await running.start("gateway")

                async def lists_all() -> bool:
                    answer = await running.client.request("GET", "/v1/models")
                    return answer.status == 200 and {*ADAPTERS} <= {
                        card["id"] for card in answer.json["data"]
                    }

                await eventually(lists_all, within_s=60)
                yield running
            finally:
                for container in running.containers:
                    await container.close()


async def test_a_request_is_answered_by_a_pod_with_its_adapter(stack: Stack) -> None:
    answer = await stack.client.chat("customer-07")

    assert answer.status == 200
    assert answer.served_by in {each.hostname for each in stack.containers}
    assert answer.json["model"] == "customer-07"


async def test_an_adapter_s_requests_go_where_it_is_loaded(stack: Stack) -> None:
    async def all_by_affinity() -> bool:
        answers = [await stack.client.chat("customer-03") for _ in range(8)]
        decisions = (await stack.get("picker", 9901, "/debug/decisions", n="8"))["decisions"]
        assert {answer.status for answer in answers} == {200}
        return {each["pick"]["reason"] for each in decisions} == {"affinity"}

    await eventually(all_by_affinity, within_s=60)


async def test_what_is_not_inference_does_not_pass_the_gateway(stack: Stack) -> None:
    answer = await stack.client.request("POST", "/v1/load_lora_adapter", b"{}")

    assert answer.status == 404


async def test_pods_may_come_and_go(stack: Stack) -> None:
    before = {each.address for each in stack.containers if each.service == "pods"}
    (more,) = await stack.start("pods")
    everybody = before | {more.address}
    await eventually(lambda: _are(stack, everybody), within_s=60)
    leaving = next(each for each in stack.containers if each.service == "pods")
    await stack.remove(leaving)
    await eventually(lambda: _are(stack, everybody - {leaving.address}), within_s=60)

    answers = [await stack.client.chat(adapter) for adapter in ADAPTERS]

    assert {answer.status for answer in answers} == {200}
    assert leaving.hostname not in {answer.served_by for answer in answers}


async def _are(stack: Stack, addresses: set[str]) -> bool:
    return await stack.endpoints() == addresses


async def test_prometheus_scrapes_all_and_answers_every_query_of_the_dashboard(
    stack: Stack,
) -> None:
    needs("prometheus", "prometheus")
    needs("wget", "wget")  # for its check of health
    await stack.start("prometheus")

    async def all_are_up() -> bool:
        found = await _query(stack, "up")
        up = [value["metric"]["job"] for value in found if value["value"][1] == "1"]
        return sorted(up) == ["extproc", *["vllm"] * NUM_PODS]

    await eventually(all_are_up, within_s=90)

    async def shows_all() -> bool:
        # A rate takes two scrapes that lie before and after some traffic.
        await asyncio.gather(*(stack.client.chat(adapter) for adapter in ADAPTERS))
        empty = [
            expr
            for _, expr in queries()
            if any(name in expr for name in NOT_EMPTY)
            and not await _query(stack, with_variables(expr))
        ]
        return not empty

    await eventually(shows_all, within_s=120, every_s=1)
    for _, expr in queries():
        await _query(stack, with_variables(expr))


async def _query(stack: Stack, expr: str) -> list[Any]:
    answer = await stack.get("prometheus", 9090, "/api/v1/query", query=expr)
    assert answer["status"] == "success", (expr, answer)
    found: list[Any] = answer["data"]["result"]
    return found


async def test_locust_s_users_get_their_answers(stack: Stack) -> None:
    if shutil.which("locust", path=stack.one("picker")._env()["PATH"]) is None:
        pytest.skip("no locust: pip install 'lora-extproc[loadtest]'")
    locust = (await stack.start("locust"))[0]
    url = f"http://{locust.address}:8089"
    async with stack.http.post(f"{url}/swarm", data={"user_count": 4, "spawn_rate": 4}) as begun:
        assert (await begun.json())["success"] is True

    async def has_answers() -> bool:
        rows = {row["method"]: row for row in (await _locust_stats(stack, url))["stats"]}
        return all(rows.get(kind, {}).get("num_requests", 0) >= 4 for kind in ("POST", "TTFT"))

    await eventually(has_answers, within_s=120, every_s=0.5)
    stats = await _locust_stats(stack, url)

    assert stats["errors"] == []
    slowest = {row["method"]: row["max_response_time"] for row in stats["stats"]}
    assert slowest["TTFT"] <= slowest["POST"]


async def _locust_stats(stack: Stack, url: str) -> Any:
    async with stack.http.get(f"{url}/stats/requests") as response:
        return await response.json()
