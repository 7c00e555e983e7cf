"""Requests for 2,000 declared adapters where 64 or 128 have a place: does every one answer?

Eight fake pods with the costs of an H100, a router, an Envoy. Clients ask by Zipf's law, and for
each adapter at least once. A client whose request is refused waits for as long as `Retry-After`
says, and a little longer, and asks again; that counts as a retry, and its time goes on. All clocks
are the wall's, so other work on the machine shows.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp

from bench.adapters import NUM_DECLARED, NUM_PODS, SLOTS
from bench.figures import parse_counters, percentile, render_table
from bench.machine import describe
from bench.processes import memory
from bench.report import keep, parser
from extproc.envoy.bootstrap import BootstrapOptions
from extproc.envoy.bootstrap import render as render_bootstrap
from extproc.lab.engine.profiles import PROFILES
from extproc.lab.fakepod.pod import PodConfig, RunningPod, start_pod
from extproc.stack.processes import StackError, free_port
from extproc.stack.stack import Stack

TOP = 200
"""Requests for the most popular adapter; one of rank r has TOP / r, and each has one at least."""
_MAX_TOKENS = 32
_PROFILE = PROFILES["h100-8b"]
_PATIENCE_S = 120.0
_QUICK_S = 20.0
_LOADS = 'extproc_adapter_calls_total{kind="load",result="done"}'
_AT_REST_S = 15.0
"""Until the memory of a router that nobody asks anything does not grow any more."""


@dataclass(frozen=True, slots=True)
class Case:
    """What is asked of which fleet.

    Attributes:
        name: For the table.
        max_cpu_loras: Places on each pod.
        num_clients: Each waits for its response before it asks for the next.
        is_busy: Every pod has another request at any time, so that loads are limited.
        most_s: Requests that have not been sent by then are not sent any more.
        is_flood: Only adapters that no pod has are asked for, without retries.
    """

    name: str
    max_cpu_loras: int
    num_clients: int
    most_s: float
    is_busy: bool = False
    is_flood: bool = False


CASES = (
    Case("64 places", SLOTS, 32, 900),
    Case("128 places", 2 * SLOTS, 32, 900),
    Case("64 places, all pods serve", SLOTS, 32, 1200, is_busy=True),
    Case("64 places, a flood", SLOTS, 400, 90, is_busy=True, is_flood=True),
)


@dataclass(slots=True)
class Outcome:
    """What came of a case.

    Attributes:
        num_asked: Requests, retries not counted; `num_names` adapters were among them.
        num_answered: Those of them that ended with 200, and `num_names_answered` adapters.
        statuses: Responses, by status; those to be retried included.
        num_silent: Refusals that lack a `Retry-After`.
        num_retries: Of all requests.
        warm_s: From sending to the end of the response, where a pod had the adapter.
        cold_s: Likewise where none had; retries included.
        refused_s: From sending to each refusal.
        retry_after_s: What the refusals say.
        num_loads: Within `took_s`.
        rss_bytes: The router's memory at rest, with all declared; `peak_bytes` its most.
    """

    num_asked: int = 0
    num_answered: int = 0
    num_names: int = 0
    num_names_answered: int = 0
    num_retries: int = 0
    num_silent: int = 0
    num_loads: float = 0.0
    took_s: float = 0.0
    rss_bytes: int = 0
    peak_bytes: int = 0
    statuses: dict[int, int] = field(default_factory=dict)
    warm_s: list[float] = field(default_factory=list)
    cold_s: list[float] = field(default_factory=list)
    refused_s: list[float] = field(default_factory=list)
    retry_after_s: list[float] = field(default_factory=list)


def requests(rng: Random) -> list[int]:
    """Return numbers of adapters by Zipf's law, each at least once, in any order."""
    numbers = [rank for rank in range(NUM_DECLARED) for _ in range(max(1, round(TOP / (1 + rank))))]
    rng.shuffle(numbers)
    return numbers


@dataclass(frozen=True, slots=True)
class Scene:
    """A router and an Envoy, the pods, and a client."""

    stack: Stack
    pods: Sequence[RunningPod]
    http: aiohttp.ClientSession


