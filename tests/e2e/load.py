"""Clients that send requests without pause, and what became of each request."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from extproc.lab.fakepod.podserver import RunningPod
from tests.e2e.conftest import PATIENCE_S
from tests.e2e.harness import Answer, Client, chat
from tests.waiting import eventually


def outcome(answer: Answer) -> str:
    """`served`, or the code of an error, whose shape is checked."""
    return "served" if answer.status == 200 else str(answer.error_code)


class Load:
    """Clients with one request at a time each, until the block ends.

    Attributes:
        answers: In the order in which they came.
        lost_s: When each request that was not served was sent, monotonic seconds.
        num_sent: Requests so far.
    """

    def __init__(
        self, client: Client, models: Sequence[str], *, num_clients: int = 8, max_tokens: int = 2
    ) -> None:
        self.answers: list[Answer] = []
        self.lost_s: list[float] = []
        self.num_sent = 0
        self._client = client
        self._models = models
        self._num_clients = num_clients
        self._max_tokens = max_tokens
        self._stopped = False

    @property
    def outcomes(self) -> Counter[str]:
        """How many requests had which outcome."""
        return Counter(map(outcome, self.answers))

    @property
    def all_served(self) -> Counter[str]:
        """The value of `outcomes` where nothing failed."""
        return Counter({"served": len(self.answers)})

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Load]:
        async with asyncio.TaskGroup() as group:
            for number in range(self._num_clients):
                group.create_task(self._ask(number))
            try:
                yield self
            finally:
                self._stopped = True

    async def _ask(self, number: int) -> None:
        while not self._stopped:
            model = self._models[number % len(self._models)]
            began_s = time.monotonic()
            self.num_sent += 1
            async with asyncio.timeout(PATIENCE_S):
                answer = await self._client.chat(model, max_tokens=self._max_tokens)
            self.answers.append(answer)
            if answer.status != 200:
                self.lost_s.append(began_s)
            number += 1

    async def some(self, num: int = 40) -> list[Answer]:
        """Wait for the next `num` answers, and return them."""
        seen = len(self.answers)
        await eventually(lambda: len(self.answers) >= seen + num)
        return self.answers[seen : seen + num]

    async def until_served(self) -> None:
        """Wait until forty answers in a row are good: the service is whole again."""

        async def is_whole() -> bool:
            return set(map(outcome, await self.some())) == {"served"}

        await eventually(is_whole)


CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
_LONG = {
    CHAT: chat("base", max_tokens=100),
    RESPONSES: json.dumps({"model": "base", "input": "x", "max_output_tokens": 100}).encode(),
}


async def killed_by(client: Client, path: str, pods: list[RunningPod], *, at_most: int) -> Answer:
    """Send a long request, kill up to so many pods that get it, and return how it ended."""
    asked = asyncio.ensure_future(client.request("POST", path, _LONG[path]))
    alive = list(pods)
    while len(alive) > len(pods) - at_most:
        await eventually(lambda: asked.done() or with_requests(alive))
        if asked.done():
            break
        [busy] = with_requests(alive)
        alive.remove(busy)
        await busy.kill()
    return await asked


def with_requests(pods: list[RunningPod]) -> list[RunningPod]:
    """The pods that have got a request."""
    return [pod for pod in pods if pod.pod.last_requests]
