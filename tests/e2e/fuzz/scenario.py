"""A scenario: honest clients of a service, and trouble in some of its blocks of time.

A real Envoy, a real router under a limit of memory, honest pods. Ten honest clients ask all the
while; where trouble begins, ten long answers are running. The runner starts it all, lets one block
follow the other on the same processes, measures each, counts what came of it, says what must not
be, and ends it all. `tests.e2e.fuzz.service` is one.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final

import uvloop

from bench.figures import abuse_of, by_label, total
from bench.processes import raise_file_limit
from extproc.envoy.bootstrap import BootstrapOptions, Mode
from extproc.wire.memory import body_share_bytes
from tests.e2e.fuzz.attack import BROKE, Plan, Tally
from tests.e2e.fuzz.field import SESSION_HEADER
from tests.e2e.fuzz.honest import OK, HonestClients, summarise
from tests.e2e.fuzz.outcome import Phase, Result, p99_ratios
from tests.e2e.fuzz.target import NUM_PLACES, TOKEN_S, Attack, Target

MAX_RSS_BYTES: Final = 256 * 10**6
_NUM_RUNNING: Final = 10
_RUNNING_S: Final = (5.0, 30.0)
"""The shortest and the longest of the answers that are running when trouble begins."""
_DRAIN_S: Final = 30.0
_LOOK_S: Final = 0.1
_DELAY: Final = "extproc_loop_delay_seconds"


def within_s(
    before: Mapping[str, float], after: Mapping[str, float], name: str, percent: float
) -> float | None:
    """The least bound of a histogram's buckets that so many of what came in between did not
    exceed; None where nothing came, or a page is missing."""
    begin = f'{name}_bucket{{le="'
    bounds = [key for key in after if key.startswith(begin)] if before else []
    found = {float(key[len(begin) : -2]): after[key] - before.get(key, 0.0) for key in bounds}
    least = max(found.values(), default=0.0) * percent / 100
    return min((bound for bound, num in found.items() if num >= least > 0), default=None)


@dataclass(frozen=True, slots=True)
class Block:
    """A part of a scenario.

    Attributes:
        name: `quiet 1`, `attack 1` and so on; honest requests are summed up by it.
        seconds: How long it lasts.
        plan: Of the attackers, but for the ports; None for none.
    """

    name: str
    seconds: float
    plan: Plan | None = None


@dataclass(frozen=True, slots=True)
class Scenario:
    """A gateway, its honest load, its troubles.

    Attributes:
        blocks: In order.
        bootstrap: Envoy's configuration, but for addresses.
        honest_per_s: Requests of the honest clients together.
        seed: Of what they ask.
    """

    blocks: Sequence[Block]
    bootstrap: BootstrapOptions = field(default_factory=BootstrapOptions)
    honest_per_s: float = 50.0
    seed: int = 1

    def router_config(self) -> dict[str, Any]:
        """The router's configuration, but for addresses."""
        mode = self.bootstrap.mode
        return {
            "request": {
                "session_header": SESSION_HEADER,
                # As it would find a container's limit by itself.
                "max_bytes_in_memory": body_share_bytes(MAX_RSS_BYTES),
            },
            "peers": {"static": []},
            "pods": {"max_cpu_loras": NUM_PLACES},
            "destination": {"num_fallbacks": 2 if mode is Mode.OVERRIDE_HOST else 0},
            "log": {"level": "info", "json_lines": False},
        }


