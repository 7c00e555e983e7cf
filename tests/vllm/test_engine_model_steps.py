"""The engine model takes the steps that a real vLLM takes: the same batches, evictions, counts.

The real engine's own record says which requests came between which steps; the model gets the same
and takes as many steps. Nothing is fitted, and no time plays a part.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import aiohttp
import pytest

from extproc.lab.engine.profiles import INSTANT
from tests.vllm.enginetrace import (
    TRACE,
    Event,
    FollowingEngine,
    differences,
    events_in,
    real_steps,
    request_of,
    traced_server,
)
from tests.vllm.server import ADAPTERS, BASE_MODEL, MAX_CPU_LORAS, MAX_LORAS, VllmClient, VllmServer

BLOCK_TOKENS = 128
NUM_BLOCKS = 12
"""Of the KV cache: so few that requests are preempted. vLLM keeps one of them for itself."""
LIMITS = {"--max-num-seqs": 8, "--max-num-batched-tokens": 128}
PROFILE = replace(
    INSTANT,
    step_s=0.01,
    kv_capacity_tokens=(NUM_BLOCKS - 1) * BLOCK_TOKENS,
    block_tokens=BLOCK_TOKENS,
    max_num_seqs=LIMITS["--max-num-seqs"],
    max_num_batched_tokens=LIMITS["--max-num-batched-tokens"],
    max_model_len=512,
)


@dataclass(frozen=True)
class Load:
    """Requests at random times for random models.

    Attributes:
        num_requests: How many.
        rate_rps: How many a second, where nobody is too slow for it.
        num_adapters: Of how many adapters; a fifth of the requests are for the base model.
        num_prompts: In each request; each is a request of its own to the engine.
        max_prompt_tokens: Longest prompt.
        min_output_tokens: Shortest answer.
        max_output_tokens: Longest answer.
        num_prefixes: Of how many long beginnings each prompt has one; 0 for none.
        leaving: Part of the clients that leave early.
    """

    num_requests: int = 100
    rate_rps: float = 40.0
    num_adapters: int = 5
    num_prompts: int = 1
    max_prompt_tokens: int = 200
    min_output_tokens: int = 1
    max_output_tokens: int = 60
    num_prefixes: int = 0
    leaving: float = 0.0


LOADS = {
    "few slots": Load(rate_rps=400),
    # Several prompts in one request come at once, whoever is slow, and their answers are too long
    # to share the KV cache.
    "longer than the KV cache": Load(
        num_requests=16,
        rate_rps=400,
        num_prompts=6,
        max_prompt_tokens=300,
        min_output_tokens=100,
        max_output_tokens=160,
    ),
    "one adapter": Load(num_adapters=1, max_prompt_tokens=30, max_output_tokens=20),
    "light": Load(num_requests=40, rate_rps=6),
    "shared beginnings": Load(num_prefixes=3, max_prompt_tokens=200, max_output_tokens=100),
    "clients that leave": Load(leaving=0.3, max_prompt_tokens=300, max_output_tokens=100),
}


@dataclass
class Recorded:
    """A server, its record, and the model that has followed it so far."""

    server: VllmServer
    trace: Path
    engine: FollowingEngine
    now: float = 0.0
    num_read: int = 0


@pytest.fixture(scope="module")
def recorded(tiny_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    folder = tmp_path_factory.mktemp("steps")
    flags = [str(part) for limit in LIMITS.items() for part in limit]
    flags += ["--num-gpu-blocks-override", str(NUM_BLOCKS)]
    engine = FollowingEngine(PROFILE, max_loras=MAX_LORAS, max_cpu_loras=MAX_CPU_LORAS)
    with traced_server(tiny_models, folder, flags) as server:
        yield Recorded(server, folder / TRACE, engine)


@pytest.fixture
async def client(recorded: Recorded) -> AsyncIterator[VllmClient]:
    # The server closes connections that it thinks idle, just when one is used again.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector) as session:
        yield VllmClient(recorded.server, session)


async def send(client: VllmClient, load: Load, rng: Random) -> dict[str, tuple[str, int]]:
    """Send it and wait for the answers; the beginning that each request shares with others."""
    prefixes: dict[str, tuple[str, int]] = {}
    prefix_index = [rng.choices(range(10, 250), k=300) for _ in range(load.num_prefixes)]
    async with asyncio.TaskGroup() as group:
        for number in range(load.num_requests):
            await asyncio.sleep(rng.expovariate(load.rate_rps))
            id = f"{rng.getrandbits(48):x}"
            prompts = [
                rng.choices(range(10, 250), k=rng.randint(1, load.max_prompt_tokens))
                for _ in range(load.num_prompts)
            ]
            if prefix_index:
                prefix = rng.randrange(len(prefix_index))
                prompts = [prefix_index[prefix] + prompt for prompt in prompts]
                prefixes[id] = (str(prefix), len(prefix_index[prefix]))
            is_leaving = rng.random() < load.leaving
            output_tokens = rng.randint(load.min_output_tokens, load.max_output_tokens)
            adapters = ADAPTERS[: load.num_adapters]
            body = {
                "model": BASE_MODEL if number % 5 == 0 else rng.choice(adapters),
                "prompt": prompts,
                "max_tokens": output_tokens,
                "ignore_eos": True,
                "request_id": id,
            }
            patience_s = rng.uniform(0.02, 2.0) if is_leaving else None
            group.create_task(_ask(client, body, patience_s))
    return prefixes


async def _ask(client: VllmClient, body: dict[str, object], patience_s: float | None) -> None:
    try:
        async with asyncio.timeout(patience_s):
            status, answer = await client.post("/v1/completions", body)
    except TimeoutError:
        return
    assert status == 200, answer


def follow(recorded: Recorded, prefixes: dict[str, tuple[str, int]]) -> dict[str, int]:
    """Let the model take the steps that were recorded since the last time; what they were."""
    engine = recorded.engine
    events = events_in(recorded.trace)
    new = events[recorded.num_read :]
    recorded.num_read = len(events)
    totals = dict.fromkeys(("steps", "preemptions", "loads", "evictions", "deferrals"), 0)
    for real in real_steps(new):
        _apply(engine, real.before, recorded.now, prefixes)
        model = engine.follow(real, now=recorded.now)
        recorded.now = model.ended_s
        _apply(engine, [e for e in real.during if e["event"] == "abort"], recorded.now, prefixes)
        assert differences(real, model, engine) == [], f"in step {totals['steps']}"
        _apply(engine, [e for e in real.during if e["event"] != "abort"], recorded.now, prefixes)
        totals["steps"] += 1
        totals["preemptions"] += len(real.preempted)
        totals["loads"] += len(real.loads)
        totals["evictions"] += sum(map(len, real.evicted))
        totals["deferrals"] += real.gauges[2] > 0
    assert not engine.running
    return totals


def _apply(
    engine: FollowingEngine,
    events: list[Event],
    now: float,
    prefixes: dict[str, tuple[str, int]],
) -> None:
    for event in events:
        if event["event"] == "add":
            engine.submit(request_of(event, prefixes), now=now)
        elif event["event"] == "load":
            engine.load_adapter(event["adapter"])
        elif event["event"] == "abort":
            for id in event["ids"]:
                engine.abort(id)


@pytest.mark.parametrize("name", LOADS)
async def test_every_step_equals_the_real_one(
    recorded: Recorded, client: VllmClient, name: str
) -> None:
    """Tokens computed, adapters loaded and evicted in their order, requests preempted and finished,
    and after each step how many run, wait, are deferred, and how many KV blocks are free."""
    prefixes = await send(client, LOADS[name], Random(name))
    totals = follow(recorded, prefixes)

    print(f"{name}: equal in all of {totals}")
    assert totals["steps"] > 100
    if LOADS[name].num_adapters > MAX_LORAS:
        assert totals["evictions"] > 3
    if name == "longer than the KV cache":
        assert totals["preemptions"] > 3
