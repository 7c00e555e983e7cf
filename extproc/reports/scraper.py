"""Scrapes every endpoint's metrics page, again and again, for load reports.

A whole page of vLLM is 50 KB and costs its API server 3.3 ms of CPU. A request for the needed
families only costs 0.3 ms (vLLM 0.32, `GET /metrics/?name[]=...`, the slash matters), so that is
tried first. If it is of no use, other URLs are tried. The first useful one is kept until it fails,
or until it is time to look for a better one.

A report was true at some moment between request and response. Its time is the arrival of the
response, so its age is never overstated; subtract the duration for the other end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from http import HTTPStatus
from random import Random

from yarl import URL

from extproc.reports.engines import EngineMetrics
from extproc.reports.exposition import parse_report
from extproc.reports.loops import (
    EndpointLoops,
    LoopSettings,
    OnFailure,
    Visit,
    read_long,
    rest_after,
)
from extproc.reports.pace import Rest, ScrapePace
from extproc.reports.pagereader import PageReader
from extproc.reports.podclient import PodClient
from extproc.reports.podhttp import ResponseError, TooLargeError, base_url, describe_status
from extproc.types import Endpoint, LoadReport

OnReport = Callable[[str, LoadReport, float, float, float], None]

_CLOSED_S = 1.0
"""Between two scrapes of a pod, at least, for connections that it closes: it may close each."""

# The pod may have restarted, and now know a better URL, without a failed scrape in between.
_KEEP_WAY_S = 60.0

# A server writes 50 KB in 3.3 ms. A rest of three times that keeps a page of many megabytes from
# taking more than a quarter of one of its cores.
_REST_S_PER_BYTE = 3 * 3.3e-3 / 50e3

# Parsing takes about 10 us per KB: from here on in a thread, so that it does not delay decisions.
_THREAD_FROM_BYTES = 256 * 1024

# A filtered page of vLLM has 3 to 10 KB, a whole one 50.
_MAX_KEPT_BYTES = 64 * 1024


class Scraper(EndpointLoops):
    """Scrapes endpoints. `set_endpoints` starts it, `aclose` ends it.

    Args:
        settings: Of the requests; pages over 250 KB are scraped less often.
        pace: The intervals.
        page_url: Returns the URL of an endpoint's metrics page, without a slash at its end.
        on_report: Called with address, report, arrival time of the response, seconds it took, and
            the longest time until the next is asked for.
        on_failure: Called with address, reason, and whether the address refuses connections.
        is_expected: Returns whether the last report of an address says what is expected there, and
            nothing is known since for which the next is due.
        clock: Monotonic seconds.
        cpu_clock: Seconds of CPU that this thread has taken.
        max_page_bytes: Longest page. A server may outgrow it by its LoRA series alone, which it
            never removes; then everything but those is requested.
    """

    def __init__(
        self,
        profile: EngineMetrics,
        settings: LoopSettings,
        pace: ScrapePace,
        *,
        page_url: Callable[[Endpoint], str] = lambda endpoint: f"{base_url(endpoint)}/metrics",
        on_report: OnReport,
        on_failure: OnFailure,
        is_expected: Callable[[str], bool],
        clock: Callable[[], float],
        cpu_clock: Callable[[], float],
        rng: Random,
        max_page_bytes: int = 4 * 1024 * 1024,
    ) -> None:
        super().__init__(self._scrapes, settings, on_failure=self._on_fail, rng=rng)
        self._profile, self._pace = profile, pace
        self._page_url = page_url
        self._is_expected = is_expected
        self._rests: dict[str, tuple[Rest, PodClient]] = {}
        self._on_report, self._on_failed = on_report, on_failure
        self._clock, self._cpu_clock = clock, cpu_clock
        self._max_page_bytes = max_page_bytes

    def set_endpoints(self, endpoints: Iterable[Endpoint]) -> None:
        """Scrape exactly these from now on. Call within the event loop."""
        endpoints = list(endpoints)
        for address in self._rests.keys() - {endpoint.address for endpoint in endpoints}:
            self._rests.pop(address)[0].close()
        super().set_endpoints(endpoints)

    def interval_s(self) -> float:
        """Return the seconds from one scrape of a pod that has surprised to the next, now."""
        return self._pace.interval_s

    def wait_s(self, address: str) -> float | None:
        """Return how long a scrape that is due can wait, as all is as expected; None for not at
        all. A connection that is closed is a surprise: the pod may have ended.
        """
        rest, client = self._rests.get(address, (None, None))
        if rest is None or client is None or not rest.calm_s:
            return None
        is_expected = client.is_open and self._is_expected(address)
        return rest.wait_s(self._clock(), is_expected=is_expected)

    def closed(self, address: str) -> None:
        """Scrape at once: the pod may have ended, or does not keep what is idle for so long."""
        if (rest := self._rest_of(address)) is not None:
            rest.hurry()
        self.poke(address, min_interval_s=_CLOSED_S)

    def surprised(self, address: str) -> None:
        """Scrape soon, and often for a while: something has happened to this pod."""
        rest = self._rest_of(address)
        if rest is not None and rest.calm_s:  # else it is scraped soon, or has failed for some time
            rest.surprised(self._clock())
            self.poke(address)

    def due(self, address: str) -> None:
        """Scrape soon: so much has been sent to this pod that its next report is due."""
        rest = self._rest_of(address)
        if rest is not None and rest.hurry():
            self.poke(address)

    def _rest_of(self, address: str) -> Rest | None:
        known = self._rests.get(address)
        return None if known is None else known[0]

    def _on_fail(self, address: str, error: str, is_unreachable: bool) -> None:
        if (rest := self._rest_of(address)) is not None:
            rest.surprised(self._clock())
        self._on_failed(address, error, is_unreachable)

    def _scrapes(self, client: PodClient, endpoint: Endpoint) -> Visit:
        address = endpoint.address
        page = _Page(client, self._page_url(endpoint), self._profile, self._max_page_bytes)
        reader, rest = PageReader(self._profile), Rest(self._pace, self._rng)
        if address in self._rests:
            self._rests[address][0].close()
        self._rests[address] = rest, client

        async def scrape() -> float:
            began_s = self._clock()
            if rest.calm_s and not self._is_expected(address):
                rest.surprised(began_s)
            rest.asked(began_s)
            text = await page.fetch()
            taken_at_s, cpu_s = self._clock(), self._cpu_clock()
            if len(text) <= _MAX_KEPT_BYTES:
                report = reader.read(text)
            elif len(text) < _THREAD_FROM_BYTES:
                report = parse_report(text, self._profile)
            else:
                report, reading_s = await read_long(parse_report, text, self._profile)
                cpu_s = self._cpu_clock() - reading_s
            took_s = taken_at_s - began_s
            self._on_report(address, report, taken_at_s, took_s, rest.longest_s)
            rest.reported(taken_at_s, is_expected=self._is_expected(address))
            cost_s = self._cpu_clock() - cpu_s
            self._pace.read_page(cost_s)
            return max(len(text) * _REST_S_PER_BYTE, rest_after(cost_s))

        return scrape


class _Page:
    """One server's metrics page: the URLs to try, and the useful one."""

    def __init__(self, client: PodClient, url: str, profile: EngineMetrics, max_bytes: int) -> None:
        self._client = client
        self._max_bytes = max_bytes
        self._signs = tuple(name.encode() for name in profile.running)
        lora = profile.lora_info.family if profile.lora_info is not None else None
        self._filtered = _filter_url(url, profile.families)
        self._without_lora = _filter_url(url, [name for name in profile.families if name != lora])
        # Some servers have the whole page at one of these two paths only.
        self._ways = (self._filtered, URL(url), URL(f"{url}/"))
        self._kept: URL | None = None
        self._kept_until_s = 0.0

    async def fetch(self) -> bytes:
        """Fetch a page with the wanted metrics; else the whole page of a server without them.

        Raises:
            ResponseError: No URL returned 200, or the page is too long. All are tried again.
            OSError: As `PodClient.get`. Likewise.
        """
        now = asyncio.get_running_loop().time
        kept, self._kept = self._kept, None  # kept again if it succeeds
        ways = (kept,) if kept is not None and now() < self._kept_until_s else self._ways
        status, page_without = 0, None
        for asked in ways:
            way, status, page = await self._get(asked)
            if status == HTTPStatus.OK and any(sign in page for sign in self._signs):
                self._kept = way
                if way is not kept:
                    self._kept_until_s = now() + _KEEP_WAY_S
                return page
            if status == HTTPStatus.OK:
                page_without = page
                if way is not self._filtered:
                    break
        if page_without is None:
            raise ResponseError(f"metrics page: {describe_status(status)}")
        return page_without

    async def _get(self, way: URL) -> tuple[URL, int, bytes]:
        try:
            return way, *await self._client.get(way, max_bytes=self._max_bytes)
        except TooLargeError:
            way = self._without_lora
            return way, *await self._client.get(way, max_bytes=self._max_bytes)


def _filter_url(url: str, families: Iterable[str]) -> URL:
    return URL(f"{url}/?" + "&".join(f"name[]={family}" for family in families))
