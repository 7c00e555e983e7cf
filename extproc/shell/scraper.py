"""Reads every endpoint's metrics page again and again, and hands the load reports on.

A whole page of vLLM is 50 KB and costs its API server 3.3 ms of CPU; asked for the needed families
only, it is 0.3 ms (vLLM 0.32, `GET /metrics/?name[]=...`, the slash matters). So that is asked
first. Where it is no use, the ways after it are tried, and the first one that is of use is kept
until it fails, or until it is time to look for a better one.

A report was true at some moment between request and response. Its time is when the response had
arrived, so its age is never overstated; who needs the other end takes the duration off.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from http import HTTPStatus
from random import Random

import aiohttp
from yarl import URL

from extproc.core.engines import EngineProfile
from extproc.core.exposition import parse_report
from extproc.core.types import Endpoint, LoadReport
from extproc.shell.loops import EndpointLoops, LoopSettings, OnFailure, Visit, rest_after
from extproc.shell.podhttp import ResponseError, TooLargeError, base_url, get

OnReport = Callable[[str, LoadReport, float, float], None]

# A better way may have come with a restart that no failed scrape told of.
_KEEP_WAY_S = 60.0

# A server writes 50 KB in 3.3 ms. Three times that as a rest keeps a page that has grown to many
# megabytes from taking more than a quarter of one of its cores.
_REST_S_PER_BYTE = 3 * 3.3e-3 / 50e3

# Reading takes about 10 us per KB: from here on in a thread, lest it hold up decisions.
_THREAD_FROM_BYTES = 256 * 1024


class Scraper:
    """Scrapes endpoints. `set_endpoints` starts it, `aclose` ends it."""

    def __init__(
        self,
        profile: EngineProfile,
        settings: LoopSettings,
        *,
        on_report: OnReport,
        on_failure: OnFailure,
        clock: Callable[[], float],
        rng: Random,
        max_page_bytes: int = 4 * 1024 * 1024,
    ) -> None:
        """Make it; nothing is asked before `set_endpoints`.

        Args:
            profile: What the engine calls its metrics.
            settings: Of the scrapes; pages over 250 KB are scraped less often.
            on_report: Called with address, report, when the response had arrived and how many
                seconds the scrape took.
            on_failure: Called with address, what went wrong and whether nobody is there.
            clock: Monotonic seconds.
            rng: For phases and backoff.
            max_page_bytes: Longest page. A server may outgrow it by LoRA series alone, which are
                never removed; it is then asked for everything but those.
        """
        self._profile = profile
        self._on_report = on_report
        self._clock = clock
        self._max_page_bytes = max_page_bytes
        self._loops = EndpointLoops(self._begin, settings, on_failure=on_failure, rng=rng)

    def set_endpoints(self, endpoints: Iterable[Endpoint]) -> None:
        """Scrape exactly these from now on. Call within the event loop."""
        self._loops.set_endpoints(endpoints)

    async def aclose(self) -> None:
        """End all scrapes. No callback is called after this."""
        await self._loops.aclose()

    def _begin(self, session: aiohttp.ClientSession, endpoint: Endpoint) -> Visit:
        page = _Page(session, base_url(endpoint), self._profile, self._max_page_bytes)

        async def scrape() -> float:
            began_s = self._clock()
            text = await page.fetch()
            taken_at_s = self._clock()
            if len(text) < _THREAD_FROM_BYTES:
                report = parse_report(text, self._profile)
            else:
                report = await asyncio.to_thread(parse_report, text, self._profile)
            self._on_report(endpoint.address, report, taken_at_s, taken_at_s - began_s)
            return max(len(text) * _REST_S_PER_BYTE, rest_after(self._clock() - taken_at_s))

        return scrape


class _Page:
    """One server's metrics page: the ways to it, and the one that is of use."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, profile: EngineProfile, max_bytes: int
    ) -> None:
        self._session = session
        self._max_bytes = max_bytes
        self._signs = tuple(name.encode() for name in profile.running)
        lora = profile.lora_info.family if profile.lora_info is not None else None
        self._filtered = _filter_url(url, profile.families)
        self._without_lora = _filter_url(url, [name for name in profile.families if name != lora])
        # Some servers know the whole page by one of its two names only.
        self._ways = (self._filtered, URL(f"{url}/metrics"), URL(f"{url}/metrics/"))
        self._kept: URL | None = None
        self._kept_until_s = 0.0

    async def fetch(self) -> bytes:
        """Get a page with the wanted metrics; else the whole page of a server without them.

        Raises:
            ResponseError: No way answered 200, or the page is too long. All ways are open again.
            aiohttp.ClientError, OSError: No answer. Likewise.
        """
        now = asyncio.get_running_loop().time
        kept, self._kept = self._kept, None  # until it has proved itself again
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
            raise ResponseError(f"HTTP {status} for the metrics page")
        return page_without

    async def _get(self, way: URL) -> tuple[URL, int, bytes]:
        try:
            return way, *await get(self._session, way, max_bytes=self._max_bytes)
        except TooLargeError:
            way = self._without_lora
            return way, *await get(self._session, way, max_bytes=self._max_bytes)


def _filter_url(url: str, families: Iterable[str]) -> URL:
    return URL(f"{url}/metrics/?" + "&".join(f"name[]={family}" for family in families))
