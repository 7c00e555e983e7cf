"""Sends a workload over HTTP at its own times, to any server with OpenAI's API.

Open loop: a request is sent when it is due, whatever became of those before it. Where the generator
itself is late, its records say so (`RequestRecord.delay_s`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from extproc.workload.exchange import RequestForm, RequestRecord, StreamMeter, encode_body, error_of
from extproc.workload.requests import Arrival, Workload

MAX_MEDIAN_DELAY_S = 0.005
"""A generator whose median request is later than this changes what it measures."""

_HEADERS = {"content-type": "application/json"}
_SERVED_BY = "x-served-by"


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """Where a workload is sent, and how.

    Attributes:
        url: Base URL without a trailing slash.
        form: How requests are written.
        headers: Sent with every request, e.g. `Authorization`.
        timeout_s: Longest time for a whole answer.
        patience_s: The client leaves if there is no text after this; None for never.
    """

    url: str
    form: RequestForm = field(default_factory=RequestForm)
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 120.0
    patience_s: float | None = None


async def replay(
    workload: Workload, settings: ReplaySettings, sink: Callable[[RequestRecord], None]
) -> None:
    """Send a workload and wait for every answer.

    Args:
        workload: What to send.
        settings: Where.
        sink: Gets each record when its request is over, in that order.
    """
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers={**_HEADERS, **settings.headers},
        timeout=aiohttp.ClientTimeout(total=None),
    ) as session:
        sender = _Sender(session, settings)

        async def send(index: int, arrival: Arrival) -> None:
            sink(await sender.send(arrival, index))

        await send_when_due(workload.arrivals, send)


async def send_when_due(
    arrivals: Iterable[Arrival], send: Callable[[int, Arrival], Coroutine[Any, Any, None]]
) -> None:
    """Give each request to `send`, with its place, when it is due; wait until all are over."""
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    async with asyncio.TaskGroup() as requests:
        for index, arrival in enumerate(arrivals):
            wait_s = started_s + arrival.at_s - loop.time()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            requests.create_task(send(index, arrival))


class _Sender:
    """Sends single requests and says what became of them.

    Args:
        session: Without a timeout of its own.
        settings: Where to send.
    """

    def __init__(self, session: aiohttp.ClientSession, settings: ReplaySettings) -> None:
        self._session = session
        self._settings = settings
        self._url = settings.url + settings.form.path
        self._loop = asyncio.get_running_loop()
        self._started_s = self._loop.time()

    def now(self) -> float:
        """Seconds from the start."""
        return self._loop.time() - self._started_s

    async def send(self, arrival: Arrival, index: int) -> RequestRecord:
        """Send one request now and read its answer to the end. Errors are in the record."""
        body = encode_body(arrival, index, self._settings.form)
        answer = _Answer()
        sent_s = self.now()
        error = await self._error_of(answer, body)
        times_s = answer.meter.times_s
        return RequestRecord(
            index=index,
            adapter=arrival.adapter,
            tenant=arrival.tenant,
            at_s=arrival.at_s,
            sent_s=sent_s,
            ended_s=self.now(),
            first_token_s=times_s[0] if times_s else None,
            gaps_s=answer.meter.gaps_s,
            num_tokens=answer.meter.num_tokens,
            wanted_tokens=max(1, arrival.output_tokens),
            prompt_tokens=arrival.prompt_tokens,
            status=answer.status,
            error=error,
            served_by=answer.served_by,
        )

    async def _error_of(self, answer: _Answer, body: bytes) -> str:
        """Exchange one request; the kind of error, "" for none."""
        settings = self._settings
        first_s = settings.timeout_s if settings.patience_s is None else settings.patience_s
        ends_s = self._loop.time() + settings.timeout_s
        try:
            async with asyncio.timeout(min(first_s, settings.timeout_s)) as limit:
                await self._exchange(answer, body, lambda: limit.reschedule(ends_s))
        except TimeoutError:
            is_abandoned = settings.patience_s is not None and not answer.meter.times_s
            return "abandoned" if is_abandoned else "timeout"
        except aiohttp.ClientConnectorError:
            return "connect"
        except (aiohttp.ClientError, OSError):
            return "reset"
        return answer.error

    async def _exchange(
        self, answer: _Answer, body: bytes, on_first_text: Callable[[], None]
    ) -> None:
        meter = answer.meter
        async with self._session.post(self._url, data=body) as response:
            answer.status = response.status
            answer.served_by = response.headers.get(_SERVED_BY, "")
            is_waiting = True
            async for data in response.content.iter_any():
                meter.feed(data, now=self.now())
                if is_waiting and meter.times_s:
                    is_waiting = False
                    on_first_text()


@dataclass(slots=True)
class _Answer:
    """What has come of an answer so far."""

    meter: StreamMeter = field(default_factory=StreamMeter)
    status: int = 0
    served_by: str = ""

    @property
    def error(self) -> str:
        """What is wrong with a body that was read to its end."""
        return error_of(self.status, self.meter)
