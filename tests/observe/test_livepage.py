"""The live page's files and its feed over real HTTP."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from itertools import count, pairwise

import aiohttp
import pytest

from extproc.observe.livepage import FEED_PATH, LivePage
from tests.service.adminport import admin_server
from tests.waiting import eventually

PATIENCE_S = 60.0


class Served:
    """An admin port with the page; `num_composed` counts its frames."""

    def __init__(
        self,
        compose: Callable[[int], bytes] | None = None,
        clock: Callable[[], float] = time.monotonic,
        **options: float,
    ) -> None:
        self.num_composed = 0
        self._make = compose or (lambda number: json.dumps({"number": number}).encode())
        self.page = LivePage(self._compose, clock, **options)  # type: ignore[arg-type]
        self.server = admin_server(add_page=self.page.add_to)

    def _compose(self) -> Iterator[bytes]:
        self.num_composed += 1
        yield b""
        yield self._make(self.num_composed)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"


@asynccontextmanager
async def serving(
    compose: Callable[[int], bytes] | None = None,
    clock: Callable[[], float] = time.monotonic,
    **options: float,
) -> AsyncIterator[tuple[Served, aiohttp.ClientSession]]:
    served = Served(compose, clock, **{"interval_s": 0.01, **options})
    await served.server.start()
    try:
        async with aiohttp.ClientSession() as session:
            yield served, session
    finally:
        await served.server.stop()


async def next_frame(feed: aiohttp.ClientResponse) -> int:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            line = await feed.content.readline()
            assert line, "the feed has ended"
            if line.startswith(b"data: "):
                number: int = json.loads(line[6:])["number"]
                return number


async def test_the_page_and_all_that_it_names_come_from_this_port() -> None:
    async with serving() as (served, session):
        async with session.get(served.url) as response:
            html = await response.text()
            headers = response.headers
        named = re.findall(r'(?:src|href)="([^"]+)"', html)
        for path in named:
            assert path.startswith("/"), path
        for path in {each for each in named if each.startswith("/live/")}:
            async with session.get(served.url + path) as response:
                assert response.status == 200
                assert response.headers["X-Content-Type-Options"] == "nosniff"

    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert headers["Cache-Control"] == "no-store"
    assert "default-src 'self'" in headers["Content-Security-Policy"]
    assert {"/healthz", "/metrics", "/debug/snapshot", "/debug/decisions?n=20"} <= set(named)
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?! src=)", html)


async def test_the_feed_is_server_sent_events_with_the_ports_headers() -> None:
    async with serving() as (served, session):
        async with session.get(served.url + FEED_PATH) as feed:
            numbers = [await next_frame(feed) for _ in range(5)]
        async with session.get(served.url + FEED_PATH, headers={"Host": "evil.example"}) as other:
            assert other.status == 403

    assert feed.headers["Content-Type"] == "text/event-stream"
    assert feed.headers["Cache-Control"] == "no-store"
    assert "default-src 'self'" in feed.headers["Content-Security-Policy"]
    assert numbers == sorted(set(numbers))


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
async def test_a_page_of_another_site_does_not_count_as_a_viewer(site: str) -> None:
    async with serving() as (served, session):
        headers = {"Sec-Fetch-Site": site}
        async with session.get(served.url + FEED_PATH, headers=headers) as feed:
            assert feed.status == 403
        assert served.page.num_viewers == 0


async def test_without_viewers_nothing_is_composed() -> None:
    async with serving() as (served, session):
        async with session.get(served.url) as response:
            await response.read()
        assert served.num_composed == 0

        async with session.get(served.url + FEED_PATH) as feed:
            await next_frame(feed)
        await eventually(lambda: served.page.num_viewers == 0)
        await asyncio.sleep(0.05)  # what was under way
        composed = served.num_composed
        await asyncio.sleep(0.2)

        assert served.num_composed == composed


async def test_a_frame_is_composed_once_for_all_viewers() -> None:
    async with serving() as (served, session):
        feeds = [await session.get(served.url + FEED_PATH) for _ in range(4)]
        numbers = [[await next_frame(feed) for _ in range(3)] for feed in feeds]
        composed = served.num_composed
        for feed in feeds:
            feed.close()

    assert composed >= max(map(max, numbers))
    assert all(a < b for seen in numbers for a, b in pairwise(seen))


async def test_slow_composing_is_done_less_often() -> None:
    """A twentieth of the time at most: after an hour of it, nothing for a day."""
    hours = count()
    async with (
        serving(clock=lambda: 3600.0 * next(hours)) as (served, session),
        session.get(served.url + FEED_PATH) as feed,
    ):
        await next_frame(feed)
        await asyncio.sleep(0.2)

    assert served.num_composed == 1


async def test_viewers_are_so_many_at_most_and_a_place_becomes_free() -> None:
    async with serving(max_viewers=2) as (served, session):
        feeds = [await session.get(served.url + FEED_PATH) for _ in range(2)]
        for feed in feeds:
            await next_frame(feed)
        async with session.get(served.url + FEED_PATH) as refused:
            text = await refused.text()
        feeds[0].close()
        await eventually(lambda: served.page.num_viewers == 1)
        async with session.get(served.url + FEED_PATH) as feed:
            assert await next_frame(feed)
        feeds[1].close()

    assert refused.status == 503
    assert refused.headers["Retry-After"] == "5"
    assert "too many viewers: 2" in text


async def test_one_address_does_not_keep_another_from_the_feed() -> None:
    async with serving(max_viewers=2) as (served, session):
        feeds = [await session.get(served.url + FEED_PATH) for _ in range(2)]
        for feed in feeds:
            await next_frame(feed)
        elsewhere = aiohttp.TCPConnector(local_addr=("127.0.0.2", 0))
        async with (
            aiohttp.ClientSession(connector=elsewhere) as other,
            other.get(served.url + FEED_PATH) as theirs,
        ):
            assert await next_frame(theirs)
            with pytest.raises(aiohttp.ClientError):
                await feeds[0].content.read()  # the oldest has made room
            assert await next_frame(feeds[1])
            async with other.get(served.url + FEED_PATH) as second:
                assert second.status == 503  # each has one
        for feed in feeds:
            feed.close()


async def test_a_viewer_that_does_not_read_is_dropped_and_the_others_go_on() -> None:
    def big(number: int) -> bytes:
        return json.dumps({"number": number, "filling": "x" * 500_000}).encode()

    async with serving(big, patience_s=0.3) as (served, session):
        with socket.create_connection(("127.0.0.1", served.server.port)) as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.sendall(b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n" % FEED_PATH.encode())
            async with session.get(served.url + FEED_PATH, read_bufsize=2**21) as feed:
                await eventually(lambda: served.page.num_viewers == 2)
                async with asyncio.timeout(PATIENCE_S):
                    while served.page.num_viewers == 2:
                        await next_frame(feed)
                first = await next_frame(feed)
                assert await next_frame(feed) > first
                assert served.page.num_viewers == 1


async def test_when_the_server_stops_the_feeds_end_also_those_that_do_not_read() -> None:
    async with serving(lambda number: b"x" * 500_000) as (served, session):
        with socket.create_connection(("127.0.0.1", served.server.port)) as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.sendall(b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n" % FEED_PATH.encode())
            feed = await session.get(served.url + FEED_PATH)
            await eventually(lambda: served.page.num_viewers == 2 and bool(served.page._writing))
            async with asyncio.timeout(PATIENCE_S):
                await asyncio.gather(served.server.stop(), feed.read(), return_exceptions=True)

            assert served.page.num_viewers == 0
            feed.close()


async def test_a_frame_that_cannot_be_made_ends_the_feeds_and_the_next_viewer_tries_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails_once(number: int) -> bytes:
        if number == 1:
            raise ZeroDivisionError
        return b'{"number": %d}' % number

    async with serving(fails_once) as (served, session):
        with caplog.at_level(logging.ERROR):
            async with session.get(served.url + FEED_PATH) as feed:
                assert b"data:" not in await feed.read()
        async with session.get(served.url + FEED_PATH) as feed:
            assert await next_frame(feed) == 2

    assert "feed has failed" in caplog.text