@asynccontextmanager
async def running(folder: Path, max_cpu_loras: int) -> AsyncIterator[Scene]:
    """Eight pods in this process, a router with the store in this folder, and an Envoy.

    Raises:
        StackError: Something did not start.
    """
    async with AsyncExitStack() as exits:
        pods, stack = [], Stack()
        exits.push_async_callback(stack.close)
        for number in range(NUM_PODS):
            config = PodConfig(
                f"pod-{number}", max_loras=SLOTS, max_cpu_loras=max_cpu_loras, profile=_PROFILE
            )
            pods.append(await start_pod(config, "127.0.0.1", free_port()))
            exits.push_async_callback(pods[-1].stop)
        router = await stack.start_router(
            {
                "discovery": {"static": [{"address": pod.address} for pod in pods]},
                "adapters": {"store": {"directory": {"path": str(folder)}}},
                "pods": {"max_cpu_loras": max_cpu_loras},
                "scrape": {"expiry_s": 30.0},
                "log": {"level": "warning", "json_lines": False},
            }
        )
        await stack.start_envoy(render_bootstrap(BootstrapOptions(routers=(router.address,))))
        timeout = aiohttp.ClientTimeout(total=_PATIENCE_S)
        connector = aiohttp.TCPConnector(limit=0)
        http = aiohttp.ClientSession(timeout=timeout, connector=connector)
        yield Scene(stack, pods, await exits.enter_async_context(http))


class Clients:
    """They ask, and count what they get.

    Args:
        numbers: Of the adapters to ask for, in order.
    """

    def __init__(self, scene: Scene, case: Case, numbers: Sequence[int]) -> None:
        self._scene, self._case, self._numbers = scene, case, iter(numbers)
        self._rng = Random(2)
        self._names: set[str] = set()
        self._answered: set[str] = set()
        self.outcome = Outcome()

    async def run(self) -> Outcome:
        """Ask for all, and return what came of it."""
        outcome, began_s = self.outcome, time.monotonic()
        before = await num_loads(self._scene)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(self._case.num_clients):
                tasks.create_task(self._client(began_s + self._case.most_s))
        outcome.took_s = time.monotonic() - began_s
        outcome.num_loads = await num_loads(self._scene) - before
        outcome.num_names, outcome.num_names_answered = len(self._names), len(self._answered)
        return outcome

    async def _client(self, until_s: float) -> None:
        for number in self._numbers:
            if time.monotonic() >= until_s:
                return
            await self._ask(f"adapter-{number}", until_s)

    async def _ask(self, name: str, until_s: float) -> None:
        """Ask until there is an answer, or no time."""
        outcome, began_s = self.outcome, time.monotonic()
        is_warm = any(name in pod.pod.registry.paths for pod in self._scene.pods)
        if self._case.is_flood and is_warm:
            return
        outcome.num_asked += 1
        self._names.add(name)
        while True:
            sent_s = time.monotonic()
            status, retry_after_s = await self._send(name)
            outcome.statuses[status] = outcome.statuses.get(status, 0) + 1
            if status == 200:
                outcome.num_answered += 1
                self._answered.add(name)
                times = outcome.warm_s if is_warm else outcome.cold_s
                times.append(time.monotonic() - began_s)
                return
            outcome.refused_s.append(time.monotonic() - sent_s)
            if retry_after_s is None:
                outcome.num_silent += 1
                return
            outcome.retry_after_s.append(retry_after_s)
            if self._case.is_flood or time.monotonic() >= until_s:
                return
            outcome.num_retries += 1
            await asyncio.sleep(retry_after_s * (1 + 0.5 * self._rng.random()))

    async def _send(self, name: str) -> tuple[int, float | None]:
        """Send a request; return its status, and what it says about a retry."""
        url, body = f"{self._scene.stack.url}/v1/chat/completions", chat_body(name)
        async with self._scene.http.post(url, json=body) as response:
            await response.read()
            retry_after = response.headers.get("retry-after")
            return response.status, None if retry_after is None else float(retry_after)


def chat_body(model: str, max_tokens: int = _MAX_TOKENS) -> dict[str, Any]:
    """Return the body of a request."""
    messages = [{"role": "user", "content": "hi"}]
    return {"model": model, "messages": messages, "max_tokens": max_tokens}


async def num_loads(scene: Scene) -> float:
    """Return how many loads the router has had done."""
    async with scene.http.get(f"{scene.stack.routers[0].admin_url}/metrics") as response:
        return parse_counters(await response.text()).get(_LOADS, 0.0)


