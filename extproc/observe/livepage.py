"""The live page on the admin port: a few files, and a feed of server-sent events.

1. A frame is composed at most once per `interval_s`, once for all viewers, and not at all without
   viewers. Composing takes at most `MAX_SHARE` of the loop's time: if it is slow, it is done less
   often.
2. Every viewer gets the newest frame as soon as it can take one; a slow viewer misses frames. One
   that takes nothing for `patience_s` is dropped. Until then it holds one frame and the transport's
   buffer, about 200 KB; `max_viewers` bounds their number. Where there are as many, the oldest of
   the address that has most makes room for another address.
3. The page loads nothing from other hosts and has no inline script or style, as the admin port's
   Content-Security-Policy requires.

Source of the format: html.spec.whatwg.org/multipage/server-sent-events.html.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

from aiohttp import web

from extproc.wire.yielding import yield_to_requests

log = logging.getLogger(__name__)

MAX_VIEWERS = 16
MAX_SHARE = 0.05
"""Largest share of the event loop's time."""
RETRY_MS = 1000
"""Time until a browser reopens a feed that broke off."""
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


@dataclass(eq=False)
class LivePage:
    """Serves the page and feeds its viewers.

    Attributes:
        compose: Yields b"" after each pass, and in the end a frame: JSON on one line.
        clock: Monotonic seconds.
        interval_s: Least time between two frames.
        max_viewers: Feeds at one time; further ones get 503.
        patience_s: Longest time for a viewer to take one frame.
    """

    compose: Callable[[], Iterator[bytes]]
    clock: Callable[[], float]
    _: KW_ONLY
    interval_s: float = 0.25
    max_viewers: int = MAX_VIEWERS
    patience_s: float = 10.0
    _frame: bytes = b""
    _next_frame: asyncio.Event = field(default_factory=asyncio.Event)
    _producer: asyncio.Task[None] | None = None
    _writing: set[asyncio.Transport] = field(default_factory=set)
    _is_closing: bool = False
    _viewers: dict[asyncio.Transport, str] = field(default_factory=dict)  # addresses; oldest first

    def __post_init__(self) -> None:
        self._files = {path: (_FOLDER / name).read_bytes() for path, (name, _) in _FILES.items()}

    @property
    def num_viewers(self) -> int:
        """Feeds that are open."""
        return len(self._viewers)

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
        """Serve the feed: one event per frame, until the viewer disconnects or the server stops."""
        if request.headers.get("Sec-Fetch-Site") in _FOREIGN:
            # Such a page could not read the feed, but would count as a viewer.
            raise web.HTTPForbidden(text="the feed is for the page on this port\n")
        transport, host = request.transport, request.remote or ""
        is_full = self.num_viewers >= self.max_viewers and not self._make_room(host)
        if transport is None or is_full or self._is_closing:
            text = f"too many viewers: {self.max_viewers} at most; close a page that is open\n"
            raise web.HTTPServiceUnavailable(text=text, headers={"Retry-After": "5"})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        self._viewers[transport] = host
        try:
            await response.prepare(request)
            await response.write(b"retry: %d\n\n" % RETRY_MS)
            await self._follow(request, response)
        except ConnectionResetError:
            pass  # it disconnected, or was dropped
        finally:
            self._viewers.pop(transport, None)
        return response

    def _make_room(self, host: str) -> bool:
        """End a feed for one more of `host`; return whether there was one to end."""
        [(largest, num)] = Counter(self._viewers.values()).most_common(1)
        if largest == host or num == 1:
            return False
        oldest = next(each for each, its_host in self._viewers.items() if its_host == largest)
        del self._viewers[oldest]
        oldest.abort()
        return True

    async def _follow(self, request: web.Request, response: web.StreamResponse) -> None:
        """Write frames until there are no more.

        Raises:
            ConnectionResetError: The viewer disconnected, or did not read and was dropped.
        """
        if self._producer is None or self._producer.done():
            # Kept in an attribute; ends by itself after the last viewer.
            self._producer = asyncio.get_running_loop().create_task(self._produce())
        producer = self._producer
        while not producer.done():
            await self._next_frame.wait()
            if not self._frame:
                return
            await self._write(request, response)

    async def _write(self, request: web.Request, response: web.StreamResponse) -> None:
        transport = request.transport
        if transport is None:
            raise ConnectionResetError
        self._writing.add(transport)
        try:
            async with asyncio.timeout(self.patience_s):
                await response.write(self._frame)
        except TimeoutError:
            transport.abort()
            raise ConnectionResetError from None
        finally:
            self._writing.discard(transport)

    async def _produce(self) -> None:
        """Compose frames while there are viewers, and wake the viewers."""
        try:
            while self.num_viewers:
                frame, took_s = await self._composed()
                self._frame = b"data: %b\n\n" % frame
                self._wake()
                await asyncio.sleep(max(self.interval_s, took_s / MAX_SHARE))
        except Exception:
            # Each open page reconnects every `RETRY_MS`.
            log.exception("the live page's feed has failed")
        finally:
            self._frame = b""  # ends the feeds that wait
            self._wake()

    async def _composed(self) -> tuple[bytes, float]:
        """Return a frame, and the seconds that its passes took."""
        frame, took_s, began_s = b"", 0.0, self.clock()
        for frame in self.compose():
            took_s += self.clock() - began_s
            if not frame:
                await yield_to_requests()
            began_s = self.clock()
        return frame, took_s

    def _wake(self) -> None:
        woken, self._next_frame = self._next_frame, asyncio.Event()
        woken.set()

    async def _close(self, app: web.Application) -> None:
        """End all feeds; abort those whose viewers do not read."""
        self._is_closing = True
        if self._producer is not None:
            self._producer.cancel()
            await asyncio.gather(self._producer, return_exceptions=True)
        for transport in tuple(self._writing):
            transport.abort()
