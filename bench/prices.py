"""The price of each thing that is on by default: what a request costs with it, and without.

As `bench.instructions` measures it, with its log entry; each is off alone: by its setting, or where
there is none by a stub (`bench.stubs`). Requests have to be many and alike for differences this
small, so CPU time is of less use here than instructions.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from bench import checkouts
from bench.checkouts import HERE, Amounts
from bench.figures import render_table
from bench.recording import BODY_BYTES
from bench.stages import Plan
from extproc.stack.processes import StackError

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
_MEASURES: Final = ("request", "later", "log")


def table(kinds: Mapping[str, Amounts]) -> str:
    """Return a table: for each kind of cost what each thing takes of it, and its share of all."""
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
    values = [found[load, measure] for measure in _MEASURES]
    return None if None in values else sum(value or 0.0 for value in values)


def _measure(checkout: Path, plan: Plan, args: argparse.Namespace) -> dict[str, Amounts]:
    kinds = {}
    if not args.cpu_only and checkouts.has_valgrind():
        counted = checkouts.instructions(checkout, plan)
        kinds["thousand instructions"] = checkouts.thousands(counted)
    kinds["CPU us"] = checkouts.cpu_us(checkout, plan)
    return kinds


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    args = _parse(arguments)
    for body_bytes in args.bodies:
        common = {"num_pods": args.pods, "num_adapters": args.adapters, "body_bytes": body_bytes}
        loads = {name: {**common, **off} for name, off in {ALL: {}, **THINGS}.items()}
        plan = Plan(loads, list(_MEASURES), args.requests, args.turns, counts_instructions=False)
        try:
            kinds = _measure(args.checkout, plan, args)
        except StackError as error:
            print(f"bench: {error}", file=sys.stderr)
            return 1
        print(f"{body_bytes:,} B, {args.pods} pods\n\n{table(kinds)}\n", flush=True)
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.prices", description=__doc__)
    parser.add_argument("--checkout", type=Path, default=HERE, help="(default: this one)")
    parser.add_argument("--bodies", type=int, nargs="+", default=[BODY_BYTES])
    checkouts.add_options(parser, turns=20)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
