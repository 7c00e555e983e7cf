"""The course of the demo: a run of each policy with the same requests, then the results."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import aiohttp
from rich.console import Console, Group
from rich.live import Live

from extproc.commands.demo import adapters, screen
from extproc.commands.demo.fleet import ADAPTERS, NUM_PODS, start
from extproc.commands.demo.traffic import Results, make_workload, send_all
from extproc.commands.failure import FAILED, failure
from extproc.stack.processes import StackError
from extproc.stack.signals import SignalledError, until_signalled
from extproc.stack.stack import Stack
from extproc.workload.requests import Workload

SEED = 7
POLICIES = ("round_robin", "founding", "least_harm")
SCREEN_INTERVAL_S = 0.5
PIPE_INTERVAL_S = 5.0
_MAX_DECISIONS = 1000


@dataclass(frozen=True, slots=True)
class Run:
    """One policy's run.

    Attributes:
        pods: The state of each pod's engine, by name.
        decisions: The last decisions, newest first, as on the admin port.
    """

    policy: str
    results: Results
    pods: dict[str, dict[str, Any]]
    decisions: list[dict[str, Any]]


def run(*, keep: bool, seconds: float, rate: float, slots: int) -> int:
    """Run the demo and return the exit status.

    Raises:
        typer.Exit: It cannot run; the reason was printed.
    """
    console = Console(highlight=False)
    workload = make_workload(seconds, rate, SEED)
    if not workload.arrivals:
        raise failure("no requests in this time: raise --seconds or --rate")
    console.print(screen.introduction(POLICIES, slots, rate, seconds))
    try:
        return asyncio.run(until_signalled(_Demo(console, workload, slots).run(keep=keep)))
    except SignalledError as error:
        return 128 + error.number
    except StackError as error:
        raise failure(error, FAILED) from error


class _Demo:
    """The demo, once."""

    def __init__(self, console: Console, workload: Workload, slots: int) -> None:
        self._console = console
        self._workload = workload
        self._slots = slots

    async def run(self, *, keep: bool) -> int:
        runs: list[Run] = []
        for policy in POLICIES:
            self._console.print(f"\n[bold]{policy}[/bold] on {NUM_PODS} new pods")
            stack = Stack()
            try:
                await start(stack, policy, self._slots)
                runs.append(await self._run_policy(stack, policy))
                if policy == POLICIES[-1]:
                    self._conclude(runs)
                    await adapters.show(self._console, self._slots)
                    if keep:
                        await self._stay(stack)
            finally:
                await stack.close()
        return 1 if any(run.results.errors for run in runs) else 0

    async def _run_policy(self, stack: Stack, policy: str) -> Run:
        results = Results()
        async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as tasks:
            traffic = tasks.create_task(send_all(stack.url, self._workload, results))
            await self._show(session, stack, traffic, results)
            pods = {
                name: await _get(session, f"{pod.url}/debug/engine")
                for name, pod in stack.pods.items()
            }
            decisions = await _decisions(session, stack)
        return Run(policy, results, pods, decisions)

    async def _show(
        self,
        session: aiohttp.ClientSession,
        stack: Stack,
        traffic: asyncio.Task[None],
        results: Results,
    ) -> None:
        """Show the pods until the traffic has ended: in place on a terminal, else periodically."""
        is_live = self._console.is_terminal
        interval_s = SCREEN_INTERVAL_S if is_live else PIPE_INTERVAL_S
        with Live(console=self._console, auto_refresh=False, transient=not is_live) as live:
            while not traffic.done():
                await asyncio.wait([traffic], timeout=interval_s)
                look = await self._look(session, stack, results)
                if is_live:
                    live.update(look, refresh=True)
                else:
                    self._console.print(look)

    async def _look(self, session: aiohttp.ClientSession, stack: Stack, results: Results) -> Group:
        snapshot = await _get(session, f"{stack.routers[0].admin_url}/debug/snapshot")
        decisions = await _decisions(session, stack)
        num_requests = len(self._workload.arrivals)
        return screen.pods_table(snapshot["endpoints"], decisions, results, num_requests)

    def _conclude(self, runs: list[Run]) -> None:
        columns = [screen.column(run.policy, run.results, run.pods, run.decisions) for run in runs]
        self._console.print()
        self._console.print(screen.summary(columns))
        self._console.print(screen.remarks(self._slots))
        for part in screen.explanation(runs[-1].decisions):
            self._console.print(part)

    async def _stay(self, stack: Stack) -> None:
        # Not wrapped: the lines are meant to be copied.
        (router,) = stack.routers
        text = screen.invitation(stack.url, router.admin_url, router.address, ADAPTERS[0])
        self._console.print(text, soft_wrap=True, markup=False)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:  # Ctrl-C is the expected end
            self._console.print("stopping")


async def _decisions(session: aiohttp.ClientSession, stack: Stack) -> list[dict[str, Any]]:
    answer = await _get(session, f"{stack.routers[0].admin_url}/debug/decisions?n={_MAX_DECISIONS}")
    found: list[dict[str, Any]] = answer["decisions"]
    return found


async def _get(session: aiohttp.ClientSession, url: str) -> Any:
    async with session.get(url) as response:
        return await response.json()
