"""One HTML page that shows a suite's results to somebody who does not know the project.

It stands alone: plots are inline SVG, and nothing is fetched. Its input is the JSON that
`summary.summarize` made, read back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from statistics import fmean
from typing import Any

from extproc.sim.opponents.descriptions import DESCRIPTIONS
from extproc.sim.trials.reportpanels import (
    heat_maps,
    latency_panel,
    loads_panel,
    sweep_panels,
)
from extproc.sim.trials.summary import called, is_bound
from extproc.sim.trials.svg import COLOURS, GREYS, Bar, bar_chart

Json = Mapping[str, Any]
MAX_BOUND_RATIO = 2.5
"""A bound further above the best rule than this is put in words: its bar would hide the others."""

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;color:#222;max-width:1180px;margin:24px auto;
padding:0 20px}
h1{font-size:27px;margin:0 0 4px}h2{font-size:19px;margin:34px 0 6px}
h3{font-size:15px;margin:10px 0}
.lead{font-size:16.5px;max-width:900px}.box{background:#f3f7f9;border-left:4px solid #0b6e99;
padding:10px 16px;margin:14px 0;max-width:900px}.grid{display:flex;flex-wrap:wrap;gap:18px 26px}
.grid>div{max-width:560px}svg{max-width:100%;height:auto;font-family:system-ui,sans-serif}
table{border-collapse:collapse;font-size:12.5px}td,th{padding:3px 6px;text-align:right;
border-bottom:1px solid #e4e4e4;white-space:nowrap}th{white-space:normal;background:#fafafa;
vertical-align:bottom}
td:first-child,th:first-child{text-align:left}.bound td{color:#777;font-style:italic}
.note{color:#666;font-size:13px;max-width:900px}dt{font-weight:600}dd{margin:0 0 6px 0}
"""


def render(result: Json) -> str:
    """The page."""
    suite = result["suite"]
    colours = colours_of(suite)
    parts = [
        f"<h1>Which server should get the request? Suite “{escape(suite['name'])}”</h1>",
        _introduction(suite),
    ]
    parts += [_scenario(result, scenario, colours) for scenario in suite["scenarios"]]
    parts += sweep_panels(result, colours)
    parts += [_rules(suite), _glossary(suite), _method(result)]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>Routing laboratory: {escape(suite['name'])}</title>"
        f"<style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def colours_of(suite: Json) -> dict[str, str]:
    """A colour for each rule; bounds are grey."""
    rules = [rule for rule in suite["rules"] if not is_bound(rule)]
    colours = {rule: COLOURS[index % len(COLOURS)] for index, rule in enumerate(rules)}
    return {**colours, **{bound: GREYS.get(bound[:2], GREYS["B4"]) for bound in suite["bounds"]}}


def _introduction(suite: Json) -> str:
    slo = suite["slo"]
    return (
        '<p class="lead">Several servers hold the same language model. Customers have fine-tuned '
        "versions of it, called <b>LoRA adapters</b>: small additions that a server can run beside "
        "the model, but only a few at a time. A request that reaches a server whose places are "
        "taken by other adapters has to wait. So the gateway's <b>routing rule</b> decides how "
        "much traffic the same hardware can serve. This page compares rules.</p>"
        f'<p class="lead">{escape(suite["about"])}</p>'
        '<div class="box"><b>How rules are judged.</b> A request is served well if its first word '
        f"comes within {slo['ttft_s']:g} s and each further one within {slo['tpot_s'] * 1000:g} ms "
        "on average. A rule's <b>capacity</b> is the highest rate of requests at which at least "
        f"{slo['target'] * 100:g} % of them are served well; refused and lost requests count as "
        "badly served. Longer bars are better.</div>"
    )


def _scenario(result: Json, scenario: Json, colours: Mapping[str, str]) -> str:
    summary = result["summary"][scenario["name"]]
    title = scenario["title"] or scenario["name"]
    own = [t for t in result["trials"] if t["scenario"] == scenario["name"] and not t["sweep"]]
    rates = scenario["rates_rps"] or result["suite"]["rates_rps"]
    return (
        f"<h2>{escape(title)}: how much can each rule serve?</h2>"
        f"{_capacity_chart(summary['rows'], colours)}"
        f"{_findings(summary, result['suite'])}"
        f"<h3>At {summary['main_rate_rps']:g} requests per second</h3>{_table(summary['rows'])}"
        f'<div class="grid">{latency_panel(own, colours, result["suite"]["slo"], rates)}'
        f"{loads_panel(own, colours)}</div>{heat_maps(own)}"
    )


def _capacity_chart(rows: Sequence[Json], colours: Mapping[str, str]) -> str:
    best = max(row["capacity_rps"]["mean"] for row in rows if not row["is_bound"])
    bars: list[Bar] = []
    beyond = []
    for row in rows:
        capacity, name = row["capacity_rps"], called(row["rule"])
        if row["is_bound"] and capacity["mean"] > MAX_BOUND_RATIO * best:
            beyond.append(f"{name}: {capacity['mean']:.3g}")
            continue
        interval = (capacity["mean"], capacity["low"], capacity["high"])
        bars.append((name, *interval, colours[row["rule"]]))
    note = f'<p class="note">Far beyond the scale: {escape("; ".join(beyond))}.</p>'
    label = "capacity: requests per second served well (mean and 95 % interval)"
    return bar_chart(bars, label) + (note if beyond else "")


