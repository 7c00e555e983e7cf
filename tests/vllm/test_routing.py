"""Real vLLM behind a real Envoy and the real router: the founding preset, end to end.

Two servers with the same six adapters, of which each holds two in GPU slots and four in its CPU
cache: both caches have to evict. All tests share them, and the last one kills a server.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
import pytest_asyncio

from extproc.commands.podprobes import REQUIRED
from tests.e2e.harness import Answer
from tests.vllm.conftest import StartServers
from tests.vllm.gateway import (
    JSON,
    NUM_TOKENS,
    PATH,
    PATIENCE_S,
    PROMPT,
    Gateway,
    completion,
    running_gateway,
    text_of,
)
from tests.vllm.loadclient import OUTPUT_TOKENS, SKEWED, TIMEOUT_S, LoadClient
from tests.vllm.server import ADAPTERS, BASE_MODEL, seeds
from tests.vllm.test_residency import random_bursts
from tests.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODELS = (BASE_MODEL, *ADAPTERS)
CACHED = (("a4", "a5", "a0", "a1"), ("a4", "a5", "a2", "a3"))
"""CPU caches in which four adapters have a server of their own."""
HOMES = {"a0": 0, "a1": 0, "a2": 1, "a3": 1}
ON_BOTH = "a4"
NUM_PROMPTS = 60
"""Of vLLM's own load client."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(start_vllm_servers: StartServers) -> AsyncIterator[Gateway]:
    servers = await start_vllm_servers(2)
    async with running_gateway(servers) as running:
        yield running
    for server in servers:
        await server.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def texts(gateway: Gateway) -> dict[str, str]:
    """The text of each model, without a gateway."""
    first, second = [
        {model: await client.complete(model, max_tokens=NUM_TOKENS) for model in MODELS}
        for client in gateway.servers
    ]
    assert first == second
    assert len(set(first.values())) == len(MODELS)
    return first


# --- answers ---------------------------------------------------------------------------------


def client_of(url: str) -> openai.AsyncOpenAI:
    """The official client without retries."""
    return openai.AsyncOpenAI(
        base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=PATIENCE_S
    )


async def ask(client: openai.AsyncOpenAI, model: str, *, is_chat: bool, stream: bool) -> str:
    """Return the whole text, by one of the two APIs."""
    api: Any = client.chat.completions if is_chat else client.completions
    prompt = {"messages": [{"role": "user", "content": PROMPT}]} if is_chat else {"prompt": PROMPT}
    answer = await api.create(
        model=model, max_tokens=NUM_TOKENS, temperature=0, stream=stream, **prompt
    )
    parts = [part async for part in answer] if stream else [answer]
    assert {part.model for part in parts} == {model}
    choices = [part.choices[0] for part in parts]
    if is_chat:
        texts = [(each.delta if stream else each.message).content or "" for each in choices]
    else:
        texts = [each.text for each in choices]
    return "".join(texts)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streaming"])
@pytest.mark.parametrize("is_chat", [False, True], ids=["completions", "chat"])
async def test_every_model_responds_as_it_does_without_a_gateway(
    gateway: Gateway, is_chat: bool, stream: bool
) -> None:
    said = []
    for url in (gateway.envoy.url, *(client.server.url for client in gateway.servers)):
        async with client_of(url) as client:
            said.append([await ask(client, m, is_chat=is_chat, stream=stream) for m in MODELS])

    routed, *direct = said
    assert len(set(routed)) == len(MODELS)
    assert direct == [routed, routed]


async def test_the_models_of_the_pool_are_listed_with_their_parents(gateway: Gateway) -> None:
    async with client_of(gateway.envoy.url) as client:
        listed = {model.id: model.to_dict()["parent"] async for model in client.models.list()}

    assert listed == {BASE_MODEL: None, **dict.fromkeys(ADAPTERS, BASE_MODEL)}


# --- affinity --------------------------------------------------------------------------------


