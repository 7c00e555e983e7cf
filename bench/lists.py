"""Clients without rights read the list of models in a loop, beside honest ones.

For each case - connections that read, adapters that a pod lists, Envoy's way and its workers - a
real router and a real Envoy as they come, a quiet block, one with the attack, and a quiet one
again. Ten honest clients ask all the while; ten long answers are running when the attack begins.

The exit status is 1 where an honest request failed or a running answer was cut. The attackers have
the processors that nobody else wants (SCHED_IDLE); the table has what each process took.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from random import Random
from typing import Any, Final

import aiohttp
import uvloop

from bench.figures import by_label, parse_counters, render_table
from bench.fuzzfield import HONEST, SHAKY
from bench.fuzzhonest import OK, HonestClients, Summary, judge, summarise
from bench.listreaders import Ending, Plan
from bench.machine import describe
from bench.processes import cpu_s, get, memory, raise_file_limit, waited_s
from bench.report import default_path, write_json
from extproc.envoy.bootstrap import BootstrapOptions, Mode, RequestBody, render
from extproc.lab.engine.profiles import INSTANT
from extproc.lab.fakepod.config import PodConfig
from extproc.stack.processes import ChildProcess, StackError
from extproc.stack.stack import Stack

LONG: Final = "long"
"""Adapter of the pod whose answers take seconds."""
WAYS: Final = (
    *((Mode.ORIGINAL_DST, body) for body in RequestBody if body is not RequestBody.FULL_DUPLEX),
    (Mode.OVERRIDE_HOST, RequestBody.BUFFERED),
    (Mode.FULL_DUPLEX, RequestBody.FULL_DUPLEX),
)
"""Envoy's way to the pods and its mode of bodies: each of either, and all that are shipped."""

_STEP_S: Final = 0.2
_NUM_LONG: Final = 10
_HONEST_PER_S: Final = 50.0
_PATIENCE_S: Final = 30.0
_SETTLE_S: Final = 2.0
_ONSET_S: Final = 2.0
"""In which all attackers connect at once."""
_ATTACK: Final = ("onset", "steady", "end")
_PROCESSES: Final = ("router", "envoy")


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table.

    Attributes:
        connections: That read lists, at one time.
        adapters: That the pod lists.
        mode: Envoy's way to the pods.
        body: Its mode of bodies.
        workers: Envoy's threads.
        ending: When the attackers' connections end.
    """

    connections: int
    adapters: int
    mode: Mode
    body: RequestBody
    workers: int
    ending: Ending

    def __str__(self) -> str:
        way = f"{self.mode} {self.body}"
        return f"{self.connections} {self.ending}, {self.adapters:,}, {way}, {self.workers}"


@dataclass(frozen=True, slots=True)
class Seconds:
    """How long the blocks are: quiet twice, under attack once."""

    quiet_s: float
    attack_s: float


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one case.

    Attributes:
        case: What was measured.
        quiet: What honest clients saw in both quiet blocks.
        attack: The same under attack, from its first moment until everything has settled.
        steady: The same without the moments in which all attackers come, and in which they go.
        running: Answers running when the attack began, by how they ended.
        list_bytes: Bytes of the whole list.
        lists: What the attackers got: the number of each status, and of broken answers.
        lists_mb_per_s: Megabytes of it a second.
        cores: CPU under attack, in cores: router, envoy, attackers; `router waits` and so on: was
            ready and had no core.
        peak_mb: The most memory that router and Envoy held, from their start.
        abuse: How often each limit of the wire was passed.
    """

    case: Case
    quiet: Summary
    attack: Summary
    steady: Summary
    running: dict[str, int]
    list_bytes: int
    lists: dict[str, int]
    lists_mb_per_s: float
    cores: dict[str, float]
    peak_mb: dict[str, float]
    abuse: dict[str, int]

    @property
    def p99_ratios(self) -> tuple[float, float]:
        """Under attack over quiet, and without its onset and end; 0 without quiet requests."""
        quiet_ms = self.quiet.p99_ms or math.inf
        return self.attack.p99_ms / quiet_ms, self.steady.p99_ms / quiet_ms

    @property
    def num_cut(self) -> int:
        """Running answers that did not end whole."""
        return sum(count for how, count in self.running.items() if how != OK)

    @property
    def is_held(self) -> bool:
        """Whether every honest request was served and no running answer was cut."""
        return not (self.quiet.failures or self.attack.failures or self.num_cut)


# ---- one case


async def measure(case: Case, seconds: Seconds) -> Row:
    """Start everything, measure, end everything.

    Raises:
        StackError: Something did not start, or died.
    """
    stack = Stack()
    try:
        await _start(stack, case)
        return await _Scene(stack, case, seconds).run()
    finally:
        await stack.close()


