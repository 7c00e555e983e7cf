"""What a request and rest cost one of many routers, with many pods: `make bench-scale`.

A real router behind a real Envoy. One process plays its pods and the other routers (`bench.crowd`):
each pod has five requests that run, one of this router and four of others where there are any, and
a page that says so. Each router gets as many requests a second, so that ten routers get ten times
as many; links are those of routers that share a key. Latency is what comes on top of an Envoy's
without a router.

A cell's figures are medians of rounds. Rest is what a router takes with all that and no requests.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.crowd import Plan
from bench.figures import medians, minus, render_table
from bench.report import keep, measuring, parsed, parser
from bench.run import KEEPS_UP, ROUTER, SMALL_BYTES, Cell, measure_column
from bench.stack import StackOptions, Variant
from extproc.stack.processes import StackError

PODS, ROUTERS = (16, 100, 1_000), (1, 2, 10)
Figures = Mapping[str, float | None]


def measure(num_routers: int, plan: Plan, args: argparse.Namespace, other: Path | None) -> Figures:
    """Return the figures of one router of so many; 0: of an Envoy without one.

    Raises:
        StackError: Something did not start, requests failed, or routers did not hear each other.
    """
    num_peers = plan.num_peers
    variant = Variant.OTHER if other else Variant.WIRE
    options = StackOptions(
        variant if num_routers else Variant.NONE, plan, router=ROUTER, other=other
    )
    cell = Cell(SMALL_BYTES, args.rate)
    found = measure_column(options, [cell], args.seconds)
    if num_peers and not found["told/in_flight"]:
        raise StackError(f"nothing was told by {num_peers} other routers")
    picks_per_s = (found.get("idle/busy_picks_per_s") or 0.0) / max(1, num_peers)
    if num_peers and picks_per_s < args.rate * KEEPS_UP:
        print(f"  behind: {picks_per_s:.0f} of {args.rate:g}/s of each other", file=sys.stderr)
    return {name.removeprefix(f"{cell.name}/"): value for name, value in found.items()}


HEADER = (
    "CPU us a request",
    "with rest",
    "added p50, ms",
    "p99",
    "cores at rest",
    "MB",
    "KB/s in, a link",
    "out",
    "pages/s of a pod to all, at rest",
    "with requests",
)


def cells(figures: Figures, without: Figures, num_routers: int, plan: Plan) -> list[str]:
    """Return a case's cells, in the order of `HEADER`."""

    def of(name: str, times: float = 1.0) -> float | None:
        value = figures.get(name)
        return None if value is None else value * times

    net, rest = of("server_us_per_request"), of("idle/busy_cores")
    a_link, a_pod = 1e-3 / max(1, plan.num_peers), num_routers / plan.num_pods
    values = [
        ("{:.0f}", net),
        ("{:.0f}", None if net is None or rest is None else net + rest / plan.rate_per_s * 1e6),
        ("{:.2f}", minus(of("p50_ms"), without.get("p50_ms"))),
        ("{:.2f}", minus(of("p99_ms"), without.get("p99_ms"))),
        ("{:.3f}", rest),
        ("{:.0f}", of("memory/rss_mb")),
        ("{:.1f}", of("told_bytes_per_s", a_link)),
        ("{:.1f}", of("heard_bytes_per_s", a_link)),
        ("{:.2f}", of("idle/busy_pages_per_s", a_pod)),
        ("{:.2f}", of("pages_per_s", a_pod)),
    ]
    return ["-" if value is None else form.format(value) for form, value in values]


Case = tuple[int, int]
"""Pods and routers."""


def _round(args: argparse.Namespace, other: Path | None) -> dict[Case, Figures]:
    found = {}
    for num_pods in args.pods:
        for num_routers in (0, *args.routers):
            print(f"  {num_pods} pods, {num_routers} routers", file=sys.stderr)
            plan = _plan(num_pods, num_routers, args)
            found[num_pods, num_routers] = measure(num_routers, plan, args, other)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    args = _parse(arguments)
    checkouts = {"": None} if args.other is None else {"": None, " other": args.other}
    rounds: dict[str, list[dict[Case, Figures]]] = {who: [] for who in checkouts}
    with measuring("bench-scale", "wrk") as machine:
        for number in range(args.rounds):
            for who, other in checkouts.items():
                print(f"round {number + 1} of {args.rounds}{who}", file=sys.stderr)
                rounds[who].append(_round(args, other))
    rows, kept = [], {}
    for who, some in rounds.items():
        found = {case: medians(each[case] for each in some) for case in some[0]}
        kept[f"cases{who}".replace(" ", "_")] = [
            {"pods": pods, "routers": routers, **each} for (pods, routers), each in found.items()
        ]
        rows += [
            [f"{pods:,} x {num}{who}", *cells(each, found[pods, 0], num, _plan(pods, num, args))]
            for (pods, num), each in found.items()
            if num
        ]
    print(render_table(["pods x routers", *HEADER], rows))
    keep("scale", args, machine, kept)
    return 0


def _plan(num_pods: int, num_routers: int, args: argparse.Namespace) -> Plan:
    return Plan(num_pods, args.adapters, max(0, num_routers - 1), args.rate)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    options = parser("scale", __doc__)
    add = options.add_argument
    add("--pods", type=int, nargs="+", metavar="N", help="(default 16 100 1000)")
    add("--routers", type=int, nargs="+", metavar="N", help="(default 1 2 10)")
    add("--rate", type=float, default=200.0, help="requests a second of each router (default 200)")
    add("--adapters", type=int, default=64, help="on each pod (default 64)")
    add("--seconds", type=float, help="of load in each case (default 10)")
    add("--rounds", type=int, help="(default 3)")
    add("--other", type=Path, metavar="CHECKOUT", help="its routers too, in each round")
    return parsed(
        *(options, arguments),
        usual={"pods": PODS, "routers": ROUTERS, "seconds": 10.0, "rounds": 3},
        quick={"pods": PODS[:2], "routers": (1, 10), "seconds": 2.0, "rounds": 1},
    )


if __name__ == "__main__":
    sys.exit(main())