async def test_an_adapters_requests_stay_on_the_server_that_has_it_loaded(
    gateway: Gateway, texts: dict[str, str]
) -> None:
    """One after the other in random order, base requests between them; then all at once."""
    await gateway.settle(CACHED)
    order = random.Random(1).sample([*HOMES] * 4, 4 * len(HOMES))

    for adapter in order:
        text_of(await gateway.ask(BASE_MODEL, 2))
        await gateway.become_quiet()
        before = await gateway.num_served()
        assert text_of(await gateway.ask(adapter)) == texts[adapter]
        assert (await gateway.served_since(before, 1))[HOMES[adapter]] == 1

    before = await gateway.num_served()
    answers = await asyncio.gather(*(gateway.ask(adapter) for adapter in order))
    assert [text_of(answer) for answer in answers] == [texts[adapter] for adapter in order]
    assert await gateway.served_since(before, len(order)) == [len(order) / 2] * 2


async def test_an_adapter_loaded_on_both_is_packed_on_one(gateway: Gateway) -> None:
    """The most pending requests below the threshold: the second follows the first, and so on."""
    await gateway.settle(CACHED)
    before = await gateway.num_served()

    answers = await asyncio.gather(*(gateway.ask(ON_BOTH, 300) for _ in range(8)))

    assert {answer.status for answer in answers} == {200}
    assert sorted(await gateway.served_since(before, 8)) == [0, 8]


# --- residency -------------------------------------------------------------------------------


async def test_two_hundred_requests_at_once_are_all_served(
    gateway: Gateway, texts: dict[str, str]
) -> None:
    """Base and adapters mixed. Afterwards nothing is in flight, and the caches agree."""
    rng = random.Random(2)
    models = [rng.choice(MODELS) for _ in range(200)]
    before = await gateway.num_served()

    answers = await asyncio.gather(*(gateway.ask(model) for model in models))

    assert [answer.status for answer in answers] == [200] * len(models)
    for model, answer in zip(models, answers, strict=True):
        assert answer.json["model"] == model
        # Beside adapters in one batch, vLLM 0.32 on a CPU answers for the base model with the
        # adapter of the last slot: its kernels take slot -1, which means none, for an index.
        assert model == BASE_MODEL or text_of(answer) == texts[model]
    assert all(await gateway.served_since(before, len(models)))
    await gateway.become_quiet()
    await gateway.assert_residency_equals()


@pytest.mark.timeout(TIMEOUT_S + 120)
async def test_vllms_own_load_client_gets_all_of_every_answer(
    gateway: Gateway, tmp_path: Path
) -> None:
    await gateway.settle(CACHED)
    before = await gateway.num_served()
    tokenizer = gateway.servers[0].server.models / "base"
    flags = ["--request-rate", "10", "--burstiness", "0.7"]
    report = tmp_path / "report.json"
    async with LoadClient(
        gateway.envoy.url, tokenizer, SKEWED, NUM_PROMPTS, report, flags
    ) as client:
        result = await client.result()

    assert (result["completed"], result["failed"]) == (NUM_PROMPTS, 0), result["errors"]
    assert result["total_output_tokens"] == NUM_PROMPTS * OUTPUT_TOKENS
    served = await gateway.served_since(before, NUM_PROMPTS)
    assert min(served) > NUM_PROMPTS / 6  # each has a popular adapter, and others
    await gateway.become_quiet()


@pytest.mark.parametrize("seed", seeds(300, 24))
async def test_the_routers_view_of_residency_is_that_of_the_engines(
    gateway: Gateway, seed: int
) -> None:
    """Random sequences of base and adapter requests, one at a time and at once."""
    rng = random.Random(seed)

    for burst in random_bursts(rng, MODELS, min_tokens=1):
        answers = await asyncio.gather(*(gateway.ask(*request) for request in burst))
        assert {answer.status for answer in answers} == {200}
    await gateway.become_quiet()

    await gateway.assert_residency_equals()


# --- what changes ----------------------------------------------------------------------------


async def assert_served_by(gateway: Gateway, number: int, adapter: str, text: str) -> None:
    """All requests for the adapter are served by that server, at once and one after the other."""
    before = await gateway.num_served()
    answers = await asyncio.gather(*(gateway.ask(adapter) for _ in range(6)))
    answers += [await gateway.ask(adapter) for _ in range(6)]

    assert {text_of(answer) for answer in answers} == {text}
    assert (await gateway.served_since(before, len(answers)))[number] == len(answers)


