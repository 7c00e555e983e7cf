"""Clients that steer the engine, through a real Envoy: what the pod gets of it."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from extproc.envoy.bootstrap import BodyDelivery, Mode
from extproc.request.steering import FIELDS, HEADERS
from tests.e2e.conftest import behind_envoy
from tests.e2e.harness import Answer
from tests.servers import host_and_port, web_server
from tests.waiting import eventually

FORGED = {
    **dict.fromkeys(FIELDS, 1),
    "priority": -1000,
    "kv_transfer_params": {"do_remote_prefill": True, "remote_host": "10.0.0.1"},
}
STEERS = dict.fromkeys(HEADERS, "10.0.0.1:8000")
HONEST = {"model": "base", "prompt": "x", "cache_salt": "s", "stream": False}


class Pod:
    """A pod that keeps what it got."""

    def __init__(self) -> None:
        self.body: dict[str, Any] = {}
        self.headers = frozenset[str]()

    async def answer(self, request: web.Request) -> web.Response:
        if request.method == "GET":
            card = {"id": "base", "root": "base", "parent": None}
            return web.json_response({"data": [card]} if "models" in request.path else {})
        self.body, self.headers = await request.json(), frozenset(map(str.lower, request.headers))
        return web.json_response({"usage": {}})


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("mode", "body", "becomes"),
    [
        (Mode.ORIGINAL_DST, BodyDelivery.BUFFERED, "cut out"),
        (Mode.FULL_DUPLEX, BodyDelivery.FULL_DUPLEX, "cut out"),
        (Mode.ORIGINAL_DST, BodyDelivery.STREAMED, "refused"),
        (Mode.ORIGINAL_DST, BodyDelivery.BUFFERED, "passed through"),
    ],
    ids=str,
)
async def test_what_steers_an_engine_reaches_no_pod_unless_it_is_passed_through(
    http: aiohttp.ClientSession, mode: Mode, body: BodyDelivery, becomes: str
) -> None:
    pod = Pod()
    async with web_server(pod.answer) as url:
        passes = [*FIELDS, *sorted(HEADERS)] if becomes == "passed through" else []
        config = {
            "discovery": {"static": [{"address": host_and_port(url)}]},
            "request": {"pass_through": passes, "max_hold_s": 5.0},
        }
        options = {"request_body": body, "num_pods": 1}
        async with behind_envoy(config, http, mode, **options) as (_, client):

            async def ask(**fields: object) -> Answer:
                sent = json.dumps({**HONEST, **fields}).encode()
                return await client.request("POST", "/v1/completions", sent, STEERS)

            async def is_served() -> bool:
                return (await ask()).status == 200

            await eventually(is_served)
            forged = await ask(**FORGED)

    if becomes == "refused":
        assert (forged.status, forged.error_code) == (400, "invalid_body")
        assert (pod.body, pod.headers & HEADERS) == (HONEST, frozenset())
        return
    assert forged.status == 200
    assert pod.body == (HONEST | FORGED if becomes == "passed through" else HONEST)
    assert pod.headers & HEADERS == (HEADERS if becomes == "passed through" else frozenset())
