"""Sends a workload over HTTP at its own times, to any server with OpenAI's API.

Open loop: a request is sent when it is due, however earlier requests ended. Each record says how
late the generator itself was (`RequestRecord.delay_s`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from math import ceil
from typing import Any

import aiohttp

from extproc.files.tls import system_context
from extproc.lab.workload.exchange import (
    RequestForm,
    RequestRecord,
    StreamMeter,
    code_of,
    encode_body,
    error_of,
)
from extproc.lab.workload.requests import Arrival, Workload

MAX_MEDIAN_DELAY_S = 0.005
"""A generator whose median request is later than this changes what it measures."""

STOPPED = "stopped"
"""The error of a request that was in flight when the test was stopped."""

_HEADERS = {
    "content-type": "application/json",
    # Compressed events arrive in bunches.
    "accept-encoding": "identity",
    "user-agent": "extproc-loadtest",
}
_SERVED_BY = "x-served-by"
_MAX_FAILURE_BYTES = 64 * 1024
_STREAM = "text/event-stream"


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """The destination of a workload, and its clients' limits.

    Attributes:
        url: Base URL without a trailing slash.
        form: The format of requests.
        headers: Sent with every request, e.g. `Authorization`.
        timeout_s: Longest time for a whole response.
        patience_s: The client leaves without a first token after this; None for never.
        tenant_headers: Of each tenant's requests by its name; "" stands for all other tenants.
    """

    url: str
    form: RequestForm = field(default_factory=RequestForm)
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 120.0
    patience_s: float | None = None
    tenant_headers: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


async def replay(
    workload: Workload, settings: ReplaySettings, sink: Callable[[RequestRecord], None]
) -> None:
    """Send a workload and wait for every response.

    Args:
        workload: The requests.
        settings: Their destination.
        sink: Called with each record when its request ends.
    """
    async with open_sender(settings, asyncio.get_running_loop().time) as sender:

        async def send(index: int, arrival: Arrival) -> None:
            sink(await sender.send(arrival, index, at_s=arrival.at_s))

        await send_when_due(enumerate(workload.arrivals), send, sender.now)


async def send_when_due(
    requests: Iterable[tuple[int, Arrival]],
    send: Callable[[int, Arrival], Coroutine[Any, Any, None]],
    now: Callable[[], float],
) -> None:
    """Pass each request to `send` when it is due, and wait until all of them ended.

    Args:
        requests: Place in the workload and request, in order of time.
        send: Sends one of them.
        now: Seconds from the workload's start.
    """
    async with asyncio.TaskGroup() as tasks:
        for index, arrival in requests:
            while (wait_s := arrival.at_s - now()) > 0:  # noqa: ASYNC110 # time, not a condition
                # Rounded up: uvloop's timers have a resolution of 1 ms.
                await asyncio.sleep(ceil(1e3 * wait_s) / 1e3)
            tasks.create_task(send(index, arrival))


@asynccontextmanager
async def open_sender(
    settings: ReplaySettings, clock: Callable[[], float], started_s: float | None = None
) -> AsyncIterator[RequestSender]:
    """A sender with connections of its own; records count from `started_s`, by default now."""
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=system_context()),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers={**_HEADERS, **settings.headers},
        timeout=aiohttp.ClientTimeout(total=None),
    ) as session:
        yield RequestSender(session, settings, clock, clock() if started_s is None else started_s)


class RequestSender:
    """Sends single requests and records how they ended.

    Args:
        session: Without a timeout of its own.
        settings: The destination.
        clock: Monotonic seconds.
        started_s: The clock's time from which records count.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        settings: ReplaySettings,
        clock: Callable[[], float],
        started_s: float,
    ) -> None:
        self._session = session
        self._settings = settings
        self._url = settings.url + settings.form.path
        self._clock = clock
        self._started_s = started_s

    def now(self) -> float:
        """Seconds from the start; negative before it."""
        return self._clock() - self._started_s

    async def send(
        self, arrival: Arrival, index: int, *, at_s: float | None = None
    ) -> RequestRecord:
        """Send one request now and read its response to the end.

        Args:
            arrival: The request.
            index: Its place in the workload.
            at_s: When it was due; None for now.

        Returns:
            The record, with the error if there was one: `STOPPED` if the task was cancelled.
        """
        body = encode_body(arrival, index, self._settings.form)
        response = _Response()
        sent_s = self.now()
        of_tenants = self._settings.tenant_headers
        headers = of_tenants.get(arrival.tenant, of_tenants.get("", {}))
        error = await self._error_of(response, body, headers)
        times_s = response.meter.times_s
        return RequestRecord(
            index=index,
            adapter=arrival.adapter,
            tenant=arrival.tenant,
            at_s=sent_s if at_s is None else at_s,
            sent_s=sent_s,
            ended_s=self.now(),
            first_token_s=times_s[0] if times_s else None,
            gaps_s=response.meter.gaps_s,
            num_tokens=response.meter.num_tokens,
            wanted_tokens=max(1, arrival.output_tokens),
            prompt_tokens=arrival.prompt_tokens,
            status=response.status,
            error=error,
            code=code_of(response.failure),
            served_by=response.served_by,
        )

    async def _error_of(self, response: _Response, body: bytes, headers: Mapping[str, str]) -> str:
        """Exchange one request and return the kind of error, "" for none."""
        settings = self._settings
        first_s = settings.timeout_s if settings.patience_s is None else settings.patience_s
        ends_s = asyncio.get_running_loop().time() + settings.timeout_s
        try:
            async with asyncio.timeout(min(first_s, settings.timeout_s)) as limit:
                await self._exchange(response, body, headers, lambda: limit.reschedule(ends_s))
        except TimeoutError:
            is_abandoned = settings.patience_s is not None and not response.meter.times_s
            return "abandoned" if is_abandoned else "timeout"
        except aiohttp.ClientConnectorError:
            return "connect"
        except (aiohttp.ClientError, OSError, ValueError):  # the last: bytes that are no HTTP
            return "reset"
        except asyncio.CancelledError:
            return STOPPED
        return response.error

    async def _exchange(
        self,
        response: _Response,
        body: bytes,
        headers: Mapping[str, str],
        on_first_token: Callable[[], None],
    ) -> None:
        meter = response.meter
        async with self._session.post(
            self._url, data=body, headers=headers, allow_redirects=False
        ) as received:
            response.status = received.status
            response.served_by = received.headers.get(_SERVED_BY, "")
            response.is_stream = received.content_type == _STREAM
            is_waiting = True
            async for data in received.content.iter_any():
                if response.status != 200 and len(response.failure) < _MAX_FAILURE_BYTES:
                    response.failure += data
                meter.feed(data, now=self.now())
                if is_waiting and meter.times_s:
                    is_waiting = False
                    on_first_token()


@dataclass(slots=True)
class _Response:
    """A response as far as it has arrived."""

    meter: StreamMeter = field(default_factory=StreamMeter)
    status: int = 0
    served_by: str = ""
    is_stream: bool = False
    failure: bytes = b""

    @property
    def error(self) -> str:
        """The error of a body that was read to its end."""
        error = error_of(self.status, self.meter)
        return "not_a_stream" if error == "cut" and not self.is_stream else error
