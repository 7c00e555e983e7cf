"""From raw measurements to figures: pure functions of values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median


def net_us_per_request(
    used_s: float, idle_cores: float, elapsed_s: float, num_requests: int
) -> float | None:
    """CPU microseconds per request beyond what the process uses idle; None without requests."""
    if num_requests == 0:
        return None
    return (used_s - idle_cores * elapsed_s) / num_requests * 1e6


def medians(rounds: Iterable[Mapping[str, float | None]]) -> dict[str, float | None]:
    """The median of each name over rounds; None where no round has it."""
    found: dict[str, list[float]] = {}
    for each in rounds:
        for name, value in each.items():
            values = found.setdefault(name, [])
            if value is not None:
                values.append(value)
    return {name: median(values) if values else None for name, values in found.items()}


def ratio(value: float | None, reference: float | None) -> float | None:
    """`value` over `reference`; None where either is missing or the reference is not positive."""
    if value is None or reference is None or reference <= 0:
        return None
    return value / reference


def minus(value: float | None, base: float | None) -> float | None:
    """The difference; None where either is missing."""
    return None if value is None or base is None else value - base


def parse_counters(page: str) -> dict[str, float]:
    """Samples of a page in the Prometheus text format, by name and labels as written."""
    samples = (line.rsplit(" ", 1) for line in page.splitlines() if line and line[0] != "#")
    return {name: float(value) for name, value in samples}


def total(samples: Mapping[str, float], name: str) -> float:
    """The sum over all label sets of one metric."""
    return sum(v for key, v in samples.items() if key == name or key.startswith(name + "{"))


def by_label(samples: Mapping[str, float], name: str, label: str) -> dict[str, int]:
    """Counts of a metric with this one label, by the label's value."""
    prefix = f'{name}{{{label}="'
    return {
        key.removeprefix(prefix).removesuffix('"}'): int(value)
        for key, value in samples.items()
        if key.startswith(prefix)
    }


def abuse_of(samples: Mapping[str, float]) -> dict[str, int]:
    """How often each limit of the wire was passed; those that were not do not appear."""
    counts = by_label(samples, "extproc_wire_abuse_total", "limit")
    return {limit: count for limit, count in counts.items() if count}


def render_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with padded columns, the first one to the left."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        first, *rest = (cell for cell in cells)
        padded = [first.ljust(widths[0])]
        padded += [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        return f"| {' | '.join(padded)} |"

    marks = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([line(header), line(marks), *map(line, rows)])
