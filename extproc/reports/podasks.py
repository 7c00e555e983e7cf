"""Questions to a pod that are asked only on occasion: `/health`, and `/version`.

Nothing here is asked for ever: the health check after failures and then until the engine runs
again, the version until there is an answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from contextlib import closing
from http import HTTPStatus
from typing import Final

import msgspec
from yarl import URL

from extproc.bounds import plain
from extproc.reports.loops import LoopSettings
from extproc.reports.patience import Patience
from extproc.reports.podclient import PodClient
from extproc.reports.podhttp import FAILURES, base_url
from extproc.types import Endpoint

INTERVAL_S: Final = 1.0
"""Between two questions of a kind to one pod, however many failures raise them."""
DEAD: Final = frozenset((HTTPStatus.INTERNAL_SERVER_ERROR, HTTPStatus.SERVICE_UNAVAILABLE))
"""Statuses of `/health` where the server is there and its engine is not: vLLM 503, SGLang 503, and
servers that do not catch the failure 500. Any other status but 200 says nothing of the engine.
"""
MAX_BODY_BYTES: Final = 64 * 1024
MAX_VERSION_CHARS: Final = 100

OnHealth = Callable[[str, bool, float], None]
OnVersion = Callable[[str, str, float], None]


class _Version(msgspec.Struct):
    version: str


class PodAsks:
    """Asks pods. Belongs to one event loop; `aclose` ends it.

    Args:
        settings: The headers and TLS of the requests, and the longest one.
        on_health: Called with address, whether the engine has stopped, and when that was asked.
        on_version: Called with address, version ("" where the server reports none), and when that
            was asked.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        settings: LoopSettings,
        *,
        on_health: OnHealth,
        on_version: OnVersion,
        clock: Callable[[], float],
    ) -> None:
        self._settings, self._clock = settings, clock
        self._on_health, self._on_version = on_health, on_version
        self._urls: dict[str, str] = {}
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}

    def set_endpoints(self, endpoints: Iterable[Endpoint]) -> None:
        """Ask only these; an endpoint with another URL is a new one."""
        before, self._urls = self._urls, {each.address: base_url(each) for each in endpoints}
        for (kind, address), task in list(self._tasks.items()):
            if before.get(address) != self._urls.get(address):
                task.cancel()
                del self._tasks[kind, address]

    def doubt(self, address: str) -> None:
        """Ask for the health of a pod that has failed, unless that was just asked."""
        self._ask("health", address, self._health(address))

    def ask_version(self, address: str) -> None:
        """Ask for the version of a pod's engine, unless that was just asked."""
        self._ask("version", address, self._version(address))

    async def aclose(self) -> None:
        """End all requests. No callback is called after this."""
        for task in (tasks := list(self._tasks.values())):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ask(self, kind: str, address: str, work: Coroutine[None, None, None]) -> None:
        if (kind, address) in self._tasks or address not in self._urls:
            work.close()
            return
        # Not in a TaskGroup: endpoints come and go, and no question is to end another.
        task = asyncio.get_running_loop().create_task(work, name=f"{kind} of {address}")
        self._tasks[kind, address] = task
        task.add_done_callback(lambda done: self._done(kind, address, done))

    def _done(self, kind: str, address: str, task: asyncio.Task[None]) -> None:
        if self._tasks.get((kind, address)) is task:
            del self._tasks[kind, address]

    async def _health(self, address: str) -> None:
        """Ask until the answer is not that the engine has stopped."""
        is_dead = False
        while True:
            asked_at_s = self._clock()
            status, _ = await self._get(address, "/health")
            if status in DEAD or (is_dead and status is not None):
                is_dead = status in DEAD
                self._on_health(address, is_dead, asked_at_s)
            await asyncio.sleep(INTERVAL_S)
            if not is_dead:
                return

    async def _version(self, address: str) -> None:
        asked_at_s = self._clock()
        status, body = await self._get(address, "/version")
        if status == HTTPStatus.OK or status == HTTPStatus.NOT_FOUND:
            self._on_version(address, _read_version(body), asked_at_s)
        await asyncio.sleep(INTERVAL_S)

    async def _get(self, address: str, path: str) -> tuple[int | None, bytes]:
        """Return status and body; no status where there was no whole response."""
        settings = self._settings
        try:
            access = settings.headers, settings.ssl, settings.secrets, settings.room
            with closing(PodClient(*access)) as client:
                async with Patience(settings.timeout_s):
                    url = URL(f"{self._urls[address]}{path}")
                    return await client.get(url, max_bytes=MAX_BODY_BYTES)
        except (*FAILURES, ValueError):
            return None, b""


def _read_version(body: bytes) -> str:
    try:
        return plain(msgspec.json.decode(body, type=_Version).version, MAX_VERSION_CHARS)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
