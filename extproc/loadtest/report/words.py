"""A load test's summary as a table and in words."""

from __future__ import annotations

import msgspec
from rich.console import Console
from rich.table import Table

from extproc.loadtest.measures import LoadSummary
from extproc.loadtest.replay import MAX_MEDIAN_DELAY_S


def print_summary(summary: LoadSummary, console: Console) -> None:
    """Print a load test, and whether its generator kept up."""
    console.print(
        f"{summary.num_requests} requests in {summary.duration_s:.1f} s: "
        f"{summary.offered_rps:.1f}/s offered, {summary.throughput_rps:.1f}/s finished, "
        f"{summary.output_tokens_per_s:.0f} tokens/s",
        highlight=False,
    )
    console.print(
        f"served well {summary.attainment:.1%}, satisfaction {summary.satisfaction:.3f}; "
        f"{error_words(summary)}",
        highlight=False,
    )
    table = Table()
    for head in ("ms", "mean", "p50", "p90", "p95", "p99", "max"):
        table.add_column(head, justify="left" if head == "ms" else "right")
    rows = {
        "first token": summary.ttft_s,
        "per token": summary.tpot_s,
        "between pieces": summary.gap_s,
        "whole response": summary.e2e_s,
        "sent late": summary.delay_s,
    }
    for name, values in rows.items():
        table.add_row(name, *(f"{1e3 * value:.1f}" for value in msgspec.structs.astuple(values)))
    console.print(table)
    console.print(delay_words(summary), style="red" if summary.has_lagged else "", highlight=False)


def error_words(summary: LoadSummary) -> str:
    """Return the failures in words."""
    if not summary.errors:
        return "no errors"
    kinds = ", ".join(f"{count} {kind}" for kind, count in summary.errors.items())
    return f"{sum(summary.errors.values())} of {summary.num_requests} failed: {kinds}"


def delay_words(summary: LoadSummary) -> str:
    """Return in words whether the generator kept up."""
    delay = summary.delay_s
    late = (
        f"the median request was sent {1e3 * delay.p50:.1f} ms late, the 99th percentile "
        f"{1e3 * delay.p99:.1f} ms"
    )
    if summary.has_lagged:
        return (
            f"THE GENERATOR LAGGED: {late}; over {1e3 * MAX_MEDIAN_DELAY_S:g} ms the load is not "
            "the one that was asked for, and these figures are not to be trusted"
        )
    return f"the generator kept up: {late}"
