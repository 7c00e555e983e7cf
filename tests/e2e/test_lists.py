"""Lists of models through a real Envoy, whose connection to the router all clients share."""

from __future__ import annotations

import asyncio

import aiohttp

from extproc.lab.fakepod.podserver import RunningPod
from tests.e2e.conftest import behind_envoy, router_config


async def test_lists_that_do_not_fit_are_refused_and_requests_are_served(
    pods: list[RunningPod], http: aiohttp.ClientSession
) -> None:
    config = router_config(pods, preset="founding", request={"max_list_bytes_per_s": 1})
    async with behind_envoy(config, http) as (_, client):
        asked = [asyncio.ensure_future(client.request("GET", "/v1/models")) for _ in range(50)]
        await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        served = [await client.chat("only-1") for _ in range(10)]
        lists = await asyncio.gather(*asked)

    refused = [answer for answer in lists if answer.status == 429]
    assert {answer.status for answer in served} == {200}
    assert len(refused) == 49
    assert {(answer.error_code, answer.headers["retry-after"]) for answer in refused} == {
        ("too_many_lists", "1")
    }
