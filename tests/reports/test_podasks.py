"""What pods are asked when something raises the question."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from extproc.reports import podasks
from extproc.reports.loops import LoopSettings
from extproc.reports.podasks import PodAsks
from extproc.types import Endpoint
from tests.servers import web_server
from tests.waiting import eventually


class Pod:
    """A server whose answers a test sets; each is given once, the last one for ever."""

    def __init__(self) -> None:
        self.statuses = [200]
        self.body = b'{"version":"0.32.0"}'
        self.asked: list[str] = []

    async def answer(self, request: web.Request) -> web.Response:
        assert request.path in ("/health", "/version")
        self.asked.append(request.path)
        status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        headers = {} if status else {"Content-Encoding": "gzip"}  # which is refused
        return web.Response(status=status or 200, body=self.body, headers=headers)


class Asking:
    """The asks of one pod, and what they found."""

    def __init__(self, url: str) -> None:
        self.heard: asyncio.Queue[tuple[bool | str, float]] = asyncio.Queue()
        self.endpoint = Endpoint("10.0.0.1:8000", url)
        ticks = itertools.count(1.0)
        self.asks = PodAsks(
            LoopSettings(interval_s=60, timeout_s=60, max_backoff_s=60),
            on_health=lambda _at, is_dead, asked_at_s: self.heard.put_nowait((is_dead, asked_at_s)),
            on_version=lambda _at, said, asked_at_s: self.heard.put_nowait((said, asked_at_s)),
            clock=lambda: next(ticks),
        )
        self.asks.set_endpoints([self.endpoint])

    async def idle(self) -> None:
        """Wait until nothing is asked any more."""
        await eventually(lambda: not self.asks._tasks)


@pytest.fixture
def pod() -> Pod:
    return Pod()


@pytest.fixture
async def asking(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Asking]:
    monkeypatch.setattr(podasks, "INTERVAL_S", 0.01)
    async with web_server(pod.answer) as url:
        asking = Asking(url)
        yield asking
        await asking.asks.aclose()


@pytest.mark.parametrize("status", [200, 404, 401, 0])
async def test_a_pod_that_does_not_say_that_it_is_dead_is_asked_once(
    pod: Pod, asking: Asking, status: int
) -> None:
    pod.statuses = [status]
    for _ in range(3):
        asking.asks.doubt(asking.endpoint.address)
    await asking.idle()

    assert (pod.asked, asking.heard.empty()) == (["/health"], True)


@pytest.mark.parametrize("dead", [500, 503])
@pytest.mark.parametrize("alive", [200, 404])
async def test_a_dead_engine_is_asked_until_it_is_not_dead(
    pod: Pod, asking: Asking, dead: int, alive: int
) -> None:
    pod.statuses = [dead, 0, dead, alive, dead]
    asking.asks.doubt(asking.endpoint.address)
    heard = [await asking.heard.get() for _ in range(3)]
    await asking.idle()

    assert heard == [(True, 1.0), (True, 3.0), (False, 4.0)]
    assert len(pod.asked) == 4


@pytest.mark.parametrize(
    ("status", "body", "version"),
    [
        (200, b'{"version":"0.32.0"}', "0.32.0"),
        (200, b'{"version":' + b'"' + 200 * b"9" + b'"}', 100 * "9"),
        (200, b'{"version":7}', ""),
        (200, b"ok", ""),
        (200, b'{"version":"\xff"}', ""),
        (404, b'{"detail":"Not Found"}', ""),
    ],
)
async def test_a_version_is_what_the_server_says_or_none(
    pod: Pod, asking: Asking, status: int, body: bytes, version: str
) -> None:
    pod.statuses, pod.body = [status], body
    asking.asks.ask_version(asking.endpoint.address)

    assert await asking.heard.get() == (version, 1.0)


@pytest.mark.parametrize("status", [500, 0])
async def test_a_version_that_cannot_be_asked_for_stays_unknown(
    pod: Pod, asking: Asking, status: int
) -> None:
    pod.statuses = [status, 200]
    asking.asks.ask_version(asking.endpoint.address)
    await asking.idle()
    assert asking.heard.empty()
    asking.asks.ask_version(asking.endpoint.address)

    assert (await asking.heard.get())[0] == "0.32.0"


async def test_an_endpoint_that_left_is_not_asked(pod: Pod, asking: Asking) -> None:
    pod.statuses = [503]
    asking.asks.doubt(asking.endpoint.address)
    await asking.heard.get()
    asking.asks.set_endpoints([])
    asking.asks.doubt(asking.endpoint.address)

    assert not asking.asks._tasks
