"""A scenario: honest clients of a service, and trouble in some of its blocks of time.

A real Envoy, a real router under a limit of memory, honest pods. Ten honest clients ask all the
while; where trouble begins, ten long answers are running. The runner starts it all, lets one block
follow the other on the same processes, measures each, counts what came of it, says what must not
be, and ends it all. `bench.fuzz_service` is one.
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

from bench.field import SESSION_HEADER
from bench.figures import abuse_of, by_label, total, within_s
from bench.fuzzattack import BROKE, Plan
from bench.honest import OK, HonestClients, summarise
from bench.outcome import Phase, Result, p99_ratios
from bench.processes import memory, raise_file_limit
from bench.target import NUM_PLACES, TOKEN_S, Attack, Target, Watch
from extproc.envoy.bootstrap import BootstrapOptions, Mode
from extproc.wire.memory import body_share_bytes

MAX_RSS_BYTES: Final = 256 * 10**6
_NUM_RUNNING: Final = 10
_RUNNING_S: Final = (5.0, 30.0)
"""The shortest and the longest of the answers that are running when trouble begins."""
_DRAIN_S: Final = 30.0


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
        self._watch = Watch(target, MAX_RSS_BYTES)
        self._clients = HonestClients(
            target.url,
            Random(scenario.seed),
            rate_per_s=scenario.honest_per_s,
            timeout_s=3 * scenario.bootstrap.message_timeout_s,
        )
        self._measured: list[dict[str, Any]] = []
        self._running: Counter[str] = Counter()

    async def run(self) -> Result:
        """Let all blocks happen; then wait for all to end."""
        loop = asyncio.get_running_loop()
        asking = loop.create_task(self._clients.run())
        watching = loop.create_task(self._watch.run())
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
            watching.cancel()
            (ended,) = await asyncio.gather(watching, return_exceptions=True)
            if isinstance(ended, Exception):
                self._watch.faults.append(f"the watch is broken: {ended!r}")
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
        if self._watch.faults:
            running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            self._running.update(await running)

    async def _phase(self, block: Block, attack: Attack | None = None) -> None:
        """Let it last so long, or until something is wrong; then end the attackers."""
        if self._watch.faults:
            return
        self._clients.phase = block.name
        self._watch.begin_phase()
        began_s, used_s = time.monotonic(), self._target.cpu_s()
        log_bytes = self._log_bytes()
        before = await asyncio.to_thread(self._target.metrics)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._watch.has_faults.wait(), block.seconds)
        elapsed_s = time.monotonic() - began_s
        now_s = used_s if self._watch.faults else self._target.cpu_s()
        delays_ms: list[float | None] = [None, None]
        if not self._watch.faults:
            after = await asyncio.to_thread(self._target.metrics)
            delays_ms = [delay_ms(before, after, percent) for percent in (99, 100)]
        cores = {key: (now_s[key] - used_s[key]) / elapsed_s for key in used_s}
        tally = None
        if attack is not None and not self._watch.faults:
            self._clients.phase = f"{block.name}, end"  # all their connections close at once
            tally = await attack.end()
            cores["attackers"] = attack.cores
        self._measured.append(
            {
                "name": block.name,
                "seconds": elapsed_s,
                "cores": cores,
                "rss_mb": {key: held / 1e6 for key, held in self._watch.rss_bytes.items()},
                "delay_p99_ms": delays_ms[0],
                "longest_delay_ms": delays_ms[1],
                "log_bytes": self._log_bytes() - log_bytes,
                "attack": tally,
            }
        )

    def _log_bytes(self) -> int:
        return self._target.children["router"].log_path.stat().st_size

    async def _result(self) -> Result:
        phases = [
            Phase(
                honest=summarise(self._clients.asked, each["name"]),
                shaky=summarise(self._clients.shaky, each["name"]),
                **each,
            )
            for each in self._measured
        ]
        samples: dict[str, float] = {}
        peak_mb: dict[str, float] = {}
        faults = list(self._watch.faults)
        if not faults:
            samples = await settled(self._target.metrics)
            faults += unbalanced(samples)
            pids = {name: self._target.children[name].pid for name in ("router", "envoy")}
            peak_mb = {name: memory(pid).peak_bytes / 1e6 for name, pid in pids.items()}
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
            peak_mb=peak_mb,
            num_series=len(samples),
            abuse=abuse_of(samples),
            rejections={reason: num for reason, num in rejections.items() if num},
            faults=faults,
        )


def delay_ms(
    before: Mapping[str, float], after: Mapping[str, float], percent: float
) -> float | None:
    """Of the router's event loop in a phase; see `within_s`."""
    delay_s = within_s(before, after, "extproc_loop_delay_seconds", percent)
    return None if delay_s is None else delay_s * 1e3


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
