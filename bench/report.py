"""Tables for people, JSON for machines, and which machine it was."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.figures import minus, ratio, render_table
from bench.processes import raise_file_limit, require
from extproc.stack.processes import StackError
from extproc.stack.stack import find_envoy

Figures = Mapping[str, float | None]

_FOLDER = Path(__file__).parent
_BUSY = 0.3
"""Load per core before the start from which on figures say more about the rest than about us."""
_NAMES = {"none": "no ext_proc", "empty": "empty grpc.aio"}
_AT_REST = {
    "cores, pages that stay": "idle/quiet_cores",
    "cores, pages that change": "idle/busy_cores",
    "VmRSS, MB": "memory/rss_mb",
    "VmHWM, MB": "memory/peak_mb",
    "requests held": "held/requests",
    "ms between two scrapes in the end": "scrapes/ms_between",
}

# ---- `bench.run`


def ratios(medians: Mapping[str, Figures]) -> dict[str, dict[str, float | None]]:
    """Every figure over the empty server's of the same run; latencies less those without."""
    empty, none = medians.get("empty", {}), medians.get("none", {})
    return {
        column: {
            name: ratio(_added(name, value, none), _added(name, empty.get(name), none))
            for name, value in figures.items()
        }
        for column, figures in medians.items()
        if column not in ("none", "empty")
    }


def _added(name: str, value: float | None, none: Figures) -> float | None:
    """A latency less the one without ext_proc; other figures as they are."""
    return minus(value, none.get(name)) if name.endswith("_ms") else value


def render(machine: Mapping[str, Any], cells: Sequence[str], medians: Mapping[str, Figures]) -> str:
    """The tables: each column's medians of every cell."""
    what = ", ".join(f"{name} {value}" for name, value in machine.items() if name != "cpu")
    parts = [f"{machine['cpu']}: {what}"]
    header = ["", *(_NAMES.get(column, column) for column in medians)]
    for title, rows in _sections(cells):
        parts.append(f"{title} (in brackets: times the empty grpc.aio server)")
        lines = [[label, *_cells(medians, name)] for label, name in rows.items()]
        parts.append(render_table(header, lines))
    return "\n\n".join(parts)


def _sections(cells: Sequence[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """The title of each table, and the name of each row's figure."""
    saturated = [cell for cell in cells if cell.endswith("@max")]
    percentiles = [(c, which) for c in cells if c not in saturated for which in ("p50", "p99")]
    per_request = "us per request"
    yield (
        f"ext_proc server, CPU {per_request}, net of its idle cost",
        {cell: f"{cell}/server_us_per_request" for cell in cells},
    )
    yield f"Envoy, CPU {per_request}", {cell: f"{cell}/envoy_us_per_request" for cell in cells}
    yield "Requests per second at saturation", {c: f"{c}/requests_per_s" for c in saturated}
    yield (
        "Latency, ms: without ext_proc, and what is added to it",
        {f"{cell} {which}": f"{cell}/{which}_ms" for cell, which in percentiles},
    )
    yield "ext_proc server at rest, and its memory after all cells", _AT_REST


def _cells(medians: Mapping[str, Figures], name: str) -> Iterator[str]:
    """A figure of each column, and its ratio."""
    form = "{:.3f}" if name.endswith("cores") else "{:.2f}" if name.endswith("_ms") else "{:.0f}"
    none, over = medians.get("none", {}), ratios(medians)
    for column, figures in medians.items():
        value = figures.get(name)
        if column != "none":
            value = _added(name, value, none)
        text, times = "-" if value is None else form.format(value), over.get(column, {}).get(name)
        yield text if times is None else f"{text} ({times:.2f})"


# ---- all benchmarks


def parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """A benchmark's options: those that all have."""
    made = argparse.ArgumentParser(
        prog=f"python -m bench.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--quick", action="store_true", help="few and short: a look only")
    made.add_argument("--out", help="JSON file (default: bench/results/...DATE-machine.json)")
    return made


def parsed(
    options: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    *,
    usual: Mapping[str, Any],
    quick: Mapping[str, Any],
) -> argparse.Namespace:
    """Parse a command line; what it leaves out is as usual, or as in a quick look."""
    is_quick = options.parse_known_args(arguments)[0].quick
    options.set_defaults(**(quick if is_quick else usual))
    return options.parse_args(arguments)


@contextmanager
def measuring(name: str, *tools: str) -> Iterator[dict[str, Any]]:
    """Measure on a machine that has Envoy and these load generators: which machine it is.

    Raises:
        SystemExit: Something is missing, did not start or failed, and that is said.
    """
    try:
        require(*tools)
        raise_file_limit()
        yield describe()
    except StackError as error:
        print(f"{name}: {error}", file=sys.stderr)
        raise SystemExit(1) from error


def keep(kind: str, args: argparse.Namespace, machine: dict[str, Any], results: Any) -> None:
    """Write a result and how it was asked for, to `--out` or where results go, and say where.

    A quick look goes among what is not kept. Four significant digits are more than the machine's
    noise.
    """
    words = re.sub(r"[^a-z0-9]+", "-", str(machine["cpu"]).lower()).strip("-")
    name = f"{time.strftime('%Y-%m-%d')}-{words}-{machine['cores']}-cores.json"
    folder = _FOLDER / ("out" if args.quick else "results")
    path = Path(args.out or folder / (f"{kind}-{name}" if kind else name))
    called = {key: value for key, value in vars(args).items() if key not in ("out", "other")}
    document = {"machine": machine, "options": called, **results}
    text = json.dumps(document, default=str)
    rounded = json.loads(text, parse_float=lambda number: float(f"{float(number):.4g}"))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rounded, indent=1) + "\n")
    print(f"\n{path}", file=sys.stderr)


def describe() -> dict[str, Any]:
    """CPU model, cores, memory, and the versions that matter. Warns if others use the machine."""
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load > _BUSY * cores:
        print(f"the machine is busy (load {load:.1f}): do not trust the figures", file=sys.stderr)
    models = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    envoy = subprocess.run([find_envoy(), "--version"], capture_output=True, text=True, check=True)
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": cores,
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30),
        "kernel": platform.release().partition("-")[0],
        "python": platform.python_version(),
        "grpcio": version("grpcio"),
        "uvloop": version("uvloop"),
        "envoy": "".join(re.findall(r"/(\d+\.\d+\.\d+)/", envoy.stdout)[:1]) or "unknown",
        "load_1min_at_start": round(load, 2),
    }
