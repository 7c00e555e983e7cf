"""Honest clients of a scenario: small requests on a schedule, and long answers; all count."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any, Final, NamedTuple

import aiohttp

from extproc.lab.workload.judge import percentile
from tests.e2e.fuzz.field import DECLARED, HONEST, LONG, SHAKY

NUM_CLIENTS: Final = 10
OK: Final = "ok"
TIMEOUT: Final = "timeout"

_STREAMED_PART: Final = 0.3


class Asked(NamedTuple):
    """One request.

    Attributes:
        phase: What was going on when it was due: `quiet 1`, `attack 1` and so on.
        seconds: From when it was due to the last byte of the answer.
        cause: `OK`, or what went wrong.
    """

    phase: str
    seconds: float
    cause: str


def summarise(asked: Sequence[Asked], phase: str) -> tuple[dict[str, float], dict[str, int]]:
    """Return the figures of one phase, zeros without requests; and its failures by cause."""
    mine = [each for each in asked if each.phase == phase]
    ms = sorted(each.seconds * 1e3 for each in mine)
    failures = Counter(each.cause for each in mine if each.cause != OK)
    figures = {"requests": float(len(mine)), "failed": float(failures.total())}
    times = {"p50 ms": percentile(ms, 0.5), "p99 ms": percentile(ms, 0.99)}
    return figures | times, dict(failures.most_common())


class HonestClients:
    """Ten clients, and one more for the shaky adapters; each asks one thing at a time.

    Attributes:
        phase: What is going on now.
        asked: Requests for adapters that only honest pods have, or that are declared.
        shaky: Requests for adapters that failing pods list too.
    """

    def __init__(self, url: str, rng: Random, *, rate_per_s: float, timeout_s: float) -> None:
        self.phase = "before"
        self.asked: list[Asked] = []
        self.shaky: list[Asked] = []
        self._url = url
        self._rng = rng
        self._timeout_s = timeout_s
        self._each_per_s = rate_per_s / NUM_CLIENTS
        self._stopped = asyncio.Event()

    async def run(self) -> None:
        """Ask until `stop`; what is under way then is waited for."""
        timeout = aiohttp.ClientTimeout(total=self._timeout_s)
        async with aiohttp.ClientSession(timeout=timeout) as http, asyncio.TaskGroup() as tasks:
            for _ in range(NUM_CLIENTS):
                tasks.create_task(self._ask_on(http, (*HONEST, *DECLARED), self.asked))
            tasks.create_task(self._ask_on(http, SHAKY, self.shaky))

    def stop(self) -> None:
        """Ask nothing more."""
        self._stopped.set()

    async def long_answer(self, num_tokens: int) -> str:
        """Ask for so many tokens; `OK`, or how the answer ended."""
        body = {"model": LONG, "prompt": "x", "max_tokens": num_tokens, "stream": True}
        # A second for each: on a busy machine they take several times as long as by themselves.
        timeout = aiohttp.ClientTimeout(total=self._timeout_s + num_tokens)
        async with aiohttp.ClientSession(timeout=timeout) as http:
            return (await answer(http, f"{self._url}/v1/completions", body))[0]

    async def _ask_on(
        self, http: aiohttp.ClientSession, models: Sequence[str], asked: list[Asked]
    ) -> None:
        now = asyncio.get_running_loop().time
        due_s = now() + self._rng.random() / self._each_per_s
        while not self._stopped.is_set():
            await asyncio.sleep(due_s - now())
            phase = self.phase
            cause = await self._ask(http, self._rng.choice(models))
            # From when it was due: one that waited for the last answer has waited.
            asked.append(Asked(phase, now() - due_s, cause))
            due_s += self._rng.uniform(0.5, 1.5) / self._each_per_s

    async def _ask(self, http: aiohttp.ClientSession, model: str) -> str:
        is_streamed = self._rng.random() < _STREAMED_PART
        body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
        url = f"{self._url}/v1/chat/completions"
        return (await answer(http, url, {**body, "stream": is_streamed}))[0]


async def answer(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> tuple[str, str]:
    """Send a request: `OK` or what was wrong, and the model that answered."""
    try:
        async with http.post(url, json=body) as response:
            data = await response.read()
            said = judge(response.status, data, is_streamed=body.get("stream", False))
            return said, response.headers.get("x-served-model", "")
    except TimeoutError:
        return TIMEOUT, ""
    except (aiohttp.ClientError, OSError) as error:
        return f"connection: {type(error).__name__}", ""


def judge(status: int, body: bytes, *, is_streamed: bool) -> str:
    """`OK`, or one word on what was wrong: the status and the error's code."""
    if status != 200:
        return f"{status} {_code(body)}"
    is_whole = body.endswith(b"data: [DONE]\n\n") if is_streamed else b'"choices"' in body
    return OK if is_whole else "cut answer"


def _code(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return "without a code"
