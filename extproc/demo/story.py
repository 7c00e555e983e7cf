"""The demo's course: two runs over the same requests, then what they show."""

from __future__ import annotations

import asyncio
import statistics
from collections import Counter
from dataclasses import dataclass
from typing import Any

import aiohttp
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from extproc.demo import screen
from extproc.demo.stack import ADAPTERS, DemoError, Stack, start_stack
from extproc.demo.traffic import Results, make_schedule, send_all

SEED = 7
REFRESH_S = 0.5


@dataclass(frozen=True, slots=True)
class Run:
    """One rule's run.

    Attributes:
        policy: The rule.
        results: What the clients saw.
        pods: What each pod says of its engine, by name.
        decision: The last pick with its candidates, as the admin port tells it.
    """

    policy: str
    results: Results
    pods: dict[str, dict[str, Any]]
    picks: Counter[str]
    decision: dict[str, Any]


def run_demo(*, keep: bool, seconds: float, rate: float) -> int:
    """Run the demo; the exit status of the command."""
    console = Console()
    try:
        return asyncio.run(_run(console, keep=keep, seconds=seconds, rate=rate))
    except DemoError as error:
        console.print(f"[red]{error}[/red]")
        return 1
    except KeyboardInterrupt:
        return 130


async def _run(console: Console, *, keep: bool, seconds: float, rate: float) -> int:
    console.print(screen.introduction(len(ADAPTERS), rate, seconds))
    runs = []
    for policy in ("round_robin", "founding"):
        console.print(f"\n[bold]{policy}[/bold]: starting 4 fake vLLM pods, the picker and Envoy")
        stack = await start_stack(policy)
        try:
            runs.append(await _run_policy(console, stack, policy, seconds, rate))
            if policy == "founding":
                _conclude(console, runs)
                if keep:
                    await _stay(console, stack)
        finally:
            await stack.close()
    failed = sum(sum(run.results.errors.values()) for run in runs)
    if failed:
        console.print(
            f"[red]{failed} requests failed: {[run.results.errors for run in runs]}[/red]"
        )
    return 1 if failed else 0


async def _run_policy(
    console: Console, stack: Stack, policy: str, seconds: float, rate: float
) -> Run:
    schedule, results = make_schedule(seconds, rate, SEED), Results()
    async with aiohttp.ClientSession() as session:
        traffic = asyncio.ensure_future(send_all(stack, schedule, results))
        with Live(console=console, refresh_per_second=4, transient=not console.is_terminal) as live:
            while not traffic.done():
                await asyncio.wait([traffic], timeout=REFRESH_S)
                if console.is_terminal:
                    live.update(await _look(session, stack, results, len(schedule)))
        await traffic
        pods = {
            name: await _get(session, f"http://{address}/debug/engine")
            for name, address in stack.pods.items()
        }
        recent = await _get(session, f"http://{stack.admin}/debug/decisions?n=1000")
    picks = [decision["pick"] for decision in recent["decisions"] if "pick" in decision]
    if not picks:
        raise DemoError("no request was routed")
    names = {address: name for name, address in stack.pods.items()}
    counts = Counter(names[pick["endpoints"][0]] for pick in picks)
    told = next((p for p in picks if p["reason"] == "affinity"), picks[0])
    return Run(policy, results, pods, counts, told)


async def _look(
    session: aiohttp.ClientSession, stack: Stack, results: Results, num_all: int
) -> Group:
    snapshot = await _get(session, f"http://{stack.admin}/debug/snapshot")
    recent = await _get(session, f"http://{stack.admin}/debug/decisions?n=1000")
    return Group(
        screen.pods_table(snapshot, recent["decisions"]),
        f"{results.num_done} of {num_all} requests done, {len(results.ttft_s)} answers begun",
    )


async def _get(session: aiohttp.ClientSession, url: str) -> Any:
    async with session.get(url) as response:
        return await response.json()


def _conclude(console: Console, runs: list[Run]) -> None:
    console.print(_summary(runs))
    console.print(screen.explanation(runs[-1].decision))


def _summary(runs: list[Run]) -> Table:
    table = Table(title="The same requests, two rules", title_justify="left")
    table.add_column("")
    for run in runs:
        table.add_column(run.policy, justify="right")
    rows: list[tuple[str, list[str]]] = [
        ("requests", [str(run.results.num_done) for run in runs]),
        ("failed", [str(sum(run.results.errors.values())) for run in runs]),
        ("adapter loads from disk", [str(_total(run, "num_disk_loads")) for run in runs]),
        ("adapter loads into a GPU slot", [str(_total(run, "num_gpu_loads")) for run in runs]),
        ("TTFT p50", [f"{_quantile(run, 50):.0f} ms" for run in runs]),
        ("TTFT p99", [f"{_quantile(run, 99):.0f} ms" for run in runs]),
        ("spread: busiest pod over mean", [f"{_spread(run):.2f}" for run in runs]),
    ]
    for label, cells in rows:
        table.add_row(label, *cells)
    return table


def _total(run: Run, key: str) -> int:
    return sum(pod[key] for pod in run.pods.values())


def _quantile(run: Run, percent: int) -> float:
    """A percentile of the time to first token, milliseconds."""
    values = run.results.ttft_s
    if len(values) < 2:
        return float("nan")
    return 1000 * statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def _spread(run: Run) -> float:
    return max(run.picks.values()) / (sum(run.picks.values()) / len(run.pods))


async def _stay(console: Console, stack: Stack) -> None:
    console.print(screen.invitation(stack.gateway, stack.admin, stack.grpc, ADAPTERS[0]))
    await asyncio.Event().wait()
