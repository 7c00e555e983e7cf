"""The plan of a load test with locust, made from its options, and each process's share, which is
sent in a thread beside locust's greenlets.

Locust's master, or its only process, makes the plan and reads the endpoint's list of models once.
Workers make the same workload from the plan, so that only the plan crosses the network. A workload
in a file has to be on every machine, under one path.

Locust replaces the standard library's blocking calls with gevent's. uvloop makes its own system
calls, so that it is not affected.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, closing
from math import inf
from random import Random
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import gevent
import msgspec
import uvloop
from gevent.event import Event

from extproc.lab.loadtest.listing import TargetError, base_url, fetch_listing
from extproc.lab.loadtest.replay import ReplaySettings, open_sender, send_when_due
from extproc.lab.loadtest.workloads import make, names, renamed
from extproc.lab.trials.suites import PlanError
from extproc.lab.workload.exchange import CHAT, COMPLETIONS, RequestForm, RequestRecord
from extproc.lab.workload.judge import Slo
from extproc.lab.workload.requests import Arrival, Workload

if TYPE_CHECKING:  # locust replaces half of the standard library when it is imported
    from locust.argument_parser import LocustArgumentParser

WATCH_S = 0.1
"""Between two calls of `meanwhile`."""
_SWITCH_S = 0.0005
"""So long the thread that sends waits for the one that fills locust's table; Python's own 5 ms
would be most of a first token's time."""
_T = TypeVar("_T")
_Positive = Annotated[float, msgspec.Meta(gt=0)]
_Seconds = Annotated[float, msgspec.Meta(ge=0)]
_Number = Annotated[int, msgspec.Meta(ge=0)]


class LoopThread:
    """An event loop in a thread, until `close`."""

    def __init__(self) -> None:
        self._loop = uvloop.new_event_loop()
        self._ended = gevent.get_hub().threadpool.spawn(self._loop.run_forever)

    def close(self) -> None:
        """End the thread; nothing may be running in it."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._ended.get()
        self._loop.close()

    def wait(
        self,
        work: Callable[[], Coroutine[Any, Any, _T]],
        meanwhile: Callable[[], None] = lambda: None,
    ) -> _T:
        """Run a coroutine in the thread and wait for it, while other greenlets run.

        If this greenlet is killed, the coroutine is cancelled first, and its end awaited.

        Args:
            work: The coroutine; called in the thread.
            meanwhile: Called here now and then, and a last time when the coroutine has ended.

        Raises:
            Exception: The error of the coroutine.
        """
        tasks: list[asyncio.Task[_T]] = []
        has_ended, watcher = Event(), gevent.get_hub().loop.async_()
        watcher.start(has_ended.set)

        def begin() -> None:
            tasks.append(self._loop.create_task(work()))
            # The one method of a gevent loop that other threads may call.
            tasks[0].add_done_callback(lambda _: watcher.send())

        self._loop.call_soon_threadsafe(begin)
        try:
            while not has_ended.wait(WATCH_S):
                meanwhile()
        finally:
            self._loop.call_soon_threadsafe(lambda: tasks[0].cancel())
            has_ended.wait()
            watcher.close()
            meanwhile()
        return tasks[0].result()


class LocustPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One test; fields have the names of the options, in plain values.

    Attributes:
        url: Base URL of the endpoint.
        api_key: Bearer token, "" for none.
        workload: Name or path.
        rate_rps: Requests per second; 0 for the workload's own.
        num_requests: 0 for the workload's own.
        num_adapters: 0 for the workload's own.
        listed: Names that replace the workload's adapters; None to keep those.
        base_model: The model of requests without an adapter.
        ignore_eos: Request responses of the workload's lengths.
        timeout_s: Longest time for a whole response.
        patience_s: Longest time for the first token; 0 for `timeout_s`.
        think_s: Mean time between a response and a closed loop's next request.
        slo_ttft_s: Longest time to the first token.
        slo_tpot_s: Longest mean time per token after it.
        workers: Ids of the processes that send, each with its share.
        starts_at_s: Begin of the workload by the wall clock, seconds of the epoch.
    """

    url: str
    api_key: str
    workload: str
    rate_rps: _Seconds = msgspec.field(name="rate")
    num_requests: _Number = msgspec.field(name="requests")
    seed: int
    num_adapters: _Number = msgspec.field(name="adapters")
    listed: tuple[str, ...] | None = None
    base_model: str = msgspec.field(name="model")
    api: Literal["completions", "chat"]
    ignore_eos: bool
    timeout_s: _Positive = msgspec.field(name="timeout")
    patience_s: _Seconds = msgspec.field(name="patience")
    mode: Literal["open", "closed"]
    think_s: _Seconds
    slo_ttft_s: _Positive = msgspec.field(name="slo_ttft")
    slo_tpot_s: _Positive = msgspec.field(name="slo_tpot")
    workers: tuple[str, ...]
    starts_at_s: float = 0.0

    @property
    def slo(self) -> Slo:
        """The objective of requests."""
        return Slo(self.slo_ttft_s, self.slo_tpot_s)

    @property
    def form(self) -> RequestForm:
        """The format of requests."""
        extra = (("ignore_eos", True),) if self.ignore_eos else ()
        return RequestForm(CHAT if self.api == "chat" else COMPLETIONS, self.base_model, extra)

    @property
    def settings(self) -> ReplaySettings:
        """The destination of requests, and the clients' limits."""
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        patience_s = self.patience_s or None
        return ReplaySettings(self.url, self.form, headers, self.timeout_s, patience_s)

    def make_workload(self) -> Workload:
        """Return the whole workload.

        Raises:
            PlanError: There is no such workload.
        """
        made = make(
            self.workload,
            rate_rps=self.rate_rps or None,
            num_requests=self.num_requests or None,
            seed=self.seed,
            num_adapters=self.num_adapters or None,
        )
        return made if self.listed is None else renamed(made, self.listed)

    def share(self, workload: Workload, place: int) -> Iterator[tuple[int, Arrival]]:
        """Return the share of a process by its place in `workers`: every n-th request of n."""
        step, arrivals = len(self.workers), workload.arrivals
        return ((index, arrivals[index]) for index in range(place, len(arrivals), step))