async def _start(stack: Stack, case: Case) -> None:
    # With its base model and the adapter of long answers as many as a pod may list.
    listed = [f"customer-{n:05d}/support-assistant-v1" for n in range(case.adapters - 2)]
    slow = replace(INSTANT, step_s=_STEP_S)
    await stack.start_pods(
        {
            "honest": PodConfig("honest", adapters=(*HONEST, *SHAKY), max_loras=16),
            # Another pod than the honest clients': a list of its own takes it tens of milliseconds.
            "long": PodConfig("long", adapters=(LONG, *listed), profile=slow),
        }
    )
    is_strict = case.body is RequestBody.STREAMED_STRICT
    router = await stack.start_router(
        {
            "log": {"level": "info", "json_lines": False},
            "request": {"allow_mode_override": is_strict},
        }
    )
    bootstrap = BootstrapOptions(
        mode=case.mode,
        request_body=case.body,
        routers=(router.address,),
        allow_mode_override=is_strict,
    )
    models = (*HONEST, LONG, listed[-1])
    await stack.start_envoy(render(bootstrap), models, log_level="error", concurrency=case.workers)


class _Scene:
    """The blocks of one case, on running processes."""

    def __init__(self, stack: Stack, case: Case, seconds: Seconds) -> None:
        self._stack, self._case, self._seconds = stack, case, seconds
        self._honest = HonestClients(
            stack.url, Random(1), rate_per_s=_HONEST_PER_S, timeout_s=_PATIENCE_S
        )

    async def run(self) -> Row:
        loop = asyncio.get_running_loop()
        asking = loop.create_task(self._honest.run())
        try:
            await asyncio.sleep(_SETTLE_S)  # the first requests of all pay for what is cached
            await self._quiet()
            async with asyncio.TaskGroup() as tasks:
                answers = [tasks.create_task(self._long_answer()) for _ in range(_NUM_LONG)]
                # Under way before the attack begins, each with its first tokens.
                await asyncio.sleep(4 * _STEP_S)
                self._honest.phase = "onset"
                before, began_s = self._used_s(), time.monotonic()
                async with _Readers(self._plan()) as readers:
                    await asyncio.sleep(_ONSET_S)
                    self._honest.phase = "steady"
                    await asyncio.sleep(self._seconds.attack_s - _ONSET_S)
                    used = self._used_s()
                    self._honest.phase = "end"  # all connections close at once
                    tally = await readers.end()
                attack_s = time.monotonic() - began_s
                await asyncio.sleep(_SETTLE_S)
            await self._quiet()
        finally:
            self._honest.stop()
            await asyncio.wait_for(asking, 2 * _PATIENCE_S)
        for child in self._stack.children.values():
            child.check_running()
        cores = {name: (used[name] - before[name]) / attack_s for name in used}
        return self._row(
            running=dict(Counter(task.result() for task in answers)),
            lists=tally["answers"],
            lists_mb_per_s=tally["num_bytes"] / attack_s / 1e6,
            cores={**cores, "attackers": readers.cpu_s / attack_s},
        )

    async def _quiet(self) -> None:
        self._honest.phase = "quiet"
        await asyncio.sleep(self._seconds.quiet_s)

    def _plan(self) -> Plan:
        port = int(self._stack.url.rpartition(":")[2])
        return Plan(port, self._case.connections, self._case.ending)

    def _used_s(self) -> dict[str, float]:
        pids = {name: self._stack.children[name].pid for name in _PROCESSES}
        used = {name: cpu_s(pid) for name, pid in pids.items()}
        return {**used, **{f"{name} waits": waited_s(pid) for name, pid in pids.items()}}

    async def _long_answer(self) -> str:
        """How an answer ended that is under way when the attack begins."""
        num_tokens = int(max(5.0, 0.6 * self._seconds.attack_s) / _STEP_S)
        body = {"model": LONG, "prompt": "x", "max_tokens": num_tokens, "stream": True}
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_PATIENCE_S * 2)) as http,
                http.post(f"{self._stack.url}/v1/completions", json=body) as answer,
            ):
                return judge(answer.status, await answer.read(), is_streamed=True)
        except (aiohttp.ClientError, TimeoutError) as error:
            return f"connection: {type(error).__name__}"

    def _row(self, **figures: Any) -> Row:
        router = self._stack.routers[0]
        samples = parse_counters(get(f"{router.admin_url}/metrics") or "")
        abuse = by_label(samples, "extproc_wire_abuse_total", "limit")
        pids = {name: self._stack.children[name].pid for name in _PROCESSES}
        asked = self._honest.records.asked
        return Row(
            case=self._case,
            quiet=summarise(asked, "quiet"),
            attack=summarise(
                [e._replace(phase="attack") for e in asked if e.phase in _ATTACK], "attack"
            ),
            steady=summarise(asked, "steady"),
            list_bytes=len(get(f"{self._stack.url}/v1/models") or ""),
            peak_mb={name: memory(pid).peak_bytes / 1e6 for name, pid in pids.items()},
            abuse={limit: count for limit, count in abuse.items() if count},
            **figures,
        )


