"""The cost of a request in the router, in an empty ext_proc server and without: `make bench`.

Every column runs every cell (a load and a body size), one column after the other, and all of it
again in each round; the figures are medians of rounds. So what the machine does beside it in the
meantime falls on all of them. Only ratios within one run mean anything on another machine.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.crowd import Plan
from bench.figures import medians, net_us_per_request, total
from bench.load import Wrk
from bench.processes import cpu_s, memory
from bench.report import keep, measuring, parsed, parser, ratios, render
from bench.stack import Stack, StackOptions, Variant, running
from extproc.stack.processes import ChildProcess, StackError
from extproc.stack.stack import ServeProcess

SMALL_BYTES, MIDDLE_BYTES, LARGE_BYTES, HUGE_BYTES = 308, 16_000, 107_000, 1_000_000
_SETTLE_S = 2.0  # until the first scrapes and the registration of models are over
KEEPS_UP = 0.97  # of the wanted rate
_WARM_UP_S, _IDLE_S = 1.0, 4.0
ROUTER = {"pods": {"prefill_tokens_per_s": 100_000_000, "max_in_flight": 1_000}}
"""No prompt is believed to take long, and no pod to be full: a request that is held costs more, and
how many are would differ from column to column."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One load.

    Attributes:
        body_bytes: Length of each request's body.
        rate_per_s: Requests a second; None for as many as are answered.
    """

    body_bytes: int
    rate_per_s: float | None

    @property
    def name(self) -> str:
        """The name in tables and JSON, e.g. `308B@300`."""
        rate = "max" if self.rate_per_s is None else f"{self.rate_per_s:g}"
        return f"{self.body_bytes}B@{rate}"


CELLS = tuple(
    Cell(body_bytes, rate)
    for body_bytes, rates in (
        (SMALL_BYTES, (None, 300, 1000)),
        (MIDDLE_BYTES, (None, 300)),
        (LARGE_BYTES, (None, 300, 1000)),
        (HUGE_BYTES, (None, 30)),
    )
    for rate in rates
)
_USUAL = ("308B@max", "308B@300", "308B@1000", "16000B@300", "107000B@max", "107000B@300")
USUAL_CELLS = (*_USUAL, "1000000B@30")
AIMS_CELLS = ("308B@max", "308B@300", "308B@1000", "107000B@300")


@dataclass(frozen=True, slots=True)
class Column:
    """What is behind Envoy's ext_proc filter.

    Attributes:
        policy: The router's; empty for none.
        python: What runs the router.
        is_compiled: With its compiler on.
    """

    variant: Variant
    policy: str = ""
    python: str = sys.executable
    is_compiled: bool = False


COLUMNS = {
    "none": Column(Variant.NONE),
    "empty": Column(Variant.EMPTY),
    "founding": Column(Variant.WIRE, "founding"),
    "least_harm": Column(Variant.WIRE, "least_harm"),
    "other founding": Column(Variant.OTHER, "founding"),
    "other least_harm": Column(Variant.OTHER, "least_harm"),
}
"""By name, as the tables have them; beside them `least_harm` under each of `--pythons`."""


def measure_column(
    options: StackOptions, cells: Sequence[Cell], cell_s: float
) -> dict[str, float | None]:
    """Start one column and run every cell for so long: figures by name, `cell/figure`.

    Raises:
        StackError: Something did not start, or requests failed.
    """
    with running(options) as stack:
        time.sleep(_SETTLE_S)
        quiet = _at_rest(stack)
        stack.make_busy()
        time.sleep(_SETTLE_S)
        busy = _at_rest(stack)
        figures: dict[str, float | None] = {f"idle/quiet_{name}": n for name, n in quiet.items()}
        figures |= {f"idle/busy_{name}": n for name, n in busy.items()}
        for cell in cells:
            for name, value in _measure_cell(stack, cell, cell_s, busy.get("cores", 0.0)).items():
                figures[f"{cell.name}/{name}"] = value
        if stack.server is not None:
            held = memory(stack.server.pid)
            figures["memory/rss_mb"] = held.now_bytes / 1e6
            figures["memory/peak_mb"] = held.peak_bytes / 1e6
        if isinstance(stack.server, ServeProcess):
            metrics = stack.metrics()
            figures["told/in_flight"] = total(metrics, "extproc_told_in_flight")
            figures["held/requests"] = total(metrics, "extproc_waits_total")
            interval_s = metrics.get("extproc_scrape_interval_seconds")  # older ones lack it
            figures["scrapes/ms_between"] = None if interval_s is None else 1e3 * interval_s
        return figures


def _at_rest(stack: Stack) -> dict[str, float]:
    """The cores that the server takes without requests, and what others do a second meanwhile."""
    if stack.server is None:
        return {}
    began_s, before_s, before = time.monotonic(), cpu_s(stack.server.pid), stack.crowd.counts()
    time.sleep(_IDLE_S)
    used_s, elapsed_s = cpu_s(stack.server.pid) - before_s, time.monotonic() - began_s
    return {"cores": used_s / elapsed_s, **_rates(before, stack.crowd.counts(), elapsed_s)}


def _rates(
    before: Mapping[str, int], after: Mapping[str, int], elapsed_s: float
) -> dict[str, float]:
    """What grew, a second."""
    return {f"{each}_per_s": (num - before[each]) / elapsed_s for each, num in after.items() if num}


def _measure_cell(
    stack: Stack, cell: Cell, cell_s: float, idle_cores: float
) -> dict[str, float | None]:
    _load(stack, cell, _WARM_UP_S)
    programs: dict[str, ChildProcess] = {"envoy": stack.gateway}
    if stack.server is not None:
        programs["server"] = stack.server
    before = stack.crowd.counts()
    before_s = {name: cpu_s(program.pid) for name, program in programs.items()}
    began_s = time.monotonic()
    result = _load(stack, cell, cell_s)
    elapsed_s, requests = time.monotonic() - began_s, result["requests"]
    used_s = {name: cpu_s(program.pid) - before_s[name] for name, program in programs.items()}
    if result["errors"]:
        raise StackError(f"{stack.options.variant} {cell.name}: {result['errors']} failed")

    requests_per_s = 1e6 * requests / result["duration_us"]
    if cell.rate_per_s is not None and requests_per_s < cell.rate_per_s * KEEPS_UP:
        print(f"  behind: {requests_per_s:.0f} of {cell.rate_per_s:g}/s", file=sys.stderr)
    figures: dict[str, float | None] = {
        f"{name}_us_per_request": net_us_per_request(
            used, idle_cores if name == "server" else 0.0, elapsed_s, requests
        )
        for name, used in used_s.items()
    }
    return {
        **figures,
        **_rates(before, stack.crowd.counts(), elapsed_s),
        "requests_per_s": requests_per_s,
        "p50_ms": result["p50_us"] / 1e3,
        "p99_ms": result["p99_us"] / 1e3,
    }


def _load(stack: Stack, cell: Cell, duration_s: float) -> dict[str, Any]:
    return Wrk(
        stack.url,
        duration_s,
        body_bytes=cell.body_bytes,
        num_adapters=stack.options.crowd.num_adapters,
        rate_per_s=cell.rate_per_s,
    ).result()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    args = parse(arguments)
    cells = [cell for cell in CELLS if cell.name in args.cells]
    columns = COLUMNS | _under(args.pythons)
    rounds: list[dict[str, dict[str, float | None]]] = []
    with measuring("bench", "wrk") as machine:
        for number in range(args.rounds):
            rounds.append({})
            for column in args.columns:
                print(f"round {number + 1} of {args.rounds}: {column}", file=sys.stderr)
                options = _options(columns[column], args)
                rounds[-1][column] = measure_column(options, cells, args.seconds)
    found = {name: medians(each[name] for each in rounds) for name in args.columns}
    print(render(machine, args.cells, found))
    keep("", args, machine, {"medians": found, "rounds": rounds, "ratios": ratios(found)})
    return 0


def _under(pythons: Sequence[str]) -> dict[str, Column]:
    columns = {}
    for each in pythons:
        name = f"least_harm {Path(each).name}"
        columns[name] = Column(Variant.WIRE, "least_harm", each)
        if _has_compiler(each):
            columns[f"{name}+jit"] = Column(Variant.WIRE, "least_harm", each, is_compiled=True)
    return columns


def _has_compiler(python: str) -> bool:
    """Return whether a Python has a compiler to machine code, and says so (3.14 and later)."""
    ask = "import sys; sys.exit(not sys._jit.is_available())"
    try:
        return subprocess.run([python, "-c", ask], capture_output=True, check=False).returncode == 0
    except OSError:
        return False  # it fails where it is to run the router, with its error


def _options(column: Column, args: argparse.Namespace) -> StackOptions:
    return StackOptions(
        column.variant,
        Plan(args.pods, args.adapters, delay_s=args.pod_ms / 1e3),
        router={**ROUTER, "policy": {"name": column.policy}} if column.policy else {},
        other=args.other,
        python=column.python,
        env={"PYTHON_JIT": "1" if column.is_compiled else "0"},
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options."""
    options = parser("run", __doc__)
    add = options.add_argument
    add("--aims", action="store_true", help="fewer cells of 4 s: 12 minutes")
    add("--seconds", type=float, help="of load in each cell (default 6)")
    add("--rounds", type=int, help="(default 3)")
    add("--columns", nargs="+", choices=COLUMNS, metavar="COLUMN")
    add("--cells", nargs="+", choices=[c.name for c in CELLS], metavar="CELL")
    add("--pods", type=int, default=16, help="(default 16)")
    add("--adapters", type=int, default=64, help="on each pod (default 64)")
    add("--pod-ms", type=float, default=5.0, help="from a request to its answer (default 5)")
    add("--other", type=Path, metavar="CHECKOUT", help="another one's router, measured beside ours")
    add(
        "--pythons",
        nargs="+",
        default=[],
        metavar="PYTHON",
        help="least_harm under these, too, and with their compilers on",
    )
    args = parsed(options, arguments, usual={"rounds": 3}, quick={"rounds": 1})
    if args.columns is None:
        args.columns = [name for name in COLUMNS if not name.startswith("other")]
    if args.other is not None and Variant.OTHER not in [COLUMNS[c].variant for c in args.columns]:
        args.columns += [name for name in COLUMNS if name.startswith("other")]
    args.columns += _under(args.pythons)
    args.cells = args.cells or (AIMS_CELLS if args.aims else USUAL_CELLS)
    args.seconds = args.seconds or (2.0 if args.quick else 4.0 if args.aims else 6.0)
    return args


if __name__ == "__main__":
    sys.exit(main())