def add_options(parser: LocustArgumentParser) -> None:
    """Add a test's options to locust's.

    Defaults have the option's type: the web UI converts by it.
    """
    add = parser.add_argument
    text = f"{', '.join(names())}, SUITE/SCENARIO, or the path of a trace"
    add("--workload", default="zipf", help=text)
    add("--rate", type=float, default=0.0, help="requests per second; 0: the workload's own")
    add("--requests", type=int, default=0, help="how many; 0: the workload's own")
    add("--seed", type=int, default=1, help="another seed, other requests")
    add("--adapters", type=int, default=0, help="number of adapters; 0: the workload's own")
    text = "map adapters by popularity onto those in /v1/models, or leave their names"
    add("--adapter-names", choices=("listed", "as-is"), default="listed", help=text)
    add("--api", choices=("completions", "chat"), default="completions", help="which API")
    add("--model", default="", help="for requests without an adapter; empty: the base listed first")
    add("--ignore-eos", action="store_true", help="responses of the workload's lengths (vLLM)")
    add("--api-key", default="", env_var="LOADTEST_API_KEY", is_secret=True, help="bearer token")
    add("--patience", type=float, default=0.0, help="s to wait for the first token; 0: --timeout")
    add("--timeout", type=float, default=120.0, help="s to wait for a whole response")
    add("--mode", choices=("open", "closed"), default="open", help="open or closed loop")
    add("--think-s", type=float, default=1.0, help="closed loop: mean s between two questions")
    add("--slo-ttft", type=float, default=0.5, help="longest s to the first token")
    add("--slo-tpot", type=float, default=0.05, help="longest mean s per token after it")
    add("--records", default="", help="write a JSON line per request to this file")
    add("--fail-on-lag", action="store_true", help="exit 3 if the generator lagged")


def make_plan(options: Namespace, url: str, *, workers: Sequence[str]) -> LocustPlan:
    """Return the plan of a test that has not begun; `starts_at_s` is 0.

    Raises:
        PlanError: It cannot begin; the message says why, in one line.
    """
    given: dict[str, Any] = {**vars(options), "workers": workers}
    try:
        plan = msgspec.convert({**given, "url": base_url(url)}, type=LocustPlan)
    except TargetError as error:
        raise PlanError(f"--host: {error}") from error
    except msgspec.ValidationError as error:
        raise PlanError(f"an option cannot be used: {error}") from error
    if options.adapter_names == "as-is" and options.model:
        return plan
    with closing(LoopThread()) as thread:
        try:
            listing = thread.wait(lambda: fetch_listing(plan.url, plan.settings.headers))
        except TargetError as error:
            raise PlanError(f"the endpoint does not list its models: {error}") from error
    listed = None if options.adapter_names == "as-is" else tuple(listing.adapters)
    base = options.model or listing.base
    return msgspec.structs.replace(plan, base_model=base, listed=listed)


class PlanShare:
    """A process's share of a test, which begins at the clock's `begun_s`.

    Attributes:
        left: Requests that no user has taken, with their places in the workload.
    """

    def __init__(
        self, plan: LocustPlan, place: int, clock: Callable[[], float], begun_s: float
    ) -> None:
        self.plan = plan
        self.left = deque(plan.share(plan.make_workload(), place))
        self._rng = Random(f"think/{plan.seed}/{place}")
        self._thread, self._opened = LoopThread(), AsyncExitStack()
        opening = open_sender(plan.settings, clock, begun_s)
        self._sender = self._thread.wait(lambda: self._opened.enter_async_context(opening))
        sys.setswitchinterval(_SWITCH_S)
        # Present objects stay: the collector need not look at them again and again.
        gc.collect()
        gc.freeze()

    def think_s(self) -> float:
        """Return the time to think before the next request of a closed loop, in seconds."""
        return self._rng.expovariate(1 / self.plan.think_s) if self.plan.think_s else 0.0

    def send(self, sink: Callable[[RequestRecord], None]) -> None:
        """Send the next request, or all in an open loop, and wait until all of them ended."""
        is_open, sender = self.plan.mode == "open", self._sender
        requests = [self.left.popleft() for _ in range(len(self.left) if is_open else 1)]
        # Filled by the thread, emptied by the greenlet: only greenlets may call locust.
        ended: deque[RequestRecord] = deque()

        async def send(index: int, arrival: Arrival) -> None:
            ended.append(await sender.send(arrival, index, at_s=arrival.at_s if is_open else None))

        async def send_all() -> None:
            await asyncio.sleep(-sender.now())
            await send_when_due(requests, send, sender.now if is_open else lambda: inf)

        def empty() -> None:
            for _ in range(len(ended)):
                sink(ended.popleft())

        self._thread.wait(send_all, empty)

    def close(self) -> None:
        """End the thread; nothing may be under way."""
        self._thread.wait(self._opened.aclose)
        self._thread.close()