def _findings(summary: Json, suite: Json) -> str:
    """The chart in words."""
    rules = [row for row in summary["rows"] if not row["is_bound"]]
    best, worst = rules[0], rules[-1]
    sentences = [
        f"<b>{escape(best['rule'])}</b> serves the most: {best['capacity_rps']['mean']:.3g} "
        f"requests per second, {best['capacity_rps']['mean'] / worst['capacity_rps']['mean']:.2g} "
        f"times as many as {escape(worst['rule'])}, with the same servers."
    ]
    informed = best["over_informed"]
    if informed is not None:
        sentences.append(
            f"That is {informed['mean']:.0%} of what the greedy bound reaches, which knows "
            "everything, even the length of every answer before it is written, but not which "
            "requests are still to come."
        )
    surely = [row["rule"] for row in rules if (row["over_baseline"]["low"] or 0) > 1]
    if surely:
        sentences.append(
            f"Surely better than {escape(suite['baseline'])}, seed by seed: "
            f"{escape(', '.join(surely))}."
        )
    return f'<p class="lead">{" ".join(sentences)}</p>'


_COLUMNS = (
    ("served well", "attainment", "{:.1%}"),
    ("first word p50, s", "ttft_p50_s", "{:.3f}"),
    ("first word p99, s", "ttft_p99_s", "{:.2f}"),
    ("per word p99, s", "tpot_p99_s", "{:.4f}"),
    ("done /s", "throughput_rps", "{:.1f}"),
    ("S-LoRA satisf.", "slora_satisfaction", "{:.3f}"),
    ("adapter loads /1000", "loads_per_1000", "{:.0f}"),
    ("queue wait, s", "queue_wait_s", "{:.3f}"),
    ("max/mean load", "max_over_mean_load", "{:.2f}"),
    ("fairness gap", "fairness_gap", "{:.2f}"),
)


def _table(rows: Sequence[Json]) -> str:
    heads = ["rule", "capacity", "95 %", "of all-knowing", "of pooled"]
    heads += [name for name, _, _ in _COLUMNS]
    lines = [_line(row) for row in rows]
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    return f"<table><tr>{head}</tr>{''.join(lines)}</table>"


def _line(row: Json) -> str:
    capacity = row["capacity_rps"]
    low, high = capacity["low"], capacity["high"]
    cells = [
        escape(called(row["rule"])),
        f"{capacity['mean']:.1f}",
        "" if low is None else f"{max(0.0, low):.1f} to {high:.1f}",
        *(
            "" if row[key] is None else f"{row[key]['mean']:.0%}"
            for key in ("over_informed", "over_pooled")
        ),
        *(form.format(row["measures"][key]) for _, key, form in _COLUMNS),
    ]
    kind = ' class="bound"' if row["is_bound"] else ""
    return f"<tr{kind}>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _rules(suite: Json) -> str:
    items = "".join(
        f"<dt>{escape(label)}</dt><dd>{escape(DESCRIPTIONS.get(label.partition('?')[0], 'yours'))}"
        "</dd>"
        for label in suite["rules"]
    )
    return f"<h2>The rules</h2><dl>{items}</dl>"


def _glossary(suite: Json) -> str:
    terms = {
        "adapter loads": "How often a server had to fetch an adapter; each fetch stops the whole "
        "server for a moment.",
        "queue wait": "Mean time that a request lay in its server's queue, nearly always because "
        "all adapter places were taken.",
        "max/mean load": "The busiest server's work over the average server's; 1 is perfect "
        "balance.",
        "fairness gap": "Part served well of the best served customer less that of the worst.",
        "S-LoRA satisf.": "User satisfaction as in the S-LoRA paper: 1 - (time to first word "
        "/ 6 s)², 0 beyond.",
        "perfect pooling (B0)": "All servers as one, with every adapter always loaded at no cost. "
        "No rule can serve more.",
        "all-knowing greedy (B3)": "Knows every server's exact state and the length of every "
        "answer in advance; chooses for each request where it does the least harm. Greedy and "
        "without the right to hold requests back, so not the optimum.",
        "95 % interval": f"Over {len(suite['seeds'])} independent runs, all rules on the same "
        "requests.",
    }
    items = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in terms.items())
    return f"<h2>Words</h2><dl>{items}</dl>"


def _method(result: Json) -> str:
    suite = result["suite"]
    runs = [run for trial in result["trials"] for run in trial["runs"]]
    median_us = fmean(t["decision_us"][0] for t in result["timing"]) if result["timing"] else 0.0
    return (
        '<h2>How this was made</h2><p class="note">Simulated in virtual time: the gateway\'s '
        "production code (pool, admission, rules) against a model of the vLLM engine with profile "
        f"“{escape(suite['profile'])}” ({escape(result['provenance'])}). {len(runs)} runs of "
        f"{suite['num_requests']} requests; the first {suite['warm_up']:.0%} of each do not count. "
        "Network and Envoy time are left out, being the same for every rule. Rules see what the "
        "gateway sees: no answer lengths, no engine constants. Bounds see more. Everything but the "
        f"time of a decision (here about {median_us:.0f} µs, simulated snapshot included) is "
        "decided by the seeds and comes out the same again.</p>"
    )