class _Readers(ChildProcess):
    """The attackers' process.

    Attributes:
        cpu_s: CPU seconds that it used; 0 until it has ended.
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__("readers")
        self.cpu_s = 0.0
        self._plan = plan

    async def start(self) -> None:
        """Start the attack."""
        plan = json.dumps(asdict(self._plan))
        self.spawn([sys.executable, "-m", "bench.listreaders", plan])
        await self.wait_until(self._has_begun)

    async def _has_begun(self) -> bool:
        return bool(self.log)

    async def end(self) -> dict[str, Any]:
        """Have it stop; return what it got.

        Raises:
            StackError: It had ended by itself.
        """
        self.check_running()
        self.cpu_s = cpu_s(self.pid)
        await self.stop()
        return dict(json.loads(self.log.splitlines()[-1]))


# ---- the table


def table(rows: Sequence[Row]) -> str:
    """The table; the first column tells the case."""
    header = ["connections, adapters, way, workers", "honest", "failed", "running cut"]
    header += [
        "p50 ms: quiet, attack, later",
        "p99 ms",
        "p99 x",
        "lists",
        "MB/s",
        "refused",
        "broken",
    ]
    header += ["router MB", "Envoy MB", "cores: router", "waits", "Envoy", "waits", "attackers"]
    lines = [render_table(header, [_cells(row) for row in rows])]
    for row in rows:
        failures = {
            **row.attack.failures,
            **{f"quiet {k}": v for k, v in row.quiet.failures.items()},
        }
        if failures or row.num_cut or row.abuse:
            found = f"failed {failures}; running {row.running}; limits passed {row.abuse}"
            lines.append(f"{row.case}: {found}; lists {row.lists}")
    return "\n".join(lines)


def _cells(row: Row) -> list[str]:
    quiet, attack, cores = row.quiet, row.attack, row.cores
    refused = sum(count for what, count in row.lists.items() if what.isdigit() and what != "200")
    broken = sum(count for what, count in row.lists.items() if not what.isdigit())
    failed = sum(quiet.failures.values()) + sum(attack.failures.values())
    return [
        str(row.case),
        f"{quiet.requests + attack.requests:,}",
        f"{failed:,}",
        f"{row.num_cut} of {sum(row.running.values())}",
        f"{quiet.p50_ms:.1f}, {attack.p50_ms:.1f}, {row.steady.p50_ms:.1f}",
        f"{quiet.p99_ms:.1f}, {attack.p99_ms:.1f}, {row.steady.p99_ms:.1f}",
        ", ".join(f"{ratio:.1f}" for ratio in row.p99_ratios),
        f"{row.lists.get('200', 0):,}",
        f"{row.lists_mb_per_s:,.0f}",
        f"{refused:,}",
        f"{broken:,}",
        *(f"{row.peak_mb[name]:.0f}" for name in _PROCESSES),
        *(f"{cores[key]:.2f}" for name in _PROCESSES for key in (name, f"{name} waits")),
        f"{cores['attackers']:.2f}",
    ]


# ---- the command


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; the exit status is 1 where an honest client was harmed."""
    args = _parse(arguments)
    raise_file_limit()
    rows = []
    try:
        machine = describe()
        for case in _cases(args):
            rows.append(uvloop.run(measure(case, Seconds(args.quiet_s, args.attack_s))))
            print(f"{case}: {'held' if rows[-1].is_held else 'HARMED'}", file=sys.stderr)
    except (StackError, OSError, TimeoutError) as error:
        print(f"bench-lists: {error}", file=sys.stderr)
        return 1
    print(table(rows))
    path = args.out or default_path("lists", machine, is_quick=args.quick)
    write_json({"machine": machine, "rows": [asdict(row) for row in rows]}, path)
    print(f"\n{path}", file=sys.stderr)
    return 0 if all(row.is_held for row in rows) else 1


def _cases(args: argparse.Namespace) -> list[Case]:
    if args.quick:
        return [Case(400, 2000, Mode.ORIGINAL_DST, RequestBody.BUFFERED, 1, Ending.MIXED)]
    every = product(args.connections, args.adapters, args.ways, args.workers, args.endings)
    return [
        Case(connections, adapters, mode, body, workers, ending)
        for connections, adapters, (mode, body), workers, ending in every
    ]


def _way(text: str) -> tuple[Mode, RequestBody]:
    mode, _, body = text.partition("/")
    return Mode(mode), RequestBody(body)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.lists",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="one case")
    add("--connections", type=int, nargs="+", default=(400, 1200), help="that read lists")
    add("--adapters", type=int, nargs="+", default=(2000, 10_000), help="that a pod lists")
    ways = " ".join(f"{mode}/{body}" for mode, body in WAYS)
    add("--ways", type=_way, nargs="+", default=WAYS, metavar="MODE/BODY", help=ways)
    add("--workers", type=int, nargs="+", default=(1, 4), help="Envoy's threads")
    add("--endings", type=Ending, nargs="+", default=(Ending.MIXED,), choices=list(Ending))
    add("--quiet-s", type=float, default=4.0, help="before and after the attack")
    add("--attack-s", type=float, default=10.0, help=f"more than {_ONSET_S:g}")
    add("--out", help="JSON file (default: bench/results/lists-DATE-machine.json)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
