"""Tables for people and JSON for machines."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any

from bench.figures import minus, ratio, render_table
from bench.machine import slug

Figures = Mapping[str, float | None]

_FOLDER = Path(__file__).parent
_NAMES = {
    "none": "no ext_proc",
    "empty": "empty grpc.aio",
}


@dataclass(frozen=True, slots=True)
class Results:
    """One run of `bench.run`.

    Attributes:
        machine: Where.
        options: How it was called.
        cells: Names, in order.
        medians: Figures by column; each the median of its rounds.
        rounds: Figures by column, round for round.
    """

    machine: Mapping[str, Any]
    options: Mapping[str, Any]
    cells: list[str]
    medians: Mapping[str, Figures]
    rounds: list[dict[str, dict[str, float | None]]]

    @property
    def ratios(self) -> dict[str, dict[str, float | None]]:
        """Every figure over the empty server's of the same run; latencies less those without."""
        empty, none = self.medians.get("empty", {}), self.medians.get("none", {})
        found: dict[str, dict[str, float | None]] = {}
        for variant, figures in self.medians.items():
            if variant in ("none", "empty"):
                continue
            found[variant] = {
                name: ratio(_added(name, value, none), _added(name, empty.get(name), none))
                for name, value in figures.items()
            }
        return found


def _added(name: str, value: float | None, none: Figures) -> float | None:
    """A latency less the one without ext_proc; other figures as they are."""
    return minus(value, none.get(name)) if name.endswith("_ms") else value


def render(results: Results) -> str:
    """The tables."""
    machine = results.machine
    what = ", ".join(f"{name} {value}" for name, value in machine.items() if name != "cpu")
    parts = [f"{machine['cpu']}: {what}", ""]
    header = ["", *(_NAMES.get(variant, variant) for variant in results.medians)]
    for title, rows in _sections(results.cells):
        parts += [f"{title} (in brackets: times the empty grpc.aio server)", ""]
        cells = [[label, *_cells(results, name)] for label, name in rows.items()]
        parts += [render_table(header, cells), ""]
    return "\n".join(parts).rstrip()


def _sections(cells: Sequence[str]) -> list[tuple[str, dict[str, str]]]:
    """The title of each table, and the name of each row's figure."""
    scheduled = [cell for cell in cells if not cell.endswith("@max")]
    saturated = [cell for cell in cells if cell.endswith("@max")]
    percentiles = [(cell, which) for cell in scheduled for which in ("p50", "p99")]
    return [
        (
            "ext_proc server, CPU us per request, net of its idle cost",
            {cell: f"{cell}/server_us_per_request" for cell in cells},
        ),
        (
            "Envoy, CPU us per request",
            {cell: f"{cell}/envoy_us_per_request" for cell in cells},
        ),
        (
            "Requests per second at saturation",
            {cell: f"{cell}/requests_per_s" for cell in saturated},
        ),
        (
            "Latency, ms: without ext_proc, and what is added to it",
            {f"{cell} {which}": f"{cell}/{which}_ms" for cell, which in percentiles},
        ),
        (
            "ext_proc server at rest, and its memory after all cells",
            {
                "cores, pages that stay": "idle/quiet_cores",
                "cores, pages that change": "idle/busy_cores",
                "VmRSS, MB": "memory/rss_mb",
                "VmHWM, MB": "memory/peak_mb",
                "requests held": "held/requests",
                "ms between two scrapes in the end": "scrapes/ms_between",
            },
        ),
    ]


def _cells(results: Results, name: str) -> list[str]:
    """A figure of each variant, and its ratio."""
    form = "{:.3f}" if name.endswith("cores") else "{:.2f}" if name.endswith("_ms") else "{:.0f}"
    none, cells = results.medians.get("none", {}), []
    for variant, figures in results.medians.items():
        value, times = figures.get(name), results.ratios.get(variant, {}).get(name)
        if variant != "none":
            value = _added(name, value, none)
        text = "-" if value is None else form.format(value)
        cells.append(text if times is None else f"{text} ({times:.2f})")
    return cells


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


def default_path(kind: str, machine: dict[str, Any], *, is_quick: bool) -> Path:
    """Where results go: a quick look among what is not kept."""
    folder = _FOLDER / ("out" if is_quick else "results")
    prefix = "" if kind == "bench" else f"{kind}-"
    return folder / f"{prefix}{time.strftime('%Y-%m-%d')}-{slug(machine)}.json"


def keep(kind: str, args: argparse.Namespace, machine: dict[str, Any], results: Any) -> None:
    """Write a result and how it was asked for, to `--out` or where results go, and say where."""
    path = args.out or default_path(kind, machine, is_quick=getattr(args, "quick", False))
    called = {key: value for key, value in vars(args).items() if key != "out"}
    write_json({"machine": machine, "options": called, **results}, path)
    print(f"\n{path}", file=sys.stderr)


def write_json(results: Any, path: Path | str) -> None:
    """Write a record; three significant digits are more than the machine's noise."""
    document = asdict(results) if is_dataclass(results) else results  # type: ignore[arg-type]
    if isinstance(results, Results):
        document["ratios"] = results.ratios
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    rounded = json.loads(json.dumps(document, default=str), parse_float=_rounded)
    target.write_text(json.dumps(rounded, indent=1) + "\n")


def _rounded(text: str) -> float:
    return float(f"{float(text):.4g}")
