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

from extproc.fleet.engines import EngineProfile
from extproc.fleet.exposition import parse_report
from extproc.fleet.loops import EndpointLoops, LoopSettings, OnFailure, Visit, read_long, rest_after
from extproc.fleet.pace import Pace, Quiet
from extproc.fleet.pagereader import PageReader
from extproc.fleet.podclient import PodClient
from extproc.fleet.podhttp import ResponseError, TooLargeError, base_url, describe_status
from extproc.types import Endpoint, LoadReport

OnReport = Callable[[str, LoadReport, float, float], None]

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
        on_report: Called with address, report, arrival time of the response and seconds it took.
        on_failure: Called with address, reason, and whether the address refuses connections.
        num_picks: Returns how many picks were ever counted at an address; None while one of them
            has not ended, or nobody knows.
        clock: Monotonic seconds.
        max_page_bytes: Longest page. A server may outgrow it by its LoRA series alone, which it
            never removes; then everything but those is requested.
    """

    def __init__(
        self,
        profile: EngineProfile,
        settings: LoopSettings,
        pace: Pace,
        *,
        page_url: Callable[[Endpoint], str] = lambda endpoint: f"{base_url(endpoint)}/metrics",
        on_report: OnReport,
        on_failure: OnFailure,
        num_picks: Callable[[str], int | None],
        clock: Callable[[], float],
        rng: Random,
        max_page_bytes: int = 4 * 1024 * 1024,
    ) -> None:
        super().__init__(self._scrapes, settings, on_failure=on_failure, rng=rng)
        self._profile, self._pace = profile, pace
        self._page_url = page_url
        self._num_picks = num_picks
        self._quiets: dict[str, tuple[Quiet, PodClient]] = {}
        self._on_report = on_report
        self._clock = clock
        self._max_page_bytes = max_page_bytes

    def set_endpoints(self, endpoints: Iterable[Endpoint]) -> None:
        """Scrape exactly these from now on. Call within the event loop."""
        endpoints = list(endpoints)
        for address in self._quiets.keys() - {endpoint.address for endpoint in endpoints}:
            del self._quiets[address]
        super().set_endpoints(endpoints)

    def interval_s(self) -> float:
        """Return the seconds from one scrape of a pod to the next, now."""
        return self._pace.interval_s

    def can_wait(self, address: str) -> bool:
        """Return whether a pod is quiet, and its last report young enough for another interval.

        A connection that is closed is news: the pod may have ended.
        """
        quiet, client = self._quiets.get(address, (None, None))
        if quiet is None or client is None or not (quiet.rest_s and client.is_open):
            return False
        return quiet.can_wait(self._num_picks(address), now=self._clock())

    def _scrapes(self, client: PodClient, endpoint: Endpoint) -> Visit:
        address = endpoint.address
        page = _Page(client, self._page_url(endpoint), self._profile, self._max_page_bytes)
        reader, quiet = PageReader(self._profile), Quiet(self._pace)
        self._quiets[address] = quiet, client

        async def scrape() -> float:
            quiet.asked()
            began_s = self._clock()
            text = await page.fetch()
            taken_at_s = self._clock()
            if len(text) <= _MAX_KEPT_BYTES:
                report = reader.read(text)
            else:
                report = await self._parse(text)
            self._on_report(address, report, taken_at_s, taken_at_s - began_s)
            num_picks = self._num_picks(address)
            quiet.reported(report, num_picks, asked_at_s=began_s, taken_at_s=taken_at_s)
            return max(len(text) * _REST_S_PER_BYTE, rest_after(self._clock() - taken_at_s))

        return scrape

    async def _parse(self, page: bytes) -> LoadReport:
        if len(page) < _THREAD_FROM_BYTES:
            return parse_report(page, self._profile)
        return await read_long(parse_report, page, self._profile)


class _Page:
    """One server's metrics page: the URLs to try, and the useful one."""

    def __init__(self, client: PodClient, url: str, profile: EngineProfile, max_bytes: int) -> None:
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
