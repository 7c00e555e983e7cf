"""Canaries behind a real Envoy: one that fails is taken back, and one that is no worse stays."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web
from aiohttp.typedefs import Handler

from extproc.lab.fakepod.podserver import PodConfig, build_app
from tests.e2e.conftest import behind_envoy, router_config
from tests.e2e.harness import Client, RouterProcess
from tests.servers import host_and_port, serving_app
from tests.waiting import eventually

MODELS = ("good", "failing", "old", "new")
ONE_OF = {"failing": 10, "old": 20, "new": 20}
"""Of so many requests for a model, one fails."""


@asynccontextmanager
async def pod() -> AsyncIterator[str]:
    """The address of a pod that answers some requests with 500, by their model."""
    num_asked = Counter[str]()

    @web.middleware
    async def fail_some(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path == "/v1/chat/completions":
            model = json.loads(await request.read())["model"]
            num_asked[model] += 1
            if num_asked[model] % ONE_OF.get(model, 10**9) == 0:
                return web.json_response({"error": {"message": "planted"}}, status=500)
        return await handler(request)

    app = build_app(PodConfig(name="pod-0", adapters=MODELS))
    app.middlewares.append(fail_some)
    async with serving_app(app) as url:
        yield host_and_port(url)


def canary(name: str, standard: str, other: str) -> dict[str, object]:
    targets = [{"model": standard, "weight": 80}, {"model": other, "weight": 20}]
    return {"name": name, "models": [name], "targets": targets}


async def read_by_pods(client: Client, model: str, num: int) -> Counter[str]:
    """Ask so often; return how often which model was read."""
    answers = await client.ask(num, model, max_tokens=1)
    return Counter(answer.headers.get("x-served-model", "") for answer in answers)


async def taken_back(router: RouterProcess) -> list[str]:
    page: str = await router.admin("/metrics")
    return [line for line in page.splitlines() if line.startswith("extproc_canary_taken_back{")]


async def test_a_version_that_fails_is_taken_back_and_one_that_is_no_worse_stays(
    http: aiohttp.ClientSession,
) -> None:
    async with pod() as address:
        config = {
            **router_config([], canaries={"error_rate": 1e-4}, outliers={"enabled": False}),
            "discovery": {"static": [address]},
            "routes": [canary("bad", "good", "failing"), canary("equal", "old", "new")],
        }
        async with behind_envoy(config, http, num_pods=1) as (router, client):

            async def is_taken_back() -> bool:
                await read_by_pods(client, "bad", 100)
                return bool(await taken_back(router))

            await eventually(is_taken_back)
            after = await read_by_pods(client, "bad", 100)
            equal = await read_by_pods(client, "equal", 1000)
            found, health = await taken_back(router), await router.admin("/healthz")
            log = router.log

    assert after == {"good": 100}
    assert equal["new"] > 0
    assert found == ['extproc_canary_taken_back{model="bad",version="failing"} 1.0']
    assert "bad: the canary failing is taken back: " in str(health)
    assert "bad: the canary failing is taken back: " in log
