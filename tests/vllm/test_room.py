"""A real vLLM with small limits: requests wait in the router, and few of them in the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from extproc.learned.concurrency import SPARE
from tests.e2e.harness import Client
from tests.vllm.gateway import NUM_TOKENS, PATH, PATIENCE_S, Gateway, completion, running_gateway
from tests.vllm.server import BASE_MODEL, VllmServer

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_CLIENTS = 40
NUM_EACH = 4
LIMITS = {
    "sequences": ("--max-num-seqs", "4"),
    "tokens of a step": ("--max-num-seqs", "4", "--max-num-batched-tokens", "16"),
    "KV blocks": ("--block-size", "32", "--num-gpu-blocks-override", "20"),
}
WORDS = {"sequences": 2, "tokens of a step": 60, "KV blocks": 90}
"""Of a prompt, so that an engine is short of that."""


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[
        "sequences",
        # A start takes half a minute.
        pytest.param("tokens of a step", marks=pytest.mark.slow),
        pytest.param("KV blocks", marks=pytest.mark.slow),
    ],
)
async def short_of(
    request: pytest.FixtureRequest, tiny_models: Path
) -> AsyncIterator[tuple[str, Gateway]]:
    server = VllmServer(tiny_models, (), LIMITS[request.param])
    await server.start()
    try:
        async with running_gateway([server], policy="least_harm") as gateway:
            yield request.param, gateway
    finally:
        await server.close()


async def test_few_requests_wait_in_an_engine_with_small_limits(
    short_of: tuple[str, Gateway],
) -> None:
    limit, gateway = short_of
    client = Client(gateway.envoy.url, gateway.http)
    body = completion(BASE_MODEL, NUM_TOKENS, prompt="the fox " * (WORDS[limit] // 2))

    async def ask_again_and_again() -> None:
        for _ in range(NUM_EACH):
            async with asyncio.timeout(PATIENCE_S):
                answer = await client.request("POST", PATH, body)
            assert answer.status == 200, answer

    async with asyncio.TaskGroup() as clients:
        asking = [clients.create_task(ask_again_and_again()) for _ in range(NUM_CLIENTS)]
        waiting = []
        while not all(each.done() for each in asking):
            [view] = await gateway.views()
            waiting.append(view["num_waiting"])
            await asyncio.sleep(0.05)

    # What came at once is there before any report says that it waits.
    settled = sorted(waiting[len(waiting) // 3 : len(waiting) * 2 // 3])
    assert max(waiting) > 0
    assert settled[len(settled) // 2] <= SPARE + NUM_CLIENTS // 8