class Run:
    """One run over running processes."""

    def __init__(self, target: Target, scenario: Scenario) -> None:
        self._target, self._scenario = target, scenario
        self._clients = HonestClients(
            target.url,
            Random(scenario.seed),
            rate_per_s=scenario.honest_per_s,
            timeout_s=3 * scenario.bootstrap.message_timeout_s,
        )
        self._measured: list[tuple[str, dict[str, float], Tally | None]] = []
        self._running: Counter[str] = Counter()
        self._faults: list[str] = []

    async def run(self) -> Result:
        """Let all blocks happen; then wait for all to end."""
        asking = asyncio.get_running_loop().create_task(self._clients.run())
        try:
            for block in self._scenario.blocks:
                if block.plan is None:
                    await self._phase(block)
                else:
                    await self._trouble(block, self._target.aimed(block.plan))
        finally:
            self._clients.stop()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asking, _DRAIN_S)
        return await self._result()

    async def _trouble(self, block: Block, plan: Plan) -> None:
        shortest_s, longest_s = _RUNNING_S
        num_tokens = int(min(max(shortest_s, 0.6 * block.seconds), longest_s) / TOKEN_S)
        answers = [self._clients.long_answer(num_tokens) for _ in range(_NUM_RUNNING)]
        running = asyncio.gather(*answers)
        # Under way before the attack begins, each with its first tokens.
        await asyncio.sleep(4 * TOKEN_S)
        self._clients.phase = block.name
        async with Attack(plan) as attack:
            self._target.list_pods(attack.addresses)
            await self._phase(block, attack)
        self._target.list_pods()
        self._running.update(await running)

    async def _phase(self, block: Block, attack: Attack | None = None) -> None:
        """Let it last so long, or until a process has ended; then end the attackers."""
        if self._faults:
            return
        target, self._clients.phase = self._target, block.name
        target.forget_peaks()
        began_s, used_s, log_bytes = time.monotonic(), target.cpu_s(), target.log_bytes()
        before = await asyncio.to_thread(target.metrics)
        while (left_s := began_s + block.seconds - time.monotonic()) > 0 and not self._faults:
            await asyncio.sleep(min(left_s, _LOOK_S))
            self._faults += target.faults(MAX_RSS_BYTES)
        seconds = time.monotonic() - began_s
        figures, tally = {"s": seconds}, None
        if not self._faults:
            now_s, after = target.cpu_s(), await asyncio.to_thread(target.metrics)
            cores = {f"cores: {key}": (now_s[key] - used_s[key]) / seconds for key in used_s}
            for name, percent in (("delay p99 ms", 99), ("longest delay ms", 100)):
                if (late_s := within_s(before, after, _DELAY, percent)) is not None:
                    figures[name] = late_s * 1e3
            figures |= target.peaks_mb() | cores
            figures["log B/s"] = (target.log_bytes() - log_bytes) / seconds
            if attack is not None:
                self._clients.phase = f"{block.name}, end"  # all their connections close at once
                tally = await attack.end()
                figures |= tally.figures(seconds) | {"cores: attackers": attack.cores}
        self._measured.append((block.name, figures, tally))

    async def _result(self) -> Result:
        phases = []
        for name, figures, attack in self._measured:
            honest, failures = summarise(self._clients.asked, name)
            shaky, shaky_failures = summarise(self._clients.shaky, name)
            honest["shaky failed"] = shaky["failed"]
            phases.append(Phase(name, honest | figures, failures, shaky_failures, attack))
        samples: dict[str, float] = {}
        faults = list(self._faults)
        if not faults:
            samples = await settled(self._target.metrics)
            faults += unbalanced(samples)
        outcomes = {name for each in phases if each.attack for name in each.attack.outcomes}
        faults += sorted(name for name in outcomes if f": {BROKE}: " in name)
        failed = Counter(f"{e.phase}: {e.cause}" for e in self._clients.asked if e.cause != OK)
        faults += [f"honest requests failed in {what}: {num}" for what, num in failed.items()]
        cut = {how: num for how, num in self._running.items() if how != OK}
        faults += [f"{num} running answers were cut: {how}" for how, num in cut.items()]
        rejections = by_label(samples, "extproc_rejections_total", "reason")
        return Result(
            phases=phases,
            running=dict(self._running),
            p99_ratios=p99_ratios(phases),
            num_series=len(samples),
            abuse=abuse_of(samples),
            rejections={reason: num for reason, num in rejections.items() if num},
            faults=faults,
        )


async def settled(metrics: Callable[[], dict[str, float]]) -> dict[str, float]:
    """The router's metrics once they add up, or after half a minute."""
    deadline_s = time.monotonic() + _DRAIN_S
    while True:
        samples = await asyncio.to_thread(metrics)
        if not unbalanced(samples) or time.monotonic() > deadline_s:
            return samples
        await asyncio.sleep(0.2)


def unbalanced(samples: Mapping[str, float]) -> list[str]:
    """Which counts of the router do not add up when nothing is under way."""
    if not samples:
        return ["the router's metrics cannot be read"]
    open_picks = int(total(samples, "extproc_picks_in_flight"))
    streams = int(total(samples, "extproc_streams_active"))
    picks = int(total(samples, "extproc_picks_total"))
    ended = int(total(samples, "extproc_completions_total"))
    faults = []
    if open_picks or streams:
        faults.append(f"{open_picks} picks and {streams} streams are still open")
    if picks != ended:
        faults.append(f"{picks} picks, but {ended} ended")
    return faults


def run(scenario: Scenario) -> Result:
    """Start everything, let it happen, end everything.

    Raises:
        StackError: Something did not start.
    """
    raise_file_limit()
    return uvloop.run(_run(scenario))


async def _run(scenario: Scenario) -> Result:
    with tempfile.TemporaryDirectory(prefix="extproc-scenario-") as folder:
        target = Target(Path(folder))
        try:
            await target.start(scenario.bootstrap, scenario.router_config())
            return await Run(target, scenario).run()
        finally:
            await target.close()
