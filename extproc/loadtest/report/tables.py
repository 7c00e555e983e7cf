"""The tables of a load test's page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from extproc.loadtest.measures import NOBODY, GroupSummary
from extproc.loadtest.report.agreement import MEASURES, Measure, agreement, mean_of
from extproc.loadtest.report.words import delay_words, error_words
from extproc.loadtest.results import RunResult

NUM_SHOWN = 5
"""Adapters and tenants from either end."""

_GROUP_HEADS = (
    "requests",
    "served well",
    "satisfaction",
    "first word, mean (s)",
    "median (s)",
    "99 % (s)",
    "per word (ms)",
    "failed",
    "words",
)


def scrolling(table: str) -> str:
    """A table that scrolls by itself where the screen is narrow."""
    return f'<div class="wide">{table}</div>'


def measures_table(runs: Sequence[RunResult], targets: Sequence[str]) -> str:
    """All measures at one rate: each target real and virtual, and whether the order agrees."""
    has_twins = any(run.kind == "virtual" for run in runs)
    known = [target for target in targets if _of(runs, target, "real")]
    top = "".join(
        f'<th colspan="{2 if has_twins else 1}" class="group">{escape(_short(target))}</th>'
        for target in known
    )
    second = ""
    if has_twins:
        kinds = "".join("<th>real</th><th>virtual</th>" for _ in known)
        words = '<th class="words">order as the laboratory predicts</th>'
        second = f"<tr><th></th>{kinds}{words}</tr>"
        top += "<th></th>"
    rows = [_measure_row(runs, known, measure, has_twins=has_twins) for measure in MEASURES]
    return scrolling(f"<table><tr><th></th>{top}</tr>{second}{''.join(filter(None, rows))}</table>")


def _measure_row(
    runs: Sequence[RunResult], targets: Sequence[str], measure: Measure, *, has_twins: bool
) -> str:
    cells, is_known = [], False
    for target in targets:
        real = _of(runs, target, "real")
        seeds = {run.seed for run in real}
        virtual = [run for run in _of(runs, target, "virtual") if run.seed in seeds]
        value = mean_of(real, measure)
        is_known = is_known or value is not None
        cells.append(f"<td><b>{_shown(value, measure)}</b></td>")
        if has_twins:
            cells.append(f'<td class="virtual">{_shown(mean_of(virtual, measure), measure)}</td>')
    if not is_known:
        return ""
    if has_twins:
        verdict = agreement(runs, measure)
        kind = "wrong" if verdict.wrong else ("right" if verdict.num_pairs else "none")
        cells.append(f'<td class="{kind}">{escape(verdict.words)}</td>')
    return f"<tr><td>{escape(measure.name)}</td>{''.join(cells)}</tr>"


def run_details(runs: Sequence[RunResult], targets: Sequence[str]) -> str:
    """Of each target its first real run: adapters, tenants, what failed, what the generator did."""
    parts = []
    for target in targets:
        real = _of(runs, target, "real")
        if real:
            parts.append(_details(real[0], is_open=len(targets) == 1))
    return "".join(parts)


def _details(run: RunResult, *, is_open: bool) -> str:
    summary = run.summary
    pods = ", ".join(f"{escape(name)} {count}" for name, count in sorted(summary.by_pod.items()))
    late = ' class="warning"' if summary.has_lagged else ""
    parts = [
        f"<p>{summary.num_requests} requests in {summary.duration_s:.0f} s; "
        f"{escape(error_words(summary))}.</p>",
        f"<p{late}>{escape(_sentence(delay_words(summary)))}.</p>",
        f"<p>Answered by: {pods}.</p>" if pods else "",
        _latencies(run),
        _groups("adapter", summary.by_adapter),
        _groups("tenant", summary.by_tenant) if set(summary.by_tenant) - {NOBODY} else "",
    ]
    return (
        f"<details{' open' if is_open else ''}><summary>{escape(_short(run.target))}, seed "
        f"{run.seed}: adapters, errors, the generator</summary>{''.join(parts)}</details>"
    )


def _latencies(run: RunResult) -> str:
    summary = run.summary
    named = {
        "first word (s)": (summary.ttft_s, 1),
        "per word after it (ms)": (summary.tpot_s, 1e3),
        "between two pieces (ms)": (summary.gap_s, 1e3),
        "whole answer (s)": (summary.e2e_s, 1),
        "sent late (ms)": (summary.delay_s, 1e3),
    }
    rows = "".join(
        f"<tr><td>{name}</td>"
        + "".join(
            f"<td>{factor * value:.3g}</td>"
            for value in (times.mean, times.p50, times.p90, times.p95, times.p99, times.max)
        )
        + "</tr>"
        for name, (times, factor) in named.items()
    )
    heads = "".join(
        f"<th>{head}</th>" for head in ("", "mean", "median", "90 %", "95 %", "99 %", "most")
    )
    return scrolling(f"<table><tr>{heads}</tr>{rows}</table>")


def _groups(kind: str, groups: Mapping[str, GroupSummary]) -> str:
    """The most popular first, then the least, with what is between left out."""
    names = list(groups)
    if len(names) > 2 * NUM_SHOWN:
        gap = f'<tr><td colspan="{len(_GROUP_HEADS) + 1}" class="none">…</td></tr>'
        shown = [_group_row(name, groups[name]) for name in names[:NUM_SHOWN]]
        shown += [gap, *(_group_row(name, groups[name]) for name in names[-NUM_SHOWN:])]
    else:
        shown = [_group_row(name, group) for name, group in groups.items()]
    heads = "".join(f"<th>{head}</th>" for head in (kind, *_GROUP_HEADS))
    return scrolling(f"<table><tr>{heads}</tr>{''.join(shown)}</table>")


def _group_row(name: str, group: GroupSummary) -> str:
    cells = (
        escape(name),
        str(group.num_requests),
        f"{group.attainment:.1%}",
        f"{group.satisfaction:.3f}",
        *(f"{t:.3g}" for t in (group.ttft_mean_s, group.ttft_p50_s, group.ttft_p99_s)),
        f"{1e3 * group.tpot_mean_s:.3g}",
        str(group.num_errors),
        str(group.output_tokens),
    )
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _of(runs: Sequence[RunResult], target: str, kind: str) -> list[RunResult]:
    return [run for run in runs if run.target == target and run.kind == kind]


def _shown(value: float | None, measure: Measure) -> str:
    return "" if value is None else measure.form.format(value)


def _short(target: str) -> str:
    return target.removeprefix("rule:")


def _sentence(words: str) -> str:
    return words[0].upper() + words[1:]
