"""A load test's summary in words."""

from __future__ import annotations

from extproc.lab.loadtest.measures import LoadSummary
from extproc.lab.loadtest.replay import MAX_MEDIAN_DELAY_S


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
