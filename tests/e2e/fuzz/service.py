"""A whole service under attack: `make fuzz-service`.

A scenario with random hostile clients, pods and watchers, who attack by asymmetry: their rate and
their volume are bounded, so that the machine can carry them. Every honest request must succeed.
Blocks without attack stand between those with it, on the same processes and in the same hour.

The exit status is 1 where an honest request failed, a running answer was cut, a process died, the
router passed its memory, counts did not add up, p99 more than doubled (the median over the blocks,
each beside the quiet one before it), or the router's event loop was late by more than
`MAX_DELAY_MS`. The last two want a machine that nobody else uses.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Final

from bench.report import describe, keep, parser
from extproc.envoy.bootstrap import BootstrapOptions, Mode, RequestBody
from extproc.stack.processes import StackError
from tests.e2e.fuzz.attack import Plan, choices
from tests.e2e.fuzz.outcome import render
from tests.e2e.fuzz.scenario import Block, Scenario, run

MAX_P99_RATIO: Final = 2.0
MAX_DELAY_MS: Final = 100.0
"""Of the router's event loop, at the 99th percentile of a block: its longest passes."""
BLOCKS_S: Final = 1260.0
QUICK_S: Final = 45.0
_QUIET_PART: Final = 0.3
_SETTLE_S: Final = 3.0
"""After an attack, before quiet is measured; honest requests fail no more than ever in it."""


def blocks(num: int, quiet_s: float, attack_s: float, plan: Plan) -> list[Block]:
    """Quiet, attack, rest, as often; the attackers of block N have the plan's seed + N."""
    return [
        block
        for n in range(1, num + 1)
        for block in (
            Block(f"quiet {n}", quiet_s),
            Block(f"attack {n}", attack_s, replace(plan, seed=plan.seed + n)),
            Block(f"settling {n}", _SETTLE_S),
        )
    ]


def scenario(args: argparse.Namespace) -> Scenario:
    """As it was asked for."""
    plan = Plan(
        seed=args.seed,
        rate_per_s=args.rate,
        max_at_once=args.attackers,
        bytes_per_s=args.mb_per_s * 1e6,
        hold_s=5.0 if args.quick else 20.0,
        num_pods=args.pods_each,
        kinds=tuple(args.kinds),
    )
    num = 1 if args.quick else args.blocks
    block_s = (args.duration_s or (QUICK_S if args.quick else BLOCKS_S)) / num
    quiet_s = _QUIET_PART * block_s
    return Scenario(
        blocks(num, quiet_s, block_s - quiet_s, plan),
        BootstrapOptions(mode=args.mode, request_body=args.body),
        seed=args.seed,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it and judge."""
    args = _parse(arguments)
    print(f"seed {args.seed}", flush=True)
    try:
        choices(args.kinds)
        machine = describe()
        result = run(scenario(args))
    except (StackError, ValueError, OSError) as error:
        print(f"fuzz-service: {error}", file=sys.stderr)
        return 1
    print(render(result))
    keep("fuzz-service", args, machine, asdict(result))
    late_ms = result.most("delay p99 ms", under_attack=True)
    is_slow = result.slowdown > MAX_P99_RATIO or late_ms > MAX_DELAY_MS
    return 1 if result.faults or is_slow else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    options, plain = parser("fuzz", __doc__), Plan()
    add = options.add_argument
    add("--duration-s", type=float, help="of all blocks; 30 %% quiet (default 1260)")
    add("--blocks", type=int, default=3, help="pairs of quiet and attack")
    add("--seed", type=int, default=plain.seed)
    add("--mode", type=Mode, default=Mode.ORIGINAL_DST, choices=list(Mode))
    add("--body", type=RequestBody, choices=list(RequestBody), help="how bodies come to the router")
    add("--rate", type=float, default=plain.rate_per_s, help="attacks begun a second")
    add("--attackers", type=int, default=plain.max_at_once, help="at one time, at most")
    add("--mb-per-s", type=float, default=plain.bytes_per_s / 1e6, help="of all of them")
    add("--pods-each", type=int, default=plain.num_pods, help="hostile pods of each kind")
    add("--kinds", nargs="*", default=(), metavar="SIDE/KIND", help="these only")
    return options.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
