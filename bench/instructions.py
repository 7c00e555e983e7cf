"""What a request costs in the router, stage by stage: instructions, and CPU time.

Recorded bytes of a real Envoy go through the router's real objects, without sockets and with a
clock of their own; callgrind counts. Instructions hardly differ from run to run, whatever else the
machine does; CPU time is the least of several turns.

Or, with `--prices`, the price of each thing that is on by default: what a request and its log entry
cost with it, and without. Each is off alone: by its setting, or where there is none by a stub.
Requests have to be many and alike for differences this small, so CPU time is of less use here.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

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
    ("a decision that a policy in shadow is asked about", {"shadow": 1}),
)
"""Each stage, as a sum of measures. What a checkout lacks counts as nothing there, and where it is
called from instead."""


ALL: Final = "all on"
THINGS: Final[Mapping[str, Mapping[str, Any]]] = {
    "nothing: the noise": {},
    "alternates": {"router": {"destination": {"num_alternates": 0}}},
    "outliers": {"router": {"outliers": {"enabled": False}}},
    "decisions": {"without": ["decisions"]},
    "decisions kept": {"router": {"admin": {"max_decisions": 0}}},
    "metrics by adapter": {"router": {"admin": {"max_adapter_labels": 0}}},
    "metrics of requests": {"without": ["telemetry"]},
    "attainment": {"without": ["attainment"]},
    "learned costs": {"without": ["speeds"]},
    "beginnings of prompts": {"without": ["prefixes"]},
    "turns of tenants": {"router": {"queue": {"fair": False}}},
    "least_harm instead of founding": {"router": {"policy": {"name": "founding"}}},
}
"""What is off in each: settings of the router, and stubs."""
_PRICED: Final = ("request", "later", "log")


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


def price_table(kinds: Mapping[str, Amounts]) -> str:
    """Return the table: for each kind of cost what each thing takes of it, and its share."""
    header, rows = ["off alone"], [[ALL], *([name] for name in THINGS)]
    for unit, found in kinds.items():
        header += [unit, "%"]
        all_on = _sum(found, ALL)
        assert all_on is not None
        rows[0] += [f"{all_on:.1f}", "100.0"]
        for row, name in zip(rows[1:], THINGS, strict=True):
            without = _sum(found, name)
            price = None if without is None else all_on - without
            row += ["-", "-"] if price is None else [f"{price:.1f}", f"{100 * price / all_on:.1f}"]
    return render_table(header, rows)


def _sum(found: Amounts, load: str) -> float | None:
    """Return what a request costs; None where the checkout lacks what is to be put aside."""
    values = [found[load, measure] for measure in _PRICED]
    return None if None in values else sum(value or 0.0 for value in values)


def _kinds(
    args: argparse.Namespace, plan: Plan, *compared: Path
) -> Iterator[tuple[str, list[Amounts]]]:
    if not args.cpu_only and checkouts.has_valgrind():
        yield "thousand instructions", [checkouts.instructions(each, plan) for each in compared]
    rounds = [[checkouts.cpu_us(each, plan) for each in compared] for _ in range(args.rounds)]
    yield "CPU us", [checkouts.least(each) for each in zip(*rounds, strict=True)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    args = _parse(arguments)
    try:
        for table_of_load in _prices(args) if args.prices else _stages(args):
            print(table_of_load, end="\n\n", flush=True)
    except StackError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    return 0


def _stages(args: argparse.Namespace) -> Iterator[str]:
    loads = {
        f"{policy}, {body_bytes} B": {
            **_load(args, body_bytes),
            "router": {"policy": {"name": policy}},
        }
        for body_bytes in args.bodies
        for policy in args.policies
    }
    compared = [HERE] if args.other is None else [args.other, HERE]
    kinds = list(_kinds(args, _plan(args, loads, MEASURES), *compared))
    yield from (table(load, kinds) for load in loads)


def _prices(args: argparse.Namespace) -> Iterator[str]:
    for body_bytes in args.bodies:
        common = _load(args, body_bytes)
        loads = {name: {**common, **off} for name, off in {ALL: {}, **THINGS}.items()}
        kinds = _kinds(args, _plan(args, loads, _PRICED), args.other or HERE)
        priced = price_table({unit: found for unit, [found] in kinds})
        yield f"{body_bytes:,} B, {args.pods} pods\n\n{priced}"


def _load(args: argparse.Namespace, body_bytes: int) -> dict[str, Any]:
    return {"num_pods": args.pods, "num_adapters": args.adapters, "body_bytes": body_bytes}


def _plan(args: argparse.Namespace, loads: dict[str, Any], measures: Iterable[str]) -> Plan:
    return Plan(loads, list(measures), args.requests, args.turns)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.instructions", description=__doc__)
    add = parser.add_argument
    add("--other", type=Path, metavar="CHECKOUT", help="another one's router, beside ours")
    add("--prices", action="store_true", help="the price of each default, not the stages")
    add("--policies", nargs="+", default=["least_harm", "founding"], help="of the stages")
    add("--bodies", type=int, nargs="+", help=f"(default {BODY_BYTES} 107000; prices: the first)")
    add("--rounds", type=int, default=2, help="of CPU time (default 2)")
    add("--pods", type=int, default=16, help="(default 16)")
    add("--adapters", type=int, default=64, help="(default 64)")
    add("--requests", type=int, default=64, help="a turn (default 64)")
    add("--turns", type=int, default=10, help="of CPU time in a round (default 10)")
    add("--cpu-only", action="store_true", help="count no instructions")
    args = parser.parse_args(arguments)
    args.bodies = args.bodies or ([BODY_BYTES] if args.prices else [BODY_BYTES, 107_000])
    return args


if __name__ == "__main__":
    sys.exit(main())
