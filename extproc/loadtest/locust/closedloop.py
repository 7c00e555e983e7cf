"""Closed loop: users who ask, read the response to its end, think, and ask again.

They share one workload and send its requests in order; its times do not count. A slow server gets
fewer requests: only an open loop shows what users feel who do not wait for each other.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from random import Random

from extproc.loadtest.replay import STOPPED, Sender
from extproc.workload.exchange import RequestRecord
from extproc.workload.requests import Arrival

_LOOK_S = 0.05
"""Between two looks at the number of users."""


class ClosedLoop:
    """Users who send a share of a workload.

    Args:
        sender: Sends single requests.
        share: Place in the workload and request.
        sink: Called with each record when its request ends.
        num_users: The number of users now.
        think_s: Mean time between a response and the user's next request; exponential.
        rng: Draws it.
    """

    def __init__(
        self,
        sender: Sender,
        share: Iterable[tuple[int, Arrival]],
        sink: Callable[[RequestRecord], None],
        *,
        num_users: Callable[[], int],
        think_s: float,
        rng: Random,
    ) -> None:
        self._sender = sender
        self._left = deque(share)
        self._sink = sink
        self._num_users = num_users
        self._think_s = think_s
        self._rng = rng

    async def run(self) -> None:
        """Send the whole share, and wait until all requests ended."""
        if (early_s := -self._sender.now()) > 0:
            await asyncio.sleep(early_s)
        users: dict[int, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            while self._left:
                for user in range(self._num_users()):
                    if user not in users or users[user].done():
                        users[user] = group.create_task(self._ask(user))
                await asyncio.sleep(_LOOK_S)

    async def _ask(self, user: int) -> None:
        """One user's requests, until none is left or there are fewer users."""
        while self._left and user < self._num_users():
            index, arrival = self._left.popleft()
            record = await self._sender.send(arrival, index)
            self._sink(record)
            if record.error == STOPPED:
                return
            if self._think_s:
                await asyncio.sleep(self._rng.expovariate(1 / self._think_s))
