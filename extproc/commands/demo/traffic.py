"""The demo's clients: the official `openai` client, streaming, in an open loop."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

from openai import AsyncOpenAI

from extproc.commands.demo.fleet import ADAPTERS
from extproc.loadtest.replay import send_when_due
from extproc.workload.draws import zipf_shares
from extproc.workload.requests import Arrival, Workload
from extproc.workload.synthetic import independent

PROMPT = "tell me more " * 20
MIN_OUTPUT_TOKENS, MAX_OUTPUT_TOKENS = 24, 96
ZIPF_EXPONENT = 0.8
TIMEOUT_S = 120.0
"""Of each step of a request. The client's default, 5 s to connect, is too short on a busy
machine."""


@dataclass(slots=True)
class Results:
    """The results as the clients saw them.

    Attributes:
        ttft_s: Seconds to the first streamed token of each request that got one.
        errors: Failed requests, by the kind of failure.
        num_done: Requests that ended, including failed ones.
    """

    ttft_s: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    num_done: int = 0


def make_workload(seconds: float, rate: float, seed: int) -> Workload:
    """Return Poisson arrivals; the adapters' shares follow a Zipf distribution."""
    return independent(
        "demo",
        shares=dict(zip(ADAPTERS, zipf_shares(len(ADAPTERS), ZIPF_EXPONENT), strict=True)),
        ranks=dict.fromkeys(ADAPTERS, 16),
        rate_rps=rate,
        duration_s=seconds,
        seed=seed,
        lengths=lambda rng: (len(PROMPT), rng.randint(MIN_OUTPUT_TOKENS, MAX_OUTPUT_TOKENS)),
    )


async def send_all(url: str, workload: Workload, results: Results) -> None:
    """Send each request when it is due, whether or not earlier ones have ended."""
    async with AsyncOpenAI(
        base_url=f"{url}/v1", api_key="demo", max_retries=0, timeout=TIMEOUT_S
    ) as client:

        async def send(_index: int, arrival: Arrival) -> None:
            await _send(client, arrival, results)

        await send_when_due(enumerate(workload.arrivals), send)


async def _send(client: AsyncOpenAI, arrival: Arrival, results: Results) -> None:
    try:
        failure = await _stream(client, arrival, results)
    # Any: in mid-stream the client raises errors of its HTTP library, which may change.
    except Exception as error:
        failure = type(error).__name__
    if failure:
        results.errors[failure] += 1
    results.num_done += 1


async def _stream(client: AsyncOpenAI, arrival: Arrival, results: Results) -> str:
    """Read one response to its end; return the kind of failure, or ""."""
    began_s, num_tokens, model = time.perf_counter(), 0, str(arrival.adapter)
    stream = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": PROMPT}],
        max_tokens=arrival.output_tokens,
        stream=True,
    )
    async with stream:
        async for chunk in stream:
            if chunk.model != model:
                return "WrongModel"
            if chunk.choices and chunk.choices[0].delta.content:
                if not num_tokens:
                    results.ttft_s.append(time.perf_counter() - began_s)
                num_tokens += 1
    return "" if num_tokens == arrival.output_tokens else "IncompleteResponse"
