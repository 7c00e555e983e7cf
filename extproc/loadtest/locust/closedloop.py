"""Users who ask, read the answer to its end, think, and ask again.

They share one workload and take its requests in order; its times do not matter. A slow server gets
fewer requests: what users would feel who wait for each other shows only in an open loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from random import Random

import gevent
from gevent.pool import Group

from extproc.loadtest.locust.sending import Sender
from extproc.workload.exchange import RequestRecord
from extproc.workload.requests import Arrival

_IDLE_S = 0.2


class ClosedLoop:
    """Hands a share of a workload to whoever asks next.

    Args:
        sender: Sends single requests.
        share: What to send: place in the workload and request.
        sink: Gets each record when its request is over.
        think_s: Mean time between an answer and the user's next question; exponential.
        rng: Draws it.
    """

    def __init__(
        self,
        sender: Sender,
        share: Iterable[tuple[int, Arrival]],
        sink: Callable[[RequestRecord], None],
        *,
        think_s: float,
        rng: Random,
    ) -> None:
        self._sender = sender
        self._left = list(share)[::-1]
        self._sink = sink
        self._think_s = think_s
        self._rng = rng
        self._requests = Group()

    @property
    def is_over(self) -> bool:
        """Whether everything was sent, and answered or cut."""
        return not self._left and not self._requests

    def stop(self) -> None:
        """Send nothing more, and cut what is under way."""
        self._left.clear()
        self._requests.kill()

    def ask(self) -> None:
        """Be a user for one question, its answer, and a thought; or wait, if nothing is left."""
        early_s = -self._sender.now()
        if early_s > 0 or not self._left:
            gevent.sleep(max(early_s, _IDLE_S if not self._left else 0.0))
            return
        index, arrival = self._left.pop()
        # Not in the user's greenlet: when that is killed, its request is still counted.
        self._requests.spawn(self._send, index, arrival).join()
        if self._think_s:
            gevent.sleep(self._rng.expovariate(1 / self._think_s))

    def _send(self, index: int, arrival: Arrival) -> None:
        self._sink(self._sender.send(arrival, index, self._sender.encode(arrival, index)))
