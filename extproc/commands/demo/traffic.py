"""The demo's clients: the official `openai` client, streaming, open loop."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field

from openai import AsyncOpenAI

from extproc.stack.services import ADAPTERS

PROMPT = "tell me more " * 20
MIN_OUTPUT_TOKENS, MAX_OUTPUT_TOKENS = 12, 36
ZIPF_EXPONENT = 0.7
TIMEOUT_S = 120.0
"""Of each step of a request. The client's own is 5 s to connect, too little on a busy machine."""


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
        errors: Requests that failed, by the kind of failure.
        num_done: Requests that ended, failed ones included.
    """

    ttft_s: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
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


async def send_all(gateway: str, schedule: list[Arrival], results: Results) -> None:
    """Send each request at its time, whether or not earlier ones have ended."""
    async with AsyncOpenAI(
        base_url=f"http://{gateway}/v1", api_key="demo", max_retries=0, timeout=TIMEOUT_S
    ) as client:
        started_s = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for arrival in schedule:
                await asyncio.sleep(max(0.0, started_s + arrival.at_s - time.perf_counter()))
                tasks.create_task(_send(client, arrival, results))


async def _send(client: AsyncOpenAI, arrival: Arrival, results: Results) -> None:
    try:
        trouble = await _stream(client, arrival, results)
    # Any: in mid-stream the client lets the errors of its HTTP library through, and that differs.
    except Exception as error:
        trouble = type(error).__name__
    if trouble:
        results.errors[trouble] += 1
    results.num_done += 1


async def _stream(client: AsyncOpenAI, arrival: Arrival, results: Results) -> str:
    """Read one answer to its end; what is wrong with it, or ""."""
    began_s, num_tokens = time.perf_counter(), 0
    stream = await client.chat.completions.create(
        model=arrival.model,
        messages=[{"role": "user", "content": PROMPT}],
        max_tokens=arrival.output_tokens,
        stream=True,
    )
    async with stream:
        async for chunk in stream:
            if chunk.model != arrival.model:
                return "WrongModel"
            if chunk.choices and chunk.choices[0].delta.content:
                if not num_tokens:
                    results.ttft_s.append(time.perf_counter() - began_s)
                num_tokens += 1
    return "" if num_tokens == arrival.output_tokens else "IncompleteAnswer"
