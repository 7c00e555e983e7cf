"""A router's real objects without sockets: recorded bytes go in, its answers come out.

Only what other checkouts have, too, is used, and from the outside: bytes of connections, pages of
pods. Time is what the driver says it is, so that a router that runs fifty times slower decides the
same.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from itertools import count, cycle
from typing import Any, Final

import yaml

from bench.load import chat_body
from bench.pods import SLOTS, adapter_names, metrics_page
from bench.recording import BODY_BYTES, RECORDED, Ended, Recording, answered
from extproc.config.configfile import parse_config
from extproc.reports.engines import PROFILES
from extproc.reports.pagereader import PageReader
from extproc.service.clocks import Clocks
from extproc.service.parts import Parts
from extproc.service.routing import make_policy
from extproc.types import Endpoint, LoadReport, ModelCard
from extproc.wire.connection import Connection

_SCRAPE: Final = {"expiry_s": 600}
"""Several routers take turns, and the clock goes on meanwhile."""
_START_WALL_S: Final = 1_795_000_000.0
_POD_S: Final = 0.02
"""From a request's answer to the end of its response."""
_MAX_ENTRIES: Final = 32
"""In one access log message: Envoy sends 16 KiB at once, and what it has after a second."""
_REPORTS_PER_S: Final = 20
_LONG_BYTES: Final = 1 << 15
_POD_BYTES_PER_S: Final = 6e4
"""Of bodies: a pod is believed to compute 96 KB a second, and more would be held."""
_PODS: Final = {"max_in_flight": 1_000}
"""None is ever full: how many requests are held would differ from checkout to checkout."""
_WINDOW_BYTES: Final = 1 << 24


def _in_shadow() -> Any:
    kind = import_module("extproc.observe.shadowing").ShadowSettings
    return kind("mine:Policy", {}, share=0.1, cpu_budget=1.0, max_choice_s=1.0, max_memory_bytes=0)


@dataclass(frozen=True, slots=True)
class _Answers:
    """Answers at once for a policy in shadow: always with the same pod."""

    address: str

    async def ask(self, question: bytes, within_s: float) -> tuple[Any, float]:
        """Return the answer, and that it took no CPU."""
        return import_module("extproc.observe.shadowing").ShadowAnswer(self.address), 0.0


@dataclass(frozen=True, slots=True)
class Load:
    """What is driven through the router.

    Attributes:
        body_bytes: Of each request.
        router: The router's configuration, by section.
        without: What else is off: names in `bench.stages.STUBS`.
    """

    num_pods: int = 16
    num_adapters: int = 64
    body_bytes: int = BODY_BYTES
    router: Mapping[str, Any] = field(default_factory=dict)
    without: Sequence[str] = ()

    @property
    def burst(self) -> int:
        """Requests whose bytes come in one read; long bodies take reads of their own."""
        return 8 if self.body_bytes < _LONG_BYTES else 1

    @property
    def rate_per_s(self) -> float:
        """Requests a second, by the router's clock."""
        return min(1_600.0, _POD_BYTES_PER_S * self.num_pods / self.body_bytes)

    @property
    def num_entries(self) -> int:
        """Requests in each access log message."""
        return max(1, min(_MAX_ENTRIES, int(self.rate_per_s)))

    @property
    def num_reports(self) -> int:
        """Reports after each burst, at 20 a second from each pod; no more than twice as many."""
        due = self.burst / self.rate_per_s * _REPORTS_PER_S * self.num_pods
        return max(1, min(2 * self.burst, round(due)))


class DrivenLoop(asyncio.SelectorEventLoop):
    """An event loop whose timers wait for `due`, by a clock that others move.

    Attributes:
        now: Of that clock.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 1_000.0
        self._kept: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._numbers = count()

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        """Keep a timer."""
        when_s = self.now + delay
        handle = asyncio.TimerHandle(when_s, callback, args, self, context)
        heapq.heappush(self._kept, (when_s, next(self._numbers), handle))
        return handle

    def due(self) -> None:
        """Run the timers whose time has come."""
        for _ in self.passes():
            pass

    def passes(self) -> Iterator[None]:
        """Run them one after the other, and those that these set."""
        while self._kept and self._kept[0][0] <= self.now:
            _, _, handle = heapq.heappop(self._kept)
            if not handle.cancelled():
                handle._run()
                yield

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Nothing: it is left out when its time comes."""


