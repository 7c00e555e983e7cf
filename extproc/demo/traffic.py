"""The demo's clients: the official `openai` client, streaming, open loop."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field

from openai import AsyncOpenAI, OpenAIError

from extproc.demo.stack import ADAPTERS, Stack

PROMPT_WORDS = 60
MIN_OUTPUT_TOKENS, MAX_OUTPUT_TOKENS = 16, 48
ZIPF_EXPONENT = 0.7


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of the schedule: when (seconds from the start), for whom, how long an answer."""

    at_s: float
    model: str
    output_tokens: int


@dataclass(slots=True)
class Results:
    """What the clients saw.

    Attributes:
        ttft_s: Time to the first streamed token of each request that got one, seconds.
        num_errors: Requests that failed, by the kind of failure.
        num_done: Requests that ended, failed ones included.
    """

    ttft_s: list[float] = field(default_factory=list)
    errors: dict[str, int] = field(default_factory=dict)
    num_done: int = 0


def make_schedule(seconds: float, rate: float, seed: int) -> list[Arrival]:
    """Poisson arrivals; the adapters' shares fall off like Zipf's."""
    rng = random.Random(seed)
    weights = [1 / (rank + 1) ** ZIPF_EXPONENT for rank in range(len(ADAPTERS))]
    arrivals: list[Arrival] = []
    at_s = 0.0
    while True:
        at_s += rng.expovariate(rate)
        if at_s >= seconds:
            return arrivals
        (model,) = rng.choices(ADAPTERS, weights)
        arrivals.append(Arrival(at_s, model, rng.randint(MIN_OUTPUT_TOKENS, MAX_OUTPUT_TOKENS)))


async def send_all(stack: Stack, schedule: list[Arrival], results: Results) -> None:
    """Send each request at its time, whether or not earlier ones have ended."""
    url = f"http://{stack.gateway}/v1"
    async with AsyncOpenAI(base_url=url, api_key="demo", max_retries=0) as client:
        started_s = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for arrival in schedule:
                await asyncio.sleep(max(0.0, started_s + arrival.at_s - time.perf_counter()))
                tasks.create_task(_send(client, arrival, results))


async def _send(client: AsyncOpenAI, arrival: Arrival, results: Results) -> None:
    began_s, first = time.perf_counter(), True
    try:
        stream = await client.chat.completions.create(
            model=arrival.model,
            messages=[{"role": "user", "content": "tell me more " * (PROMPT_WORDS // 3)}],
            max_tokens=arrival.output_tokens,
            stream=True,
        )
        async for chunk in stream:
            if first and chunk.choices and chunk.choices[0].delta.content:
                results.ttft_s.append(time.perf_counter() - began_s)
                first = False
    except OpenAIError as error:
        kind = type(error).__name__
        results.errors[kind] = results.errors.get(kind, 0) + 1
    finally:
        results.num_done += 1
