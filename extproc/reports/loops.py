"""One endless loop of visits per endpoint: the rules that `scraper` and `listings` share.

1. The first visit is immediate, but few begin in one turn of the event loop. The following ones are
   spread by a random phase, so that many endpoints are not visited at the same moment.
2. Visits of one endpoint never overlap. A visit may ask for a longer rest before the next, and a
   rest may be prolonged while nothing happens. The interval may change meanwhile: it holds at once.
3. After failures visits become rarer, up to a limit; one success restores the normal pace.
4. No failure of a visit ends its loop, or affects other loops.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from functools import cache, partial
from math import inf
from random import Random
from ssl import SSLContext
from time import sleep, thread_time
from typing import TypeVar

from extproc.passes import Rests
from extproc.reports.longpages import LongPages
from extproc.reports.patience import PacedStarts, Patience
from extproc.reports.podclient import PodClient
from extproc.reports.podhttp import FAILURES, UNREACHABLE, base_url, describe
from extproc.reports.podsecrets import PodSecrets
from extproc.types import Endpoint

logger = logging.getLogger(__name__)

# Returns the least seconds to rest; 0 for the interval alone.
Visit = Callable[[], Awaitable[float]]
Begin = Callable[[PodClient, Endpoint], Visit]
T = TypeVar("T")
OnFailure = Callable[[str, str, bool], None]

# A burst of pokes (every 404 is one) must not become a burst of visits.
_MIN_REST_S = 0.05

READING_SHARE = 0.005
"""Largest share of a core for reading one server's responses: expensive pages are scraped less
often. A page of vLLM takes 0.02 to 0.1 ms. It is so small that a few expensive pages do not
determine the 99th percentile of decision times. CPU time counts: where other processes have the
cores, reading less would only make all that is known old."""

# Between two looks at the interval: it may be a hundred times as long while many pods join.
_RECHECK_S = 5.0

# What a timer may come too early by: the event loop's resolution.
_CLOCK_S = 1e-3

# Keeps 2**n finite; every sensible limit is reached long before.
_MAX_DOUBLINGS = 30


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """The pace of a loop of visits, and the headers and TLS of its requests.

    Attributes:
        interval_s: From the start of one visit to the start of the next.
        timeout_s: Longest visit.
        max_backoff_s: Longest rest after failures.
        headers: Sent with every request, e.g. `Authorization`.
        ssl: For pods behind TLS; None for the system's trust.
        secrets: As for `PodClient`.
        room: For long responses.
    """

    interval_s: float
    timeout_s: float
    max_backoff_s: float
    headers: Mapping[str, str] | None = None
    ssl: SSLContext | None = None
    secrets: PodSecrets | None = None
    room: LongPages = field(default_factory=LongPages)


class EndpointLoops:
    """Runs one loop of visits per endpoint. Belongs to one event loop.

    Args:
        begin: Called once per loop; returns the function that makes one visit, with whatever the
            visits of one endpoint have to remember.
        on_failure: Called with address, reason, and whether the address refuses connections.
    """

    def __init__(
        self, begin: Begin, settings: LoopSettings, *, on_failure: OnFailure, rng: Random
    ) -> None:
        self._begin = begin
        self._settings = settings
        self._on_failure = on_failure
        self._rng = rng
        self._loops: dict[str, _Loop] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._starts = PacedStarts()

    def set_endpoints(self, endpoints: Iterable[Endpoint]) -> None:
        """Visit exactly these from now on. Call within the event loop.

        Loops of endpoints that stay are not disturbed; an endpoint with another URL is a new one.
        """
        wanted = {endpoint.address: endpoint for endpoint in endpoints}
        for address, loop in list(self._loops.items()):
            if address not in wanted or base_url(wanted[address]) != loop.url:
                self._end(self._loops.pop(address).task)
        for address, endpoint in wanted.items():
            if address not in self._loops:
                self._loops[address] = self._start(endpoint)

    def poke(self, address: str, *, min_interval_s: float = 0.0) -> None:
        """Visit this endpoint soon instead of at the regular time. Unknown addresses are ignored.

        The visit begins after this call. Pokes with `min_interval_s` cause at most one visit in
        that time.
        """
        visits = self._loops.get(address)
        if visits is None:
            return
        if not min_interval_s:
            visits.rests.end()
            return
        loop = asyncio.get_running_loop()
        wait_s = max(0.0, visits.next_poke_s - loop.time())
        if wait_s <= min_interval_s:  # else one is already scheduled
            loop.call_later(wait_s, visits.rests.end)
            visits.next_poke_s = loop.time() + wait_s + min_interval_s

    async def aclose(self) -> None:
        """End all loops and connections. No callback is called after this."""
        self.set_endpoints(())
        await asyncio.gather(*self._ending, return_exceptions=True)

    def interval_s(self) -> float:
        """Return the seconds from the start of one visit to the start of the next, now."""
        return self._settings.interval_s

    def wait_s(self, address: str) -> float | None:
        """Return the seconds that a visit that is due can wait before this is asked again; None for
        not at all."""
        del address
        return None

    def closed(self, address: str) -> None:
        """The server has closed the kept connection between two visits."""

    def _start(self, endpoint: Endpoint) -> _Loop:
        address = endpoint.address
        rests = _Rests(self.interval_s, partial(self.wait_s, address))
        # Not in a TaskGroup: endpoints come and go, and one loop's end must not end the others.
        task = asyncio.get_running_loop().create_task(
            self._run(endpoint, rests), name=f"visits of {address}"
        )
        return _Loop(base_url(endpoint), rests, task)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        task.cancel()

    async def _run(self, endpoint: Endpoint, rests: _Rests) -> None:
        settings = self._settings
        access = settings.headers, settings.ssl, settings.secrets, settings.room
        on_closed = partial(self.closed, endpoint.address)
        with closing(PodClient(*access, on_closed=on_closed)) as client:
            try:
                visit = self._begin(client, endpoint)
            except ValueError as error:  # not a URL
                self._fail(endpoint.address, describe(error), is_unreachable=False)
                return
            visits = partial(self._try, endpoint.address, visit, client)
            await self._starts.wait()
            await visits()
            await rests.rest(self._rng.uniform(0, settings.interval_s), -inf)
            await self._repeat(visits, rests)

    async def _repeat(self, visit: Callable[[], Awaitable[float | None]], rests: _Rests) -> None:
        now = asyncio.get_running_loop().time
        num_failures = 0
        while True:
            began_s = now()
            least_s = await visit()
            if least_s is None:
                num_failures += 1
                began_s = -inf  # failures have a limit of their own, however long the interval is
                rest_s = choose_backoff_s(
                    num_failures,
                    interval_s=self.interval_s(),
                    max_backoff_s=self._settings.max_backoff_s,
                    rng=self._rng,
                )
            else:
                num_failures, rest_s = 0, least_s
            await rests.rest(rest_s, began_s)

    async def _try(self, address: str, visit: Visit, client: PodClient) -> float | None:
        """Make one visit; return the least seconds to rest, None if it failed."""
        is_unreachable = False
        try:
            async with Patience(self._settings.timeout_s):
                return await visit()
        except FAILURES as error:
            message = describe(error)
            # A timeout proves nothing: our own process may have been stopped for as long.
            is_unreachable = isinstance(error, OSError) and error.errno in UNREACHABLE
        except Exception as error:
            logger.exception("visit of %s raised an error", address)
            message = repr(error)
        finally:
            client.release()
        self._fail(address, message, is_unreachable=is_unreachable)
        return None

    def _fail(self, address: str, message: str, *, is_unreachable: bool) -> None:
        try:
            self._on_failure(address, message, is_unreachable)
        except Exception:
            logger.exception("failure of %s could not be recorded", address)


def choose_backoff_s(
    num_failures: int, *, interval_s: float, max_backoff_s: float, rng: Random
) -> float:
    """Return the seconds to rest after `num_failures` in a row.

    Between half and all of the interval doubled with each failure, up to the limit: endpoints that
    fail together must not be visited together again.
    """
    backoff_s = interval_s * 2.0 ** min(num_failures, _MAX_DOUBLINGS)
    return min(backoff_s, max_backoff_s) * rng.uniform(0.5, 1)


@dataclass(slots=True)
class _Loop:
    url: str
    rests: _Rests
    task: asyncio.Task[None]
    next_poke_s: float = 0.0


class _Rests:
    """The rests of one loop.

    Args:
        interval_s: Returns the least seconds from one visit's begin to the next's, now.
        prolong: Returns by how many seconds a rest that is over goes on; None for not at all.
    """

    def __init__(
        self, interval_s: Callable[[], float], prolong: Callable[[], float | None]
    ) -> None:
        self._interval_s, self._prolong = interval_s, prolong
        self._visited_at_s = -inf
        self._is_ended = False
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def end(self) -> None:
        """End the rest, or else the next one."""
        self._is_ended = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def rest(self, least_s: float, visited_at_s: float) -> None:
        """Wait for `least_s`, until the interval since the visit is over (-inf: it is), and as long
        as it is prolonged; or until it is ended."""
        loop = asyncio.get_running_loop()
        began_s, self._visited_at_s = loop.time(), visited_at_s
        rest_s = max(least_s, self._left_s(began_s))
        # A tenth of the cost of a timeout around the wait.
        self._timer = loop.call_later(rest_s, self._recheck)
        self._waiter = loop.create_future()
        try:
            if not self._is_ended:
                await self._waiter
            left_s = min(rest_s, _MIN_REST_S) - (loop.time() - began_s)
            if left_s > 0:
                await asyncio.sleep(left_s)
        finally:
            self._timer.cancel()
            self._is_ended = False

    def _left_s(self, now: float) -> float:
        return min(_RECHECK_S, self._visited_at_s + self._interval_s() - now)

    def _recheck(self) -> None:
        loop = asyncio.get_running_loop()
        left_s = self._left_s(loop.time())
        more_s = left_s if left_s > _CLOCK_S else self._prolong()
        if more_s is None:
            self.end()
        else:
            self._timer = loop.call_later(more_s, self._recheck)


@cache
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "long pages")


async def read_long(read: Callable[..., T], *given: object) -> tuple[T, float]:
    """Return the result of reading a long response, in a thread that rests, and the CPU seconds.

    One after another: to read one takes some times as much memory as it has bytes.
    """

    def timed() -> tuple[T, float]:
        began_s = thread_time()
        result = read(*given, rest=Rests(thread_time, sleep))
        return result, thread_time() - began_s

    return await asyncio.get_running_loop().run_in_executor(_thread(), timed)


def rest_after(reading_s: float) -> float:
    """Return the seconds to rest after a visit whose response took so much CPU time to read."""
    return reading_s / READING_SHARE
