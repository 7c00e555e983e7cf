"""Sends each request when it is due, whatever became of those before it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator

import gevent
from gevent.pool import Group

from extproc.loadtest.locust.sending import Sender
from extproc.workload.exchange import RequestRecord
from extproc.workload.requests import Arrival

_MAX_AHEAD = 256
"""So many requests are written before they are due, in time that nothing else needs: a burst then
costs no more than its sending."""
_SPARE_S = 0.002
"""Nothing is written ahead so shortly before a request is due."""
_MAX_RUSH = 16
"""After so many requests that were late already, those that were begun get a turn."""


class OpenLoop:
    """Sends its share of a workload; each request in a greenlet of its own.

    Args:
        sender: Sends single requests; its time 0 is the workload's.
        share: What to send: place in the workload and request, in order of time.
        sink: Gets each record when its request is over.
    """

    def __init__(
        self,
        sender: Sender,
        share: Iterable[tuple[int, Arrival]],
        sink: Callable[[RequestRecord], None],
    ) -> None:
        self._sender = sender
        self._share = iter(share)
        self._sink = sink
        self._ahead: deque[tuple[int, Arrival, bytes]] = deque()
        self._requests = Group()
        self._dispatcher: gevent.Greenlet[[], None] | None = None

    def start(self) -> None:
        """Begin; returns at once."""
        self._dispatcher = gevent.spawn(self._dispatch)

    @property
    def is_over(self) -> bool:
        """Whether everything was sent, and answered or cut."""
        return self._dispatcher is not None and self._dispatcher.ready() and not self._requests

    def stop(self) -> None:
        """Send nothing more, and cut what is under way."""
        if self._dispatcher is not None:
            self._dispatcher.kill()
        self._requests.kill()

    def _dispatch(self) -> None:
        num_late = 0
        for index, arrival, request in self._written():
            num_late += 1
            while (wait_s := arrival.at_s - self._sender.now()) > 0:
                gevent.sleep(wait_s)
                num_late = 0
            if num_late == _MAX_RUSH:
                gevent.sleep(0)
                num_late = 0
            self._requests.spawn(self._send, index, arrival, request)

    def _written(self) -> Iterator[tuple[int, Arrival, bytes]]:
        """What to send, written while there is time for it."""
        while True:
            if not self._ahead and not self._write_one():
                return
            yield self._ahead.popleft()
            self._write_ahead()

    def _write_ahead(self) -> None:
        while len(self._ahead) < _MAX_AHEAD:
            if self._ahead and self._ahead[0][1].at_s - self._sender.now() < _SPARE_S:
                return
            if not self._write_one():
                return
            gevent.sleep(0)

    def _write_one(self) -> bool:
        following = next(self._share, None)
        if following is None:
            return False
        index, arrival = following
        self._ahead.append((index, arrival, self._sender.encode(arrival, index)))
        return True

    def _send(self, index: int, arrival: Arrival, request: bytes) -> None:
        self._sink(self._sender.send(arrival, index, request, at_s=arrival.at_s))