@asynccontextmanager
async def _busy(scene: Scene) -> AsyncIterator[None]:
    """Keep a request for the base model on every pod, one after the other."""

    async def keep(url: str) -> None:
        while True:
            body = chat_body("base", 1000)
            async with scene.http.post(f"{url}/v1/chat/completions", json=body) as response:
                await response.read()

    async with asyncio.TaskGroup() as tasks:
        kept = [tasks.create_task(keep(pod.url)) for pod in scene.pods]
        yield
        for task in kept:
            task.cancel()


async def serve(case: Case) -> Outcome:
    """Measure a case.

    Raises:
        StackError: Something did not start.
    """
    with TemporaryDirectory() as name:
        declare(Path(name))
        async with running(Path(name), case.max_cpu_loras) as scene:
            await asyncio.sleep(_AT_REST_S)
            pid = scene.stack.routers[0].pid
            rss_bytes = memory(pid).now_bytes
            numbers = requests(Random(1))
            if case.is_flood:
                numbers = Random(1).choices(range(NUM_DECLARED), k=100_000)
            async with _busy(scene) if case.is_busy else nullcontext():
                outcome = await Clients(scene, case, numbers).run()
            outcome.rss_bytes = rss_bytes
            outcome.peak_bytes = memory(pid).peak_bytes
            return outcome


def declare(folder: Path) -> None:
    """Write 2,000 declarations for the store in a folder."""
    for number in range(NUM_DECLARED):
        name = f"adapter-{number}"
        document = json.dumps({"name": name, "source": f"/adapters/{name}"})
        (folder / f"{name}.json").write_text(document)


def render(outcomes: dict[str, Outcome]) -> str:
    """Return the table."""
    header = [f"{NUM_DECLARED:,} adapters, {NUM_PODS} pods of {SLOTS} slots", "adapters answered"]
    header += ["requests answered", "responses", "retries", "loads/min", "minutes"]
    header += ["warm p50 / p99 s", "cold p50 / p99 s", "refused after p50 / most s"]
    header += ["router MB: at rest", "most"]
    rows = []
    for name, each in outcomes.items():
        statuses = ", ".join(f"{status}: {num:,}" for status, num in sorted(each.statuses.items()))
        rows.append(
            [
                name,
                f"{each.num_names_answered:,} of {each.num_names:,}",
                f"{each.num_answered:,} of {each.num_asked:,}",
                statuses,
                f"{each.num_retries:,}",
                f"{60 * each.num_loads / each.took_s:.0f}",
                f"{each.took_s / 60:.1f}",
                _two(each.warm_s, 99),
                _two(each.cold_s, 99),
                _two(each.refused_s, 100),
                *(f"{size / 1e6:.1f}" for size in (each.rss_bytes, each.peak_bytes)),
            ]
        )
    return render_table(header, rows)


def _two(times_s: Sequence[float], percent: float) -> str:
    if not times_s:
        return "-"
    return f"{percentile(times_s, 50):.2f} / {percentile(times_s, percent):.2f}"


def is_good(case: Case, outcome: Outcome) -> bool:
    """Return whether all were answered, or told when to come again."""
    num_wanted = outcome.num_names if case.most_s == _QUICK_S else NUM_DECLARED
    is_answered = outcome.num_names_answered == num_wanted or case.is_flood
    return is_answered and not outcome.num_silent and outcome.statuses.keys() <= {200, 429, 503}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; the exit status is 1 where an adapter never answered, or a refusal was no good."""
    options = parser("adapterload", __doc__)
    options.add_argument("--cases", type=int, nargs="+", choices=range(len(CASES)))
    args = options.parse_args(arguments)
    cases = CASES if args.cases is None else [CASES[number] for number in args.cases]
    if args.quick:
        cases = [replace(each, most_s=_QUICK_S) for each in cases]
    try:
        machine = describe()
        outcomes = {case.name: asyncio.run(serve(case)) for case in cases}
    except StackError as error:
        print(f"bench.adapterload: {error}", file=sys.stderr)
        return 1
    print(render(outcomes))
    results = {name: _summary(each) for name, each in outcomes.items()}
    keep("adapters", args, machine, {"cases": results})
    return 0 if all(is_good(case, outcomes[case.name]) for case in cases) else 1


def _summary(outcome: Outcome) -> dict[str, Any]:
    """Return an outcome without each single time."""
    found: dict[str, Any] = {}
    for key, value in asdict(outcome).items():
        if isinstance(value, list):
            for percent in (50, 99, 100):
                found[f"{key}_p{percent}"] = percentile(value, percent) if value else None
        else:
            found[key] = value
    return found


if __name__ == "__main__":
    sys.exit(main())
