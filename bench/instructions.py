"""What a request costs in the router, stage by stage: instructions, and CPU time.

Recorded bytes of a real Envoy go through the router's real objects, without sockets and with a
clock of their own; callgrind counts. Instructions hardly differ from run to run, whatever else the
machine does; CPU time is the least of several turns.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from bench import checkouts
from bench.checkouts import HERE, Amounts
from bench.figures import render_table
from bench.recording import BODY_BYTES
from bench.stages import MEASURES, Plan
from extproc.stack.processes import StackError

STAGES: Final[tuple[tuple[str, dict[str, int]], ...]] = (
    ("wire: HTTP/2 and gRPC, in and out", {"request": 1, "session": -1, "calls": 1}),
    ("decode", {"decode": 1}),
    (
        "stream",
        {"session": 1, "calls": -1, "decode": -1, "encode": -1, "route": -1, "observers": -1},
    ),
    ("route: the decision", {"route": 1, "start": -1}),
    ("count: the pick in flight", {"start": 1}),
    ("observers", {"observers": 1}),
    ("encode", {"encode": 1}),
    ("later, when the loop comes to it", {"later": 1}),
    ("log entry: wire", {"log": 1, "log read": -1}),
    ("log entry: read", {"log read": 1, "log ended": -1}),
    ("log entry: the end counted", {"finish": 1}),
    ("log entry: judged, learned from", {"log ended": 1, "finish": -1, "log observers": -1}),
    ("log entry: observers", {"log observers": 1}),
    ("**request and its log entry**", {"request": 1, "later": 1, "log": 1}),
    ("a pod's page that has changed: read", {"parse": 1}),
    ("a pod's page: recorded", {"report": 1}),
)
"""Each stage, as a sum of measures. What a checkout lacks counts as nothing there, and where it is
called from instead."""


def amount(found: Amounts, load: str, terms: dict[str, int]) -> float | None:
    """Return what a stage costs; None if nothing of it was measured."""
    values = [(sign, found.get((load, name))) for name, sign in terms.items()]
    there = [sign * value for sign, value in values if value is not None]
    first = values[0][1]
    return None if first is None else sum(there)


def table(load: str, kinds: Sequence[tuple[str, list[Amounts]]]) -> str:
    """Return the table of one load: for each kind of cost our column, and the other's and ours."""
    header, rows = [load], [[name] for name, _ in STAGES]
    for unit, checkouts_found in kinds:
        names = [unit] if len(checkouts_found) == 1 else [f"{unit}, other", f"{unit}, this", ""]
        header += names
        for row, (_, terms) in zip(rows, STAGES, strict=True):
            values = [amount(found, load, terms) for found in checkouts_found]
            row += ["-" if value is None else f"{value:.1f}" for value in values]
            if len(values) == 2:
                before, after = values
                row.append(f"{after / before:.2f}" if before and after is not None else "-")
    return render_table(header, rows)


def _kinds(args: argparse.Namespace, plan: Plan) -> Iterator[tuple[str, list[Amounts]]]:
    compared = [HERE] if args.other is None else [args.other, HERE]
    if not args.cpu_only and checkouts.has_valgrind():
        counted = [checkouts.instructions(checkout, plan) for checkout in compared]
        yield "thousand instructions", [checkouts.thousands(each) for each in counted]
    least = [checkouts.cpu_us(checkout, plan) for checkout in compared]
    for _ in range(args.rounds - 1):
        again = [checkouts.cpu_us(checkout, plan) for checkout in compared]
        least = [checkouts.least(*pair) for pair in zip(least, again, strict=True)]
    yield "CPU us", least


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    args = _parse(arguments)
    loads = {
        f"{policy}, {body_bytes} B": {
            "num_pods": args.pods,
            "num_adapters": args.adapters,
            "body_bytes": body_bytes,
            "router": {"policy": {"name": policy}},
        }
        for body_bytes in args.bodies
        for policy in args.policies
    }
    plan = Plan(loads, list(MEASURES), args.requests, args.turns, counts_instructions=False)
    try:
        kinds = list(_kinds(args, plan))
    except StackError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    for load in loads:
        print(table(load, kinds), end="\n\n")
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.instructions", description=__doc__)
    parser.add_argument(
        "--other", type=Path, metavar="CHECKOUT", help="another one's router, measured beside ours"
    )
    parser.add_argument("--policies", nargs="+", default=["least_harm", "founding"])
    parser.add_argument("--bodies", type=int, nargs="+", default=[BODY_BYTES, 107_000])
    parser.add_argument("--rounds", type=int, default=2, help="of CPU time (default 2)")
    checkouts.add_options(parser, turns=10)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
