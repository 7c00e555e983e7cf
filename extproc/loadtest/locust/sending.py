"""Sends single requests over gevent and says what became of them."""

from __future__ import annotations

from collections.abc import Callable

import gevent

from extproc.loadtest.locust.http import (
    Answer,
    ConnectError,
    ConnectionLost,
    Connections,
    Server,
    exchange,
)
from extproc.workload.exchange import RequestForm, RequestRecord, StreamMeter, encode_body, error_of
from extproc.workload.requests import Arrival

STOPPED = "stopped"
"""The error of a request that was under way when somebody stopped the test."""

_SERVED_BY = "x-served-by"
_STREAM = "text/event-stream"


class Sender:
    """Sends to one server, over connections that are kept.

    Args:
        server: Where to send.
        form: How requests are written.
        timeout_s: Longest time for a whole answer.
        patience_s: The client leaves if there is no text after this; None for never.
        started_s: The clock's time that records count from.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        server: Server,
        form: RequestForm,
        *,
        timeout_s: float,
        patience_s: float | None,
        started_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._server = server
        self._form = form
        self._timeout_s = timeout_s
        self._patience_s = patience_s
        self._started_s = started_s
        self._clock = clock
        self._connections = Connections(server)
        self._begun_s: list[float] = []
        self._firsts_s: list[float] = []

    def now(self) -> float:
        """Seconds from the start; negative before it."""
        return self._clock() - self._started_s

    def encode(self, arrival: Arrival, index: int) -> bytes:
        """A request as it goes over the wire."""
        return self._server.post(self._form.path, encode_body(arrival, index, self._form))

    def send(
        self, arrival: Arrival, index: int, request: bytes, *, at_s: float | None = None
    ) -> RequestRecord:
        """Send one request now and read its answer to the end.

        Args:
            arrival: What is asked.
            index: Its place in the workload.
            request: Of `encode`.
            at_s: When it was due; None for now.

        Returns:
            What became of it. Errors are in there, `STOPPED` if the greenlet was killed.
        """
        sent_s = self.now()
        self._begun_s.append(sent_s)
        reading = _Reading(self._clock, lambda: self._firsts_s.append(sent_s))
        error = self._error_of(reading, request)
        times_s = reading.meter.times_s
        return RequestRecord(
            index=index,
            adapter=arrival.adapter,
            tenant=arrival.tenant,
            at_s=sent_s if at_s is None else at_s,
            sent_s=sent_s,
            ended_s=self.now(),
            first_token_s=times_s[0] - self._started_s if times_s else None,
            gaps_s=reading.meter.gaps_s,
            num_tokens=reading.meter.num_tokens,
            wanted_tokens=max(1, arrival.output_tokens),
            prompt_tokens=arrival.prompt_tokens,
            status=reading.status,
            error=error,
            served_by=reading.answer.header(_SERVED_BY),
        )

    def take_begun(self) -> list[float]:
        """When requests were sent, of those that nobody has taken yet."""
        begun_s, self._begun_s = self._begun_s, []
        return begun_s

    def take_firsts(self) -> list[float]:
        """When requests were sent and had their first text, of those that nobody has taken yet."""
        firsts_s, self._firsts_s = self._firsts_s, []
        return firsts_s

    def close(self) -> None:
        """Close the connections that are kept."""
        self._connections.close()

    def _error_of(self, reading: _Reading, request: bytes) -> str:
        """Exchange one request; the kind of error, "" for none."""
        patience_s = self._timeout_s if self._patience_s is None else self._patience_s
        limits = [gevent.Timeout.start_new(min(patience_s, self._timeout_s))]
        if self._patience_s is not None:
            ends_s = self._clock() + self._timeout_s
            reading.on_patience_kept = lambda: _replace(limits, ends_s - self._clock())
        try:
            exchange(self._connections, request, reading.answer, reading.note_time)
        except gevent.Timeout as timeout:
            if timeout is not limits[0]:
                raise
            is_abandoned = self._patience_s is not None and not reading.meter.times_s
            return "abandoned" if is_abandoned else "timeout"
        except ConnectError:
            return "connect"
        except ConnectionLost:
            return "reset"
        except gevent.GreenletExit:
            return STOPPED
        finally:
            limits[0].close()
        return reading.error


class _Reading:
    """What has come of an answer so far."""

    def __init__(self, clock: Callable[[], float], on_first_text: Callable[[], None]) -> None:
        self.meter = StreamMeter()
        self.answer = Answer(self._take)
        self.on_patience_kept: Callable[[], None] | None = None
        self._on_first_text = on_first_text
        self._has_text = False
        self._clock = clock
        self._now = 0.0

    @property
    def status(self) -> int:
        """HTTP status; 0 without an answer."""
        return self.answer.status_code if self.answer.headers_complete else 0

    @property
    def error(self) -> str:
        """What is wrong with an answer that was read to its end."""
        error = error_of(self.status, self.meter)
        is_stream = self.answer.header("content-type").startswith(_STREAM)
        return "not_a_stream" if error == "cut" and not is_stream else error

    def note_time(self) -> None:
        """Something has come now."""
        self._now = self._clock()

    def _take(self, data: bytes) -> None:
        if self.answer.status_code != 200:
            return
        self.meter.feed(data, now=self._now)
        if not self._has_text and self.meter.times_s:
            self._has_text = True
            self._on_first_text()
            if self.on_patience_kept is not None:
                self.on_patience_kept()


def _replace(limits: list[gevent.Timeout], left_s: float) -> None:
    """The first text is there: from now on the whole answer's limit counts."""
    limits[0].close()
    limits[0] = gevent.Timeout.start_new(max(0.001, left_s))
