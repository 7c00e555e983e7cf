"""A result as tables in Markdown: what was served at each rate and to whom, and the capacities."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import exp, log
from statistics import fmean, median
from typing import Any

from extproc.lab.trials.summary import ALONE, FIXED, is_bound, pairs
from extproc.lab.workload.intervals import is_not_worse, paired_ratio, standard_error

Json = Mapping[str, Any]
Place = tuple[str, float]
"""A scenario and its rate, or a sweep and its value."""
Runs = dict[int, Json]
"""Measures by seed."""
Cells = dict[tuple[str, ...], list[str]]
"""Of the table of places, by the first three: place, policy and tenant."""

MEASURES = (
    ("finished, req/s", "throughput_rps", 1),
    ("p99 of the median adapter, s", "adapter_ttft_p99_s", 1),
    ("of the worst, s", "worst_adapter_ttft_p99_s", 1),
    ("loads/1,000", "loads_per_1000", 1),
    ("S-LoRA satisfaction, %", "slora_satisfaction", 100),
)
HEADS = (
    *("place", "policy", "tenant", "misses, %", "less the first's", "less alone"),
    *("served well, req/s", "of the first's at the first rate, %"),
    *(head for head, _, _ in MEASURES),
    *("longest wait, s", "refused, %"),
)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a table."""
    first, *others = ("| " + " | ".join(cells) + " |" for cells in (heads, *rows))
    return "\n".join([first, "|---" * len(heads) + "|", *others])


def title(policy: str) -> str:
    """Format the name of a policy or a bound."""
    return f"*{policy}*" if is_bound(policy) else f"`{policy}`"


def tables(result: Json, twin: Json | None = None) -> str:
    """Format a result: its runs by place, then its capacities if it has any; see both."""
    parts = [places(result, twin)]
    return "\n\n".join([*parts, capacities(result)] if result["summary"] else parts)


def places(result: Json, twin: Json | None = None) -> str:
    """Format the runs at fixed rates, those of sweeps, and those at the middle one of the rates
    of a search.

    A line has the means over the seeds ± their standard errors, for a policy at a place, and then
    for each tenant. Differences are to the baseline of the suite, or the first policy that was run
    at a place, and to a tenant's own requests alone, both seed by seed. In brackets is what the
    `twin` has, the same requests in virtual time. Columns without a figure are left out.
    """
    rows, virtual = _rows(result), _rows(twin) if twin else {}
    lines = [
        [*names, *(_beside(cell, other) for cell, other in zip(own, others, strict=True))]
        for names, own in rows.items()
        for others in (virtual.get(names, [""] * len(own)),)
    ]
    shown = [n for n, _ in enumerate(HEADS) if any(each[n] for each in lines)]
    return table([HEADS[n] for n in shown], ([each[n] for n in shown] for each in lines))


def _beside(cell: str, virtual: str) -> str:
    return f"{cell} ({virtual})" if virtual else cell


def _rows(result: Json) -> Cells:
    runs: dict[Place, dict[str, Runs]] = {}
    for trial in result["trials"]:
        main = result["summary"].get(trial["scenario"], {}).get("main_rate_rps")
        fixed = trial["sweep"] in ("", FIXED)
        for run in trial["runs"]:
            if trial["sweep"] or run["rate_rps"] == main:
                name = trial["scenario"] if fixed else f"{trial['sweep']}="
                at = runs.setdefault((name, run["rate_rps"] if fixed else trial["value"]), {})
                at.setdefault(trial["policy"], {})[trial["seed"]] = run
    firsts = {
        place: policies.get(result["suite"]["baseline"], next(iter(policies.values())))
        for place, policies in runs.items()
    }
    rows: Cells = {}
    for (name, value), policies in runs.items():
        shown = f"{name}{'' if name.endswith('=') else '@'}{value:g}"
        whole = next(first for (other, _), first in firsts.items() if other == name)
        alone = runs.get((name + ALONE, value), {})
        for policy, own in policies.items() if not name.endswith(ALONE) else ():
            first = {} if own is firsts[name, value] else firsts[name, value]
            rows[shown, title(policy), ""] = _of_all(own, first, whole)
            for tenant in next(iter(own.values()))["tenants"]:
                theirs = [_of(tenant, each) for each in (own, first, alone.get(policy, {}))]
                rows[shown, title(policy), tenant] = _of_tenant(*theirs)
    return rows


def _of(tenant: str, runs: Runs) -> Runs:
    return {seed: run["tenants"][tenant] for seed, run in runs.items() if tenant in run["tenants"]}


def _of_all(own: Runs, first: Runs, whole: Runs) -> list[str]:
    goodput, of = pairs(_values(own, "goodput_rps"), _values(whole, "goodput_rps"))
    return [
        *(_misses(own), _less(own, first), ""),
        _mean(_values(own, "goodput_rps").values()),
        _mean([100 * each / max(1e-9, other) for each, other in zip(goodput, of, strict=True)]),
        *(_mean(filter(None, _values(own, key, factor).values())) for _, key, factor in MEASURES),
        *("", _refused(own)),
    ]


