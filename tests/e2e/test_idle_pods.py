"""Pods that close idle connections sooner than Envoy would by itself cost no request."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import AsyncExitStack

import aiohttp
import pytest
from aiohttp import web

from extproc.envoy.bootstrap import Mode
from tests.e2e.conftest import behind_envoy
from tests.e2e.harness import chat
from tests.e2e.load import CHAT, RESPONSES, outcome
from tests.servers import host_and_port, serving_app

pytestmark = pytest.mark.slow

KEPT_S = 1.0
"""The shortest time that engines' servers can be set to, but for none: whole seconds."""
PAUSE_S = KEPT_S + 0.1
NUM_CLIENTS = 12


def pod() -> web.Application:
    """One that answers a request with a reset where its connection has idled too long for it."""

    answered_s: dict[asyncio.Transport, float] = {}

    async def complete(request: web.Request) -> web.Response:
        await request.read()
        transport, now = request.transport, time.monotonic()
        assert transport is not None
        if now - answered_s.get(transport, now) > KEPT_S:
            transport.abort()  # the request came while its connection was being closed
        await asyncio.sleep(0.02)  # so that clients at one time have a connection each
        answered_s[transport] = time.monotonic()
        return web.json_response({"choices": []})

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "base", "object": "model"}]})

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(text="vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n")

    app = web.Application()
    app.router.add_post(CHAT, complete)
    app.router.add_post(RESPONSES, complete)
    app.router.add_get("/v1/models", models)
    app.router.add_get("/metrics", metrics)
    return app


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", [Mode.ORIGINAL_DST, Mode.OVERRIDE_HOST], ids=str)
async def test_no_request_goes_into_a_connection_that_its_pod_closes_after_a_second(
    mode: Mode, http: aiohttp.ClientSession
) -> None:
    """Neither where a retry is allowed, whose own connection may be closing, nor elsewhere."""
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(serving_app(pod())) for _ in range(2)]
        static = [{"address": host_and_port(url)} for url in urls]
        config = {"discovery": {"static": static}, "scrape": {"expiry_s": 30.0}}
        _, client = await stack.enter_async_context(
            behind_envoy(config, http, mode, num_pods=len(urls))
        )
        answers = []
        for path in (CHAT, RESPONSES, CHAT, RESPONSES):
            posts = (client.request("POST", path, chat("base")) for _ in range(NUM_CLIENTS))
            answers += await asyncio.gather(*posts)
            await asyncio.sleep(PAUSE_S)

    assert Counter(map(outcome, answers)) == {"served": len(answers)}