class HotPath:
    """The router, what Envoy sends it, and what pods say.

    Attributes:
        parts: The router's.
        methods: Of its gRPC services, as its connection has them.
    """

    def __init__(self, load: Load, loop: DrivenLoop) -> None:
        self.load, self._loop = load, loop
        self.addresses = sorted(f"10.0.{n // 200}.{n % 200 + 1}:8000" for n in range(load.num_pods))
        self._names = adapter_names(load.num_adapters)
        self._bodies = [chat_body(name, load.body_bytes) for name in self._names]
        clocks = Clocks(lambda: loop.now, self._wall, random.Random(1))
        always = {"discovery": {"static": self.addresses}, "scrape": _SCRAPE, "pods": _PODS}
        sections = {**always, **load.router}
        config = parse_config(yaml.safe_dump(sections), source="bench")
        self.parts = Parts(config, make_policy(config), None, clocks=clocks)
        self.methods = self.parts.services.methods()
        self._recording = Recording(RECORDED.read_bytes())
        self._pages = {address: cycle(self._two_pages(address)) for address in self.addresses}
        self._readers = {address: PageReader(PROFILES["vllm"]).read for address in self.addresses}
        self._reports = cycle(self.addresses)
        self._numbers = count(1)
        self._answered: deque[Ended] = deque()
        self._errors: list[Exception] = []

    def open(self) -> None:
        """Have pods listed, and Envoy's connection opened."""
        now, endpoints = self._loop.now, [Endpoint(address) for address in self.addresses]
        self.parts.readiness.set_endpoints(endpoints, now=now)
        self.parts.routing.set_endpoints(endpoints)
        cards = ModelCard("base"), *(ModelCard(name, parent="base") for name in self._names)
        for address in self.addresses:
            self.parts.routing.pool.record_models(address, cards, now=now)
            self.parts.readiness.record_asked(address, has_listed=True)
            self.record(address, self._readers[address](next(self._pages[address])))
        self.connection = Connection(
            {method.path: method for method in self.methods},
            now=now,
            counters=self.parts.traffic.wire,
            budget=self.parts.traffic.budget,
            on_session_error=lambda error, _path: self._errors.append(error),
        )
        self.exchange(self._recording.first)

    def _wall(self) -> float:
        return _START_WALL_S + self._loop.now

    def _two_pages(self, address: str) -> list[bytes]:
        """A pod's pages of metrics: it has run eight adapters lately, the next one others."""
        first = 4 * self.addresses.index(address)
        now_s, num = self._wall(), len(self._names)
        ran_at_s = {self._names[(first + n) % num]: now_s - 1 - n for n in range(SLOTS)}
        return [
            metrics_page(
                ran_at_s, started_wall_s=now_s - 3600, num_running=num_running, has_waiting=True
            )
            for num_running in (1, 2)
        ]

    def exchange(self, data: bytes) -> bytes:
        """Return what the router answers to what one read of its socket brings."""
        position = 0
        while position < len(data):
            position = self.connection.receive_pass(data, position, now=self._loop.now)
        return self.connection.data_to_send()

    def record(self, address: str, report: LoadReport) -> None:
        """Record a report as the scraper does."""
        self.parts.pods._on_report(address, report, self._loop.now, 0.002)

    def run(self, num_requests: int, timed: Timed) -> None:
        """Drive requests through the router, with the logs and reports that belong to them.

        Raises:
            RuntimeError: It did not answer as it should.
        """
        for _ in range(num_requests // self.load.burst):
            self._burst(timed)
            self._shadow(timed)
            self._pass(self.load.burst / self.load.rate_per_s, timed)
            if len(self._answered) >= self.load.num_entries:
                self._end(timed)
            for _ in range(self.load.num_reports):
                self._report(timed)
        self._pass(_POD_S, timed)
        while self._answered:
            self._end(timed)

    def _pass(self, seconds: float, timed: Timed) -> None:
        self._loop.now += seconds
        timed("later", self._loop.due)

    def _burst(self, timed: Timed) -> None:
        requests = []
        for _ in range(self.load.burst):
            number = next(self._numbers)
            body = self._bodies[number % len(self._bodies)]
            requests.append(self._recording.request(number, body))
        first = b"".join([headers for _, _, headers, _ in requests])
        reads = [read for _, _, _, reads in requests for read in reads]
        if self.load.body_bytes < _LONG_BYTES:
            reads = [b"".join(reads)]
        sent = b"".join(timed("request", partial(self.exchange, read)) for read in (first, *reads))
        self.connection.outbox.window_bytes = _WINDOW_BYTES
        picks = answered(sent)
        for stream_id, request_id, _, _ in requests:
            if stream_id not in picks:
                raise RuntimeError(f"not answered: {self._errors or sent[:400]!r}")
            self._answered.append(Ended(*picks[stream_id], request_id))
        resets = b"".join([self._recording.reset(each[0]) for each in requests])
        timed("request", partial(self.exchange, resets))

    def _shadow(self, timed: Timed) -> None:
        """Ask a policy in shadow about the last decision: all but its process and the pipe."""
        shadow = getattr(self.parts, "shadow", None)
        if shadow is not None:  # else another checkout's
            records = self.parts.recorder.decisions.newest(1)
            if not records:  # nobody reads them
                return
            pick: Any = records[0].decision
            asked = shadow._ask(pick, _Answers(pick.candidates[-1].address), _in_shadow())
            timed("shadow", lambda: next(asked.__await__(), None))

    def _end(self, timed: Timed) -> None:
        """Send an access log message."""
        num = min(self.load.num_entries, len(self._answered))
        ended = [self._answered.popleft() for _ in range(num)]
        data = self._recording.log(ended, now_wall_s=self._wall())
        timed("log", partial(self.exchange, data))

    def _report(self, timed: Timed) -> None:
        address = next(self._reports)
        page = next(self._pages[address])
        report = timed("parse", partial(self._readers[address], page))
        timed("report", partial(self.record, address, report))


Timed = Callable[[str, Callable[[], Any]], Any]
"""Runs a step of the router: its name, and what it does."""
