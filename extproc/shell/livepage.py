"""The live page on the admin port: a few files, and a feed of server-sent events.

1. A frame is composed at most once per `interval_s`, once for all viewers, and not at all while
   there is none. Should composing take long, it is done less often: it has `MAX_SHARE` of the
   loop's time at most.
2. Every viewer gets the newest frame when it can take one; what it was too slow for it never gets.
   One that takes nothing for `patience_s` is dropped. Until then it holds one frame and what the
   transport has buffered, about 200 KB; `max_viewers` bounds how many there are.
3. Nothing on the page comes from elsewhere and no script or style stands in the page itself, as
   the admin port's Content-Security-Policy asks.

Source of the format: html.spec.whatwg.org/multipage/server-sent-events.html.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from aiohttp import web

log = logging.getLogger(__name__)

INTERVAL_S = 0.25
MAX_VIEWERS = 16
PATIENCE_S = 10.0
MAX_SHARE = 0.05
"""Part of the event loop's time."""
RETRY_MS = 1000
"""After which a browser whose feed broke off asks again."""
FEED_PATH = "/live/feed"

_FOLDER = Path(__file__).parent / "live"
_FILES = {
    "/": ("index.html", "text/html"),
    "/live/page.js": ("page.js", "text/javascript"),
    "/live/feed.js": ("feed.js", "text/javascript"),
    "/live/page.css": ("page.css", "text/css"),
    "/live/icon.svg": ("icon.svg", "image/svg+xml"),
}
_FOREIGN = ("cross-site", "same-site")


class LivePage:
    """Serves the page and feeds its viewers.

    Args:
        compose: Makes a frame: JSON on one line.
        clock: Monotonic seconds.
        interval_s: Least time between two frames.
        max_viewers: Feeds at one time; a further one is answered with 503.
        patience_s: Time that a viewer may take for one frame.
    """

    def __init__(
        self,
        compose: Callable[[], bytes],
        clock: Callable[[], float],
        *,
        interval_s: float = INTERVAL_S,
        max_viewers: int = MAX_VIEWERS,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._compose = compose
        self._clock = clock
        self._interval_s = interval_s
        self._max_viewers = max_viewers
        self._patience_s = patience_s
        self._frame = b""
        self._news = asyncio.Event()
        self._producer: asyncio.Task[None] | None = None
        self._writing: set[asyncio.Transport] = set()
        self._is_closing = False
        self._files = {path: (_FOLDER / name).read_bytes() for path, (name, _) in _FILES.items()}
        self.num_viewers = 0

    def add_to(self, app: web.Application) -> None:
        """Add the page to a server; when that stops, the feeds end."""
        for path in _FILES:
            app.router.add_get(path, self._get_file)
        app.router.add_get(FEED_PATH, self._get_feed)
        app.on_shutdown.append(self._close)

    async def _get_file(self, request: web.Request) -> web.Response:
        _, content_type = _FILES[request.path]
        return web.Response(
            body=self._files[request.path], content_type=content_type, charset="utf-8"
        )

    async def _get_feed(self, request: web.Request) -> web.StreamResponse:
        """The feed: one event per frame, until the viewer or the server goes."""
        if request.headers.get("Sec-Fetch-Site") in _FOREIGN:
            # It could not read the feed, but it could take a viewer's place.
            raise web.HTTPForbidden(text="the feed is for the page on this port\n")
        if self.num_viewers >= self._max_viewers or self._is_closing:
            text = f"too many viewers: {self._max_viewers} at most; close a page that is open\n"
            raise web.HTTPServiceUnavailable(text=text, headers={"Retry-After": "5"})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        self.num_viewers += 1
        try:
            await response.prepare(request)
            await response.write(b"retry: %d\n\n" % RETRY_MS)
            await self._follow(request, response)
        except ConnectionResetError:
            pass  # it left, or was dropped
        finally:
            self.num_viewers -= 1
        return response

    async def _follow(self, request: web.Request, response: web.StreamResponse) -> None:
        """Write frames until nobody makes any more.

        Raises:
            ConnectionResetError: The viewer left, or did not read and was dropped.
        """
        if self._producer is None or self._producer.done():
            # Kept, and ends by itself when the last viewer has left.
            self._producer = asyncio.get_running_loop().create_task(self._produce())
        producer = self._producer
        while not producer.done():
            await self._news.wait()
            if not self._frame:
                return
            await self._write(request, response)

    async def _write(self, request: web.Request, response: web.StreamResponse) -> None:
        transport = request.transport
        if transport is None:
            raise ConnectionResetError
        self._writing.add(transport)
        try:
            async with asyncio.timeout(self._patience_s):
                await response.write(self._frame)
        except TimeoutError:
            transport.abort()
            raise ConnectionResetError from None
        finally:
            self._writing.discard(transport)

    async def _produce(self) -> None:
        """Make frames as long as there are viewers; wake those who wait for one."""
        try:
            while self.num_viewers:
                began_s = self._clock()
                self._frame = b"data: %b\n\n" % self._compose()
                self._tell()
                took_s = self._clock() - began_s
                await asyncio.sleep(max(self._interval_s, took_s / MAX_SHARE))
        except Exception:
            # Each page that is open asks again every `RETRY_MS`.
            log.exception("the live page's feed has failed")
        finally:
            self._frame = b""  # who waits now is sent away
            self._tell()

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def _close(self, app: web.Application) -> None:
        """End all feeds, those at once whose viewers do not read."""
        self._is_closing = True
        if self._producer is not None:
            self._producer.cancel()
            await asyncio.gather(self._producer, return_exceptions=True)
        for transport in tuple(self._writing):
            transport.abort()
