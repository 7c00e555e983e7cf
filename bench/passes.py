"""For how long single passes hold the event loop: `make bench-passes`.

While one runs no request is answered, so none should take more than 5 ms. A router with all its
parts and pods in name only does what clients, pods, scrapers of its metrics and watchers ask for;
then the same with 10,000 requests held; then bodies of 16 MiB. Where a task lets others run in
between, its longest pass counts, and the least of several tries in CPU time. Garbage is collected
as in service. Memory is that of the process (RSS).
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from time import process_time
from typing import NamedTuple

from bench.figures import render_table
from bench.hotpath import DrivenLoop
from bench.processes import memory
from bench.router import BUFFERED, FULL_DUPLEX, BenchedRouter, body_message
from extproc.adapters.declared import Declaration
from extproc.adapters.planner import Planner
from extproc.queue.status import describe_queue
from extproc.reports.listings import decode_models
from extproc.service.garbage import GC_THRESHOLDS
from extproc.types import ModelCard, RequestInfo

PODS = (100, 1_000)
_CHUNK_BYTES = 64 * 1024
_OVER = object()
Rows = dict[str, float]
_NAMES_OF_A_POD = 10_000
_MODELS_ASKED = 60
"""Models whose endpoints one offer looks for, about."""


class Pass(NamedTuple):
    """One pass, or a task of several.

    Attributes:
        name: For people.
        run: Does it; returns an iterator where others may run between its passes.
        prepare: Has it to be done again.
    """

    name: str
    run: Callable[[], object]
    prepare: Callable[[], object] = lambda: None


def longest_ms(each: Pass, tries: int) -> float:
    """Return the longest pass of a task; the least of several tries."""
    return 1e3 * min(_longest_s(each) for _ in range(tries))


def _longest_s(each: Pass) -> float:
    each.prepare()
    began_s = process_time()
    rest = each.run()
    longest_s = process_time() - began_s
    if isinstance(rest, Iterator):
        is_over = False
        while not is_over:
            began_s = process_time()
            is_over = next(rest, _OVER) is _OVER
            longest_s = max(longest_s, process_time() - began_s)
    return longest_s


class Passes:
    """The passes of one router."""

    def __init__(self, router: BenchedRouter) -> None:
        self.router, self._routing = router, router.parts.routing
        self._pool, self._models = router.parts.routing.pool, router.parts.routing.router.models
        self._page = router.models_page()
        self._cards = decode_models(self._page)
        self._address = router.addresses[-1]
        self._num_changes = 0
        self._planner = Planner()

    def fill(self) -> None:
        """Have all pods list their models, report and work."""
        for address in self.router.addresses:
            self._list(decode_models(self._page), address)
            self.router.report(address)
        self.router.fill()

    def _list(self, cards: Sequence[ModelCard], address: str = "") -> None:
        now = self.router.loop.now
        self._pool.record_models(address or self._address, cards, now=now)

    def _change(self) -> None:
        """Have a pod list one more adapter, another one each time."""
        self._num_changes += 1
        self._list([*self._cards, ModelCard(f"new-{self._num_changes}", "base", "/new")])

    def _report_all(self) -> None:
        for address in self.router.addresses:
            self.router.report(address)

    def _leave(self) -> None:
        self.router.set_endpoints(self.router.addresses)
        self._list(self._cards)

    def _see_all(self) -> None:
        """Have pods list thousands of names that nobody declares, others each time."""
        self._num_changes += 1
        kind = self._num_changes
        for address in self.router.addresses[:2]:
            names = (f"other-{kind}-{number}" for number in range(_NAMES_OF_A_POD))
            cards = [*self._cards[:1], *(ModelCard(name, "base") for name in names)]
            self._list(cards, address)

    def _look(self) -> Iterator[object]:
        now = self.router.loop.now + self._num_changes
        return self._planner.passes(self._pool.pod_states(now=now), {}, now=now)

    def _body(self) -> object:
        return self._models.body(None, now=self.router.loop.now)

    def _metrics(self) -> object:
        return iter(self.router.parts.telemetry.registry.collect())

    def _reach(self) -> None:
        reach = self._routing.router.destinations(now=self.router.loop.now)
        for adapter in self.router.adapters[:_MODELS_ASKED]:
            reach.of(RequestInfo(adapter, adapter))

    def of_fleet(self) -> Iterator[Pass]:
        """Yield what depends on pods and adapters."""
        router, now = self.router, self.router.loop.now
        listed, moved = self._cards, decode_models(router.models_page("/moved"))
        others = router.addresses[:-1]
        yield Pass("a pod's list of models: decoded", lambda: decode_models(self._page))
        yield Pass("- recorded, unchanged", lambda: self._list(listed))
        yield Pass("- with one more adapter", self._change)
        yield Pass(
            "- with all at other paths", lambda: self._list(moved), lambda: self._list(listed)
        )
        yield Pass(
            "a scrape that shows a restart",
            lambda: router.restart(self._address),
            lambda: self._list(listed),
        )
        yield Pass("a pod leaves", lambda: router.set_endpoints(others), self._leave)
        self._leave()
        self._list(listed)
        yield Pass("`/v1/models`, unchanged", self._body, self._body)
        yield Pass("- after a change of one pod", self._body, self._change)
        yield Pass("`/metrics`, after reports of all pods", self._metrics, self._report_all)
        yield Pass("a frame of the live page, likewise", router.feed.compose, self._report_all)
        yield Pass(
            "pods as those see them who load adapters", lambda: self._pool.pod_states(now=now)
        )
        yield Pass(f"where requests for {_MODELS_ASKED} models may go", self._reach)
        declared = [Declaration(name, f"hf:org/{name}") for name in router.adapters]
        self._planner.declare(declared, now=self.router.loop.now)
        yield Pass("a look at pods that list thousands of others' names", self._look, self._see_all)
        for address in router.addresses[:2]:
            self._list(listed, address)
        yield Pass("upkeep once a second", router.parts.tick)

    def of_held(self) -> Iterator[Pass]:
        """Yield what depends on requests that are held."""
        router, queue = self.router, self._routing.router.queue
        yield Pass("`/metrics`", self._metrics)
        yield Pass(
            "what is held, for the live page", lambda: describe_queue(queue, now=router.loop.now)
        )
        yield Pass("a frame of the live page", router.feed.compose)
        yield Pass("adapters needed next", lambda: queue.adapters(router.loop.now))
        yield Pass("one more request", lambda: router.hold(0))
        yield Pass(
            "an offer of room", lambda: self._routing.router.offer(now=router.loop.now), self._free
        )

    def _free(self) -> None:
        self.router.loop.now += 1.0
        self._routing.router.queue.freed(self.router.loop.now)


_TEXT = "The quick brown fox jumps over the lazy dog. "
_MEMBERS = {
    "one prompt": ('"prompt":"', _TEXT, '"'),
    "messages": ('"messages":[', '{"role":"user","content":"hello"},', "0]"),
    "tokens": ('"prompt":[', "7,", "7]"),
    "escapes": ('"prompt":"', "\\n", '"'),
    "objects": ('"x":[', "{},", "0]"),
}
"""Beside `model`: how it begins, what is repeated, and how it ends."""


class Bodies:
    """Requests with large bodies, from the headers to the answer."""

    def __init__(self, router: BenchedRouter, num_bytes: int) -> None:
        self._router, self._num_bytes = router, num_bytes

    def passes(self) -> Iterator[Pass]:
        """Yield a request for each kind of body and for each way that one goes on."""
        other = {"x-gateway-model-name-rewrite": self._router.adapters[1]}
        for name in _MEMBERS:
            messages = [body_message(self._body(name))]
            yield Pass(name, partial(self._ask, messages, BUFFERED))
        prompt = self._body("one prompt")
        starts = range(0, len(prompt), _CHUNK_BYTES)
        chunks = [
            body_message(
                prompt[start : start + _CHUNK_BYTES], is_last=start + _CHUNK_BYTES >= len(prompt)
            )
            for start in starts
        ]
        yield Pass("one prompt in chunks, sent back", partial(self._ask, chunks, FULL_DUPLEX))
        yield Pass(
            "one prompt for another model",
            partial(self._ask, [body_message(prompt)], BUFFERED, other),
        )

    def _body(self, name: str) -> bytes:
        begin, repeated, end = _MEMBERS[name]
        rest_bytes = self._num_bytes - 1024
        content = f"{begin}{repeated * (rest_bytes // len(repeated))}{end}"
        return f'{{"model":"{self._router.adapters[0]}",{content}}}'.encode()

    def _ask(
        self, messages: Sequence[bytes], mode: int, headers: Mapping[str, str] | None = None
    ) -> Iterator[None]:
        session, sink = self._router.open(headers or {}, mode)
        yield
        for message in messages:
            session.receive(message)
            yield
            yield from self._router.loop.passes()
        assert sink.is_ended
        session.closed()


def _measure_fleet(num_pods: int, args: argparse.Namespace) -> Rows:
    async def measure() -> Rows:
        router, rows = BenchedRouter(num_pods, args.adapters), Rows()
        passes = Passes(router)
        before_mb = _rss_mb()
        passes.fill()
        rows["MB: pods and adapters"] = _rss_mb() - before_mb
        _keep()
        for each in passes.of_fleet():
            rows[each.name] = longest_ms(each, args.tries)
        before_mb = _rss_mb()
        sessions = [router.hold(number) for number in range(args.held)]
        assert len(router.parts.routing.router.queue) == len(sessions)
        rows[f"MB: {args.held:,} requests held"] = _rss_mb() - before_mb
        for each in passes.of_held():
            rows[f"then: {each.name}"] = longest_ms(each, args.tries)
        return rows

    return _run(measure())


def _measure_bodies(args: argparse.Namespace) -> Rows:
    async def measure() -> Rows:
        router = BenchedRouter(2, 2)
        Passes(router).fill()
        _keep()
        passes = Bodies(router, args.body_bytes).passes()
        return {each.name: longest_ms(each, args.tries) for each in passes}

    return _run(measure())


def _run(measure: Coroutine[None, None, Rows]) -> Rows:
    with asyncio.Runner(loop_factory=DrivenLoop) as runner:
        return runner.run(measure)


def _keep() -> None:
    gc.set_threshold(*GC_THRESHOLDS)
    gc.collect()
    gc.freeze()


def _apart(measure: Callable[..., Rows], *args: object) -> Rows:
    """Measure in a process of its own, whose memory nothing else has used."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        return process.submit(measure, *args).result()


def _rss_mb() -> float:
    return memory(os.getpid()).now_bytes / 1e6


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.passes", description=__doc__)
    add = parser.add_argument
    add("--pods", type=int, nargs="+", default=PODS, metavar="N", help="(default 100 1000)")
    add("--adapters", type=int, default=1_000, help="on each pod (default 1000)")
    add("--held", type=int, default=10_000, help="requests (default 10000)")
    add("--body-bytes", type=int, default=16 * 1024 * 1024, help="(default 16 MiB)")
    add("--tries", type=int, default=30, help="of each task (default 30)")
    args = parser.parse_args(arguments)
    fleets = [_apart(_measure_fleet, num_pods, args) for num_pods in args.pods]
    header = ["longest pass, ms", *(f"{num:,} x {args.adapters:,}" for num in args.pods)]
    print(render_table(header, [[name, *(f"{e[name]:.2f}" for e in fleets)] for name in fleets[0]]))
    bodies = _apart(_measure_bodies, args)
    title = f"a body of {args.body_bytes / 2**20:g} MiB"
    print()
    print(render_table([title, "ms"], [[name, f"{ms:.2f}"] for name, ms in bodies.items()]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