async def test_requests_for_an_adapter_go_only_where_it_is_registered(
    gateway: Gateway, texts: dict[str, str]
) -> None:
    """Unloaded on one server, loaded again there and unloaded on the other, unloaded on both."""
    adapter, *others = ADAPTERS
    first, second = gateway.servers

    assert (await first.unload(adapter))[0] == 200
    await gateway.knows(others, on=0)
    await assert_served_by(gateway, 1, adapter, texts[adapter])

    assert (await first.load(adapter))[0] == 200
    await gateway.knows(ADAPTERS, on=0)
    assert (await second.unload(adapter))[0] == 200
    await gateway.knows(others, on=1)
    await assert_served_by(gateway, 0, adapter, texts[adapter])

    assert (await first.unload(adapter))[0] == 200
    await gateway.knows(others, on=0)
    answer = await gateway.ask(adapter)
    assert (answer.status, answer.error_code) == (404, "model_not_found")

    for number, client in enumerate(gateway.servers):
        assert (await client.load(adapter))[0] == 200
        await gateway.knows(ADAPTERS, on=number)
    await gateway.become_quiet()
    await gateway.assert_residency_equals()


async def test_no_request_gets_404_once_the_router_knows_of_an_unload(gateway: Gateway) -> None:
    """The adapter is unloaded on one server while clients ask for it without pause."""
    adapter, *others = ADAPTERS
    answers: list[tuple[float, int]] = []

    async def ask_on() -> None:
        while True:
            began_s = time.monotonic()
            answers.append((began_s, (await gateway.ask(adapter, 2)).status))

    async def come(num: int) -> None:
        wanted = len(answers) + num
        await eventually(lambda: len(answers) >= wanted, within_s=PATIENCE_S)

    async with asyncio.TaskGroup() as group:
        asking = [group.create_task(ask_on()) for _ in range(3)]
        await come(10)
        assert (await gateway.servers[0].unload(adapter))[0] == 200
        await gateway.knows(others, on=0)
        known_s = time.monotonic()
        await come(30)
        for task in asking:
            task.cancel()

    assert {status for _, status in answers} <= {200, 404}
    assert {status for began_s, status in answers if began_s > known_s} == {200}
    assert (await gateway.servers[0].load(adapter))[0] == 200
    await gateway.knows(ADAPTERS, on=0)
    await gateway.become_quiet()


async def test_check_pod_finds_all_that_is_required(gateway: Gateway) -> None:
    url = gateway.servers[0].server.url
    command = [sys.executable, "-m", "extproc", "check-pod", url, "--adapter", ADAPTERS[0]]

    result = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=PATIENCE_S
    )

    lines = result.stdout.splitlines()
    assert result.returncode == 0, result
    assert {f"pass  {requirement}" for requirement in REQUIRED} <= set(lines)


def served_or_unreachable(answer: Answer) -> bool:
    """Return whether it was served; otherwise it must be the clear error."""
    if answer.status == 200:
        return True
    assert (answer.status, answer.error_code) == (503, "endpoint_unavailable")
    assert answer.headers["retry-after"]
    return False


async def test_a_killed_servers_adapters_move_to_the_other(
    gateway: Gateway, texts: dict[str, str]
) -> None:
    """What it had begun to answer breaks off, and Envoy tries the rest on the other. No request
    hangs, nothing is leaked."""
    await gateway.settle(CACHED)
    victim = gateway.servers[0].server
    body = completion("a0", 400, stream=True)
    async with (
        asyncio.TaskGroup() as group,
        gateway.http.post(gateway.envoy.url + PATH, data=body, headers=JSON) as streaming,
    ):
        await streaming.content.readline()
        running = [group.create_task(gateway.ask(model, 400)) for model in MODELS]
        await eventually(lambda: in_flight(gateway, 1 + len(MODELS)), within_s=PATIENCE_S)
        await victim.kill()
        with pytest.raises(aiohttp.ClientError):
            await streaming.content.read()
    assert all(served_or_unreachable(each.result()) for each in running)

    async def check() -> bool:
        answers = await asyncio.gather(*(gateway.ask(model) for model in MODELS))
        served = [served_or_unreachable(answer) for answer in answers]
        is_known = (await gateway.views())[0]["known"]
        return not is_known and all(served)

    await eventually(check, within_s=PATIENCE_S)
    for model in MODELS * 2:
        assert text_of(await gateway.ask(model)) == texts[model]
    await gateway.become_quiet(servers=[1])


async def in_flight(gateway: Gateway, num: int) -> bool:
    counts = [int(view["num_in_flight"]) for view in await gateway.views()]
    return sum(counts) == num
