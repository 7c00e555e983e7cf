"""A proxy before the real API server that makes the faults of a cluster.

Load balancers cut connections, API servers are overloaded and restarted, etcd is compacted, caches
repeat events. An event is lost only where a correct client can notice: the connection is cut before
anything newer has passed, or a 410 follows.

It speaks plain HTTP on loopback, and forwards GET and PATCH only.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, fields
from pathlib import Path
from random import Random
from typing import Self

import aiohttp
from aiohttp import web

from extproc.files.tls import client_context

GONE = {"kind": "Status", "status": "Failure", "reason": "Expired", "code": 410}
GONE_EVENT = json.dumps(
    {"type": "ERROR", "object": {**GONE, "message": "too old resource version"}}
).encode()
MAX_TROUBLE_S = 0.3
"""From the loss of an event to the sign of it."""


@dataclass(frozen=True)
class Faults:
    """Chances, from 0 to 1; per event of a watch unless said otherwise.

    Attributes:
        cut: The connection is closed.
        tear: The connection is closed in the middle of the event.
        end: The response ends as after its timeout.
        gone: A 410 as an event, and the end.
        twice: The event comes twice.
        again: An event comes again that came before.
        lost: The event does not come, nor what follows; then the connection is closed.
        missed: The event does not come, what follows does; then a 410.
        swallowed: The event does not come, without a sign. Only a list can repair this.
        gone_status: Per request that continues a list or watch: the status is 410.
        error_status: Per request: the status is 500, 503 or 429 with Retry-After.
        refused: Per request: the connection is closed without an answer.
        delay_s: Per event and per request: seconds that it is held up, at most.
    """

    cut: float = 0.0
    tear: float = 0.0
    end: float = 0.0
    gone: float = 0.0
    twice: float = 0.0
    again: float = 0.0
    lost: float = 0.0
    missed: float = 0.0
    swallowed: float = 0.0
    gone_status: float = 0.0
    error_status: float = 0.0
    refused: float = 0.0
    delay_s: float = 0.0


NONE = Faults()


def _faults(rare: float, common: float, delay_s: float) -> Faults:
    """All faults but `swallowed`: the rare ones end a watch."""
    names = ("twice", "again", "gone_status", "error_status", "refused")
    chances = dict.fromkeys(("cut", "tear", "end", "gone", "lost", "missed"), rare)
    return Faults(**chances, **dict.fromkeys(names, common), delay_s=delay_s)


ALL = _faults(0.005, 0.05, 0.01)
HARSH = _faults(0.03, 0.1, 0.02)
"""For few objects."""


class FaultyProxy:
    """Relays to one API server.

    Attributes:
        faults: What is done from now on; may be changed at any time.
        done: How often each fault was made.
        paths: Requests that came, by path.
        is_silent: From now on nothing is sent on open watches, not even an end.
        page_size: Objects on a page of a list, whatever is asked for; None for what is asked for.
        breaks: Whether a request for a path is answered with a 500.
    """

    def __init__(self, url: str, ca_file: Path, *, seed: int = 0) -> None:
        self.faults = NONE
        self.done: Counter[str] = Counter()
        self.paths: Counter[str] = Counter()
        self.is_silent = False
        self.page_size: int | None = None
        self.breaks: Callable[[web.Request], bool] = lambda request: False
        self.url = ""
        self._upstream = url
        self._ca_file = ca_file
        self._rng = Random(seed)

    async def __aenter__(self) -> Self:
        context = client_context(self._ca_file)
        connector = aiohttp.TCPConnector(limit=0, ssl=context)
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=aiohttp.ClientTimeout(total=None), auto_decompress=False
        )
        app = web.Application()
        app.router.add_get("/{path:.*}", self._serve)
        app.router.add_patch("/{path:.*}", self._serve)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()
        await self._runner.cleanup()

    def not_made_yet(self) -> set[str]:
        """Return the faults of `ALL` that chance has not made yet."""
        wanted = {each.name for each in fields(Faults) if getattr(ALL, each.name)} - {"delay_s"}
        return wanted - self.done.keys()

    def _is_hit(self, name: str) -> bool:
        is_hit: bool = self._rng.random() < getattr(self.faults, name)
        if is_hit:
            self.done[name] += 1
        return is_hit

    async def _hold_up(self) -> None:
        if self.faults.delay_s:
            await asyncio.sleep(self._rng.uniform(0, self.faults.delay_s))

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        self.paths[request.path] += 1
        await self._hold_up()
        if self._is_hit("refused"):
            return _close(request)
        if self.breaks(request):
            return web.Response(status=500, text="broken")
        goes_on = "resourceVersion" in request.query or "continue" in request.query
        if goes_on and self._is_hit("gone_status"):
            return web.json_response(GONE, status=410)
        if self._is_hit("error_status"):
            status = self._rng.choice((429, 500, 503))
            headers = {"Retry-After": "0"} if status == 429 else {}
            return web.Response(status=status, headers=headers, text="not now")
        headers = {
            name: request.headers[name]
            for name in ("Authorization", "Accept", "Accept-Encoding", "Content-Type")
            if name in request.headers
        }
        url = request.rel_url
        if self.page_size is not None and "limit" in url.query:
            url = url.update_query(limit=self.page_size)
        try:
            async with self._session.request(
                request.method,
                self._upstream + str(url),
                headers=headers,
                data=await request.read() or None,
            ) as answer:
                if request.query.get("watch") and answer.status == 200:
                    try:
                        return await self._relay(request, answer)
                    finally:
                        if answer.connection is not None and answer.connection.transport:
                            answer.connection.transport.abort()  # or TLS says farewell, at length
                return web.Response(
                    status=answer.status,
                    body=await answer.read(),
                    content_type=answer.content_type,
                )
        except (aiohttp.ClientError, OSError):
            return _close(request)

    async def _relay(
        self, request: web.Request, answer: aiohttp.ClientResponse
    ) -> web.StreamResponse:
        response = web.StreamResponse()
        response.content_type = "application/json"
        await response.prepare(request)
        before: list[bytes] = []
        async for line in _lines(answer):
            while self.is_silent:
                await asyncio.sleep(0.02)
            await self._hold_up()
            if self._is_hit("cut"):
                return _close(request)
            if self._is_hit("tear"):
                await response.write(line[: len(line) // 2])
                return _close(request)
            if self._is_hit("lost"):
                await asyncio.sleep(self._rng.uniform(0, MAX_TROUBLE_S))
                return _close(request)
            if self._is_hit("end"):
                break
            if self._is_hit("swallowed"):
                continue
            if self._is_hit("missed"):
                await self._go_on_for_a_while(response, answer)
                await response.write(GONE_EVENT + b"\n")
                break
            await response.write(line)
            if self._is_hit("twice"):
                await response.write(line)
            if before and self._is_hit("again"):
                await response.write(self._rng.choice(before))
            before.append(line)
            if self._is_hit("gone"):
                await response.write(GONE_EVENT + b"\n")
                break
        await response.write_eof()
        return response

    async def _go_on_for_a_while(
        self, response: web.StreamResponse, answer: aiohttp.ClientResponse
    ) -> None:
        try:
            async with asyncio.timeout(self._rng.uniform(0, MAX_TROUBLE_S)):
                async for line in _lines(answer):
                    await response.write(line)
        except TimeoutError:
            pass


async def _lines(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    rest = b""
    async for chunk in answer.content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line + b"\n"


def _close(request: web.Request) -> web.Response:
    if request.transport is not None:
        request.transport.abort()
    return web.Response()