def _of_tenant(own: Runs, first: Runs, alone: Runs) -> list[str]:
    waits = _mean(_values(own, "longest_wait_s").values())
    empty = [""] * (len(MEASURES) + 2)
    return [_misses(own), _less(own, first), _less(own, alone), *empty, waits, ""]


def _values(runs: Runs, key: str, factor: float = 1) -> dict[int, float]:
    return {seed: factor * run.get(key, 0.0) for seed, run in runs.items()}


def _misses(own: Runs) -> str:
    return _mean([100 * (1 - run["attainment"]) for run in own.values()])


def _less(own: Runs, others: Runs) -> str:
    """Format the difference in misses to another run, seed by seed, in points."""
    parts = pairs(_values(others, "attainment", 100), _values(own, "attainment", 100))
    cell = _mean([theirs - ours for theirs, ours in zip(*parts, strict=True)])
    return cell if cell.startswith("-") or not cell else f"+{cell}"


def _refused(runs: Runs) -> str:
    """Format the part of the requests that is refused, by reason."""
    reasons = sorted({reason for run in runs.values() for reason in run["refusals"]})
    parts = {
        reason: [100 * run["refusals"].get(reason, 0) / run["num_offered"] for run in runs.values()]
        for reason in reasons
    }
    return ", ".join(f"{reason} {_mean(part)}" for reason, part in parts.items())


def _mean(numbers: Iterable[float]) -> str:
    """Format a mean with its standard error; nothing if there is no value."""
    values = list(numbers)
    if not values:
        return ""
    mean = f"{fmean(values):.2f}"
    return mean if len(values) == 1 else f"{mean} ± {standard_error(values):.2f}"


def capacities(result: Json) -> str:
    """Format the SLO capacities in requests per second, with half of their 95 % intervals. In
    brackets is the part of the worst served adapter's requests that is served well there.

    The last column is the geometric mean over the scenarios of the ratio to B3's capacity, by which
    the policies are sorted. Cells of scenarios that a policy did not run are empty.
    """
    scenarios = list(result["summary"])
    rows: dict[str, dict[str, Json]] = {}
    for scenario in scenarios:
        for row in result["summary"][scenario]["rows"]:
            rows.setdefault(row["policy"], {})[scenario] = row
    lines = []
    means = {policy: _of_informed(own) for policy, own in rows.items()}
    for policy in sorted(rows, key=lambda policy: (-(means[policy] or 0.0), policy)):
        cells = [_cell(rows[policy].get(scenario)) for scenario in scenarios]
        mean = means[policy]
        lines.append([title(policy), *cells, "" if mean is None else f"{mean:.0%}"])
    return table(["policy", *scenarios, "of B3"], lines)


def _of_informed(rows: Mapping[str, Json]) -> float | None:
    parts: Sequence[float] = [
        row["over_informed"]["mean"] for row in rows.values() if row["over_informed"] is not None
    ]
    return exp(fmean(log(max(part, 1e-9)) for part in parts)) if parts else None


def _cell(row: Json | None) -> str:
    if row is None:
        return ""
    capacity = row["capacity_rps"]
    half = "" if capacity["low"] is None else f" ± {(capacity['high'] - capacity['low']) / 2:.1f}"
    return f"{capacity['mean']:.1f}{half} ({row['worst_adapter']['mean']:.0%})"


def ratios(result: Json, policy: str) -> str:
    """Format the capacities over those of `policy`, seed by seed, with their 95 % intervals.

    Sorted by the median over the scenarios. A star marks what `policy` is not surely 0.97 of.

    Raises:
        ValueError: The result is without this policy in a scenario.
    """
    found: dict[str, dict[str, dict[int, float]]] = {}
    for trial in result["trials"]:
        if not trial["sweep"]:
            own = found.setdefault(trial["scenario"], {}).setdefault(trial["policy"], {})
            own[trial["seed"]] = trial["capacity_rps"]
    rows: dict[str, dict[str, tuple[float, str]]] = {}
    for scenario, policies in found.items():
        if policy not in policies:
            raise ValueError(f"scenario {scenario} was not run with {policy}")
        for name, values in policies.items():
            ours, theirs = pairs(values, policies[policy])
            if name != policy and ours:
                over = paired_ratio(ours, theirs)
                to = "" if over.low is None else f" ({over.low:.2f} to {over.high:.2f})"
                star = "" if is_not_worse(paired_ratio(theirs, ours)) else " *"
                rows.setdefault(name, {})[scenario] = over.mean, f"{over.mean:.2f}{to}{star}"
    lines = []
    middles = {name: median(mean for mean, _ in own.values()) for name, own in rows.items()}
    for name in sorted(rows, key=lambda name: -middles[name]):
        cells = [rows[name].get(scenario, (0.0, ""))[1] for scenario in found]
        worst = min(mean for mean, _ in rows[name].values())
        lines.append([title(name), f"{middles[name]:.2f}", f"{worst:.2f}", *cells])
    return table([f"over `{policy}`", "median", "worst", *found], lines)
