"""Clients without rights read the list of models in a loop, beside honest ones.

For each case - connections that read, adapters that a pod lists, Envoy's way and its workers - a
scenario: a quiet block, one with the attack, and a quiet one again. Half of the connections stay,
half end with each answer.

The exit status is 1 where an honest request failed or a running answer was cut. The attackers have
the processors that nobody else wants (SCHED_IDLE); the table has what each process took.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, Final

from bench.figures import render_table
from bench.fuzzattack import Plan
from bench.fuzzclients import LIST_READERS
from bench.honest import OK, Summary, summarise
from bench.machine import describe
from bench.outcome import Result
from bench.report import keep, parser
from bench.scenario import Block, Scenario, run
from extproc.envoy.bootstrap import BootstrapOptions, Mode, RequestBody
from extproc.stack.processes import StackError

WAYS: Final = (
    *((Mode.ORIGINAL_DST, body) for body in RequestBody if body is not RequestBody.FULL_DUPLEX),
    (Mode.OVERRIDE_HOST, RequestBody.BUFFERED),
    (Mode.FULL_DUPLEX, RequestBody.FULL_DUPLEX),
)
"""Envoy's way to the pods and its mode of bodies: each of either, and all that are shipped."""

_KIND: Final = "client/lists_in_a_loop"
_SETTLE_S: Final = 2.0
_ONSET_S: Final = 2.0
"""In which all attackers connect at once."""
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
    """

    connections: int
    adapters: int
    mode: Mode
    body: RequestBody
    workers: int

    def __str__(self) -> str:
        return f"{self.connections}, {self.adapters:,}, {self.mode} {self.body}, {self.workers}"

    def scenario(self, quiet_s: float, attack_s: float) -> Scenario:
        """Quiet twice, under attack once."""
        plan = Plan(
            kinds=(_KIND,),
            max_at_once=-(-self.connections // LIST_READERS),
            rate_per_s=10_000,
            # The first ones of them stay longer than the attack lasts.
            hold_s=10 * attack_s,
            num_pods=0,
        )
        # The first requests of all pay for what is cached.
        blocks = [
            Block("first", _SETTLE_S),
            Block("quiet", quiet_s),
            Block("onset", _ONSET_S, plan),
        ]
        blocks += [Block("attack", attack_s - _ONSET_S, plan), Block("settling", _SETTLE_S)]
        bootstrap = BootstrapOptions(
            mode=self.mode,
            request_body=self.body,
            allow_mode_override=self.body is RequestBody.STREAMED_STRICT,
        )
        return Scenario(
            [*blocks, Block("quiet", quiet_s)],
            bootstrap,
            workers=self.workers,
            num_pods=1,
            num_listed=self.adapters,
        )


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one case.

    Attributes:
        case: What was measured.
        result: What came of its scenario.
    """

    case: Case
    result: Result

    def seen(self, *names: str) -> Summary:
        """What honest clients saw in the blocks of these names."""
        asked = [each for each in self.result.records.asked if each.phase in names]
        return summarise([each._replace(phase="") for each in asked], "")

    @property
    def lists(self) -> dict[str, int]:
        """What the attackers got: the number of each status, and of broken answers.

        Nothing if the scenario was broken off.
        """
        tallies = [each.attack for each in self.result.phases if each.attack]
        outcomes = {name: num for tally in tallies for name, num in tally.outcomes.items()}
        return {name.removeprefix(f"{_KIND}: "): count for name, count in outcomes.items()}

    def kept(self) -> dict[str, Any]:
        """What is kept of it."""
        return {"case": asdict(self.case), "lists": self.lists, **self.result.kept()}

    def cells(self) -> list[str]:
        """The row of the table."""
        result, lists = self.result, self.lists
        quiet, steady = self.seen("quiet"), self.seen("attack")
        attack = self.seen("onset", "attack", "attack, end", "settling")
        (cores,) = (each.cores for each in result.phases if each.name == "attack")
        refused = sum(count for what, count in lists.items() if what.isdigit() and what != "200")
        ratios = [each.p99_ms / (quiet.p99_ms or math.inf) for each in (attack, steady)]
        failed = sum(each.cause != OK for each in result.records.asked)
        cut = sum(count for how, count in result.running.items() if how != OK)
        return [
            str(self.case),
            f"{len(result.records.asked):,}",
            f"{failed:,}",
            f"{cut} of {sum(result.running.values())}",
            f"{quiet.p50_ms:.1f}, {attack.p50_ms:.1f}, {steady.p50_ms:.1f}",
            f"{quiet.p99_ms:.1f}, {attack.p99_ms:.1f}, {steady.p99_ms:.1f}",
            ", ".join(f"{ratio:.1f}" for ratio in ratios),
            f"{lists.get('200', 0):,}",
            f"{refused:,}",
            f"{sum(lists.values()) - lists.get('200', 0) - refused:,}",
            *(f"{result.peak_mb[name]:.0f}" for name in _PROCESSES),
            *(f"{cores[key]:.2f}" for name in _PROCESSES for key in (name, f"{name} waits")),
            f"{cores['attackers']:.2f}",
        ]


def table(rows: Sequence[Row]) -> str:
    """The table; the first column tells the case."""
    header = ["connections, adapters, way, workers", "honest", "failed", "running cut"]
    header += ["p50 ms: quiet, attack, later", "p99 ms", "p99 x", "lists", "refused", "broken"]
    header += ["router MB", "Envoy MB", "cores: router", "waits", "Envoy", "waits", "attackers"]
    lines = [render_table(header, [row.cells() for row in rows if row.result.peak_mb])]
    for row in rows:
        if row.result.faults or row.result.abuse:
            found = f"{row.result.faults}; limits passed {row.result.abuse}"
            lines.append(f"{row.case}: {found}; lists {row.lists}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; the exit status is 1 where an honest client was harmed."""
    args = _parse(arguments)
    rows = []
    try:
        machine = describe()
        for case in _cases(args):
            rows.append(Row(case, run(case.scenario(args.quiet_s, args.attack_s))))
            print(f"{case}: {'HARMED' if rows[-1].result.faults else 'held'}", file=sys.stderr)
    except (StackError, OSError, TimeoutError) as error:
        print(f"bench-lists: {error}", file=sys.stderr)
        return 1
    print(table(rows))
    keep("lists", args, machine, {"rows": [row.kept() for row in rows]})
    return 1 if any(row.result.faults for row in rows) else 0


def _cases(args: argparse.Namespace) -> list[Case]:
    if args.quick:
        return [Case(400, 2000, Mode.ORIGINAL_DST, RequestBody.BUFFERED, 1)]
    every = product(args.connections, args.adapters, args.ways, args.workers)
    return [Case(num, listed, mode, body, threads) for num, listed, (mode, body), threads in every]


def _way(text: str) -> tuple[Mode, RequestBody]:
    mode, _, body = text.partition("/")
    return Mode(mode), RequestBody(body)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    options = parser("lists", __doc__)
    add = options.add_argument
    add("--connections", type=int, nargs="+", default=(400, 1200), help="that read lists")
    add("--adapters", type=int, nargs="+", default=(2000, 10_000), help="that a pod lists")
    ways = " ".join(f"{mode}/{body}" for mode, body in WAYS)
    add("--ways", type=_way, nargs="+", default=WAYS, metavar="MODE/BODY", help=ways)
    add("--workers", type=int, nargs="+", default=(1, 4), help="Envoy's threads")
    add("--quiet-s", type=float, default=4.0, help="before and after the attack")
    add("--attack-s", type=float, default=10.0, help=f"more than {_ONSET_S:g}")
    return options.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
