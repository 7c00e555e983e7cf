"""One HTML page that shows a load test to somebody who does not know the project.

It stands alone: plots are inline SVG, nothing is fetched, and it follows the reader's choice of a
light or a dark screen.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from extproc.loadtest.report.agreement import MEASURES, agreement, distance
from extproc.loadtest.report.plots import Colours, colours_of, rate_plots, wait_plot
from extproc.loadtest.report.tables import measures_table, run_details
from extproc.loadtest.results import LoadResult, RunResult, load
from extproc.sim.engine.profiles import PROFILES
from extproc.sim.opponents.descriptions import DESCRIPTIONS

_STYLE = """
:root{color-scheme:light dark;--text:#222;--back:#fff;--soft:#666;--line:#e4e4e4;--head:#fafafa;
--box:#f3f7f9;--edge:#0b6e99;--good:#2c6b47;--bad:#b3261e}
*{box-sizing:border-box}
body{font:15px/1.5 system-ui,sans-serif;color:var(--text);background:var(--back);
max-width:1180px;margin:24px auto;padding:0 20px;overflow-wrap:break-word}
h1{font-size:27px;line-height:1.25;margin:0 0 4px}h2{font-size:20px;margin:38px 0 6px}
h3{font-size:15px;margin:14px 0 4px}a{color:var(--edge)}
.lead{font-size:16.5px;max-width:900px}
.box{background:var(--box);border-left:4px solid var(--edge);padding:10px 16px;margin:14px 0;
max-width:900px}
.warning{border-left:4px solid var(--bad);padding-left:12px;color:var(--bad);font-weight:600}
.grid{display:flex;flex-wrap:wrap;gap:18px 26px}.grid>div{width:550px;max-width:100%}
svg{max-width:100%;height:auto;font-family:system-ui,sans-serif;display:block}
.wide{overflow-x:auto;max-width:100%;margin:8px 0}
table{border-collapse:collapse;font-size:13px;font-variant-numeric:tabular-nums}
td,th{padding:4px 8px;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
th{background:var(--head);white-space:normal;vertical-align:bottom;font-weight:600}
td:first-child,th:first-child{text-align:left;position:sticky;left:0}
td:first-child{background:var(--back)}th.group{text-align:center}
th.words{text-align:left}
td.virtual{color:var(--soft)}td.right{color:var(--good);text-align:left}
td.wrong{color:var(--bad);text-align:left;white-space:normal;min-width:280px}
td.none{color:var(--soft);text-align:left}
.note{color:var(--soft);font-size:13px;max-width:900px}
details{margin:10px 0;border:1px solid var(--line);border-radius:6px;padding:6px 12px}
summary{cursor:pointer;font-weight:600}dt{font-weight:600}dd{margin:0 0 6px 0}
@media (prefers-color-scheme:dark){
:root{--text:#e3e3e3;--back:#16191c;--soft:#a0a4a8;--line:#33383d;--head:#1f2327;--box:#1c262c;
--edge:#5bb3d8;--good:#7cc79a;--bad:#ff8a80}
svg text[fill="#333"]{fill:#d0d3d6}svg text[fill="#c00"]{fill:#ff8a80}
svg line[stroke="#e4e4e4"]{stroke:#33383d}svg line[stroke="#444"]{stroke:#8a9096}
svg line[stroke="#c00"]{stroke:#ff8a80}svg circle[stroke]{stroke:#16191c}
svg polyline,svg circle,svg line{filter:brightness(1.35)}
}
@media (max-width:600px){body{padding:0 12px;margin:12px auto}h1{font-size:22px}
.lead{font-size:15px}td:first-child{white-space:normal;min-width:96px}td,th{padding:4px 6px}}
"""

_TERMS = {
    "real": "Requests were sent over HTTP, streamed, and timed by the client.",
    "virtual": "The same requests in the laboratory: the gateway's production code against a model "
    "of the servers, in virtual time. Network and gateway cost nothing there.",
    "order as the laboratory predicts": "Of each two rules whose virtual runs differ surely (95 % "
    "over the seeds) and by more than 2 %, whether the real runs differ the same way.",
    "served well, SLO attainment": "Part of all requests that got the first word, and each further "
    "one on average, in the time allowed. What failed or was refused was not served well.",
    "satisfaction": "As in the S-LoRA paper: 1 - (time to first word / 6 s)², 0 beyond or without "
    "one; the mean over all requests.",
    "adapter loads": "How often a server had to fetch an adapter into one of its places, per 1,000 "
    "requests.",
    "word": "A token: a piece of a word, in truth.",
    "sent late": "How much later than due the generator sent a request. If the median is over 5 ms "
    "the load was not the one asked for.",
}


def render(result: LoadResult, *, link: str = "") -> str:
    """The page.

    Args:
        result: The load test.
        link: Where its file is, seen from the page; "" to leave that out.

    Raises:
        ValueError: It has no runs.
    """
    if not result.of_kind("real"):
        raise ValueError(f"{result.name}: a load test without real runs")
    colours = colours_of(result)
    parts = [
        f"<h1>Load test “{escape(result.name)}”: {escape(_title(result))}</h1>",
        _introduction(result),
        _warnings(result),
        _findings(result),
        *(_scenario(result, name, colours) for name in result.scenarios),
        _rules(result),
        _glossary(result),
        _method(result, link),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Load test: {escape(result.name)}</title>"
        f"<style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def page_of(path: Path) -> str:
    """The page of a result's file, which lies beside it.

    Raises:
        OSError: It cannot be read.
        ResultError: It is something else.
        ValueError: It has no real runs.
    """
    return render(load(path), link=path.name)


def _title(result: LoadResult) -> str:
    if result.of_kind("virtual"):
        return "what came, beside what was predicted"
    return "how well requests were served"


def _introduction(result: LoadResult) -> str:
    slo = result.slo
    several = len(result.targets) > 1
    return (
        '<p class="lead">Several servers hold the same language model. Customers have fine-tuned '
        "versions of it, called <b>LoRA adapters</b>: small additions that a server can run beside "
        "the model, but only a few at a time. A request that reaches a server whose places are "
        "taken by other adapters has to wait, so it matters to which server the gateway sends it. "
        + ("This page compares ways to choose." if several else "")
        + "</p>"
        + (f'<p class="lead">{escape(result.about)}</p>' if result.about else "")
        + '<div class="box"><b>How it is judged.</b> A request is served well if its first word '
        f"comes within {slo.ttft_s:g} s"
        + (
            f" and each further one within {slo.tpot_s * 1000:g} ms on average"
            if slo.tpot_s < slo.ttft_s
            else ""
        )
        + f". The aim is {slo.target * 100:g} %.</div>"
    )


def _warnings(result: LoadResult) -> str:
    """What makes the figures worth less, before them."""
    real = result.of_kind("real")
    lagged = [run for run in real if run.summary.has_lagged]
    parts = []
    if lagged:
        named = ", ".join(
            f"{_short(run.target)} in {run.scenario} at {run.rate_rps:g}/s" for run in lagged
        )
        parts.append(
            f"In {len(lagged)} of {len(real)} runs the generator lagged, so that their figures are "
            f"not to be trusted: {escape(named)}."
        )
    if result.note:
        parts.append(escape(result.note))
    return "".join(f'<p class="warning">{part}</p>' for part in parts)


def _findings(result: LoadResult) -> str:
    """The page in words."""
    real = result.of_kind("real")
    num_requests = sum(run.summary.num_requests for run in real)
    num_failed = sum(sum(run.summary.errors.values()) for run in real)
    failed = "none failed" if not num_failed else f"{num_failed} failed"
    several = f"{len(real)} real runs, " if len(real) > 1 else ""
    sentences = [f"{several}{num_requests:,} requests, {failed}."]
    if result.of_kind("virtual"):
        sentences.append(_order_words(result))
        apart = {m.name: distance(result.runs, m) for m in MEASURES}
        known = [
            f"{name.partition(' (')[0]} {value:.0%}"
            for name, value in apart.items()
            if value is not None
        ]
        sentences.append(
            "How far a real run typically is from its virtual twin: "
            f"{escape('; '.join(known))} (median)."
        )
    delays_s = sorted(run.summary.delay_s.p50 for run in real)
    where = " in the worst run" if several else ""
    sentences.append(
        f"The generator sent its median request {1e3 * delays_s[-1]:.1f} ms late{where}."
    )
    return f'<p class="lead">{" ".join(sentences)}</p>'


def _order_words(result: LoadResult) -> str:
    verdicts = [agreement(runs, measure) for runs in _cells(result) for measure in MEASURES]
    num_pairs = sum(verdict.num_pairs for verdict in verdicts)
    num_right = num_pairs - sum(len(verdict.wrong) for verdict in verdicts)
    if not num_pairs:
        return "The laboratory predicts no difference."
    return (
        f"<b>Of {num_pairs} orders that the laboratory predicts (two rules, one measure, one load) "
        f"{num_right} came out that way.</b>"
    )


def _cells(result: LoadResult) -> list[list[RunResult]]:
    """The runs of each scenario and rate."""
    keys = dict.fromkeys((run.scenario, run.rate_rps) for run in result.of_kind("real"))
    return [[run for run in result.runs if (run.scenario, run.rate_rps) == key] for key in keys]


def _scenario(result: LoadResult, name: str, colours: Colours) -> str:
    runs = [run for run in result.runs if run.scenario == name]
    if not any(run.kind == "real" for run in runs):
        return ""
    rates = sorted({run.rate_rps for run in runs if run.kind == "real"})
    at = {rate_rps: [run for run in runs if run.rate_rps == rate_rps] for rate_rps in rates}
    plots = rate_plots(runs, colours, result.slo)
    plots.append((f"How long each waited, at {rates[-1]:.3g}/s", _waits(at[rates[-1]], colours)))
    tables = [
        f"<h3>At {rate_rps:.3g} requests per second</h3>{measures_table(own, result.targets)}"
        f"{run_details(own, result.targets)}"
        for rate_rps, own in at.items()
    ]
    return (
        f"<h2>{escape(_scenario_title(result, name))}</h2>{_legend(runs)}"
        f'<div class="grid">{"".join(map(_plot, plots))}</div>{"".join(tables)}'
    )


def _waits(runs: Sequence[RunResult], colours: Colours) -> str:
    """Of the first seed, real and virtual."""
    first = min(run.seed for run in runs if run.kind == "real")
    return wait_plot([run for run in runs if run.seed == first], colours)


def _legend(runs: Sequence[RunResult]) -> str:
    if not any(run.kind == "virtual" for run in runs):
        return ""
    return '<p class="note">Lines are virtual runs, points are real ones, colours are rules.</p>'


def _plot(plot: tuple[str, str]) -> str:
    title, chart = plot
    return f"<div><h3>{escape(title)}</h3>{chart}</div>" if chart else ""


def _scenario_title(result: LoadResult, name: str) -> str:
    scenarios = result.suite.scenarios if result.suite else []
    return next((each.title for each in scenarios if each.name == name and each.title), name)


def _rules(result: LoadResult) -> str:
    rules = [target.removeprefix("rule:") for target in result.targets if "rule:" in target]
    if not rules:
        return ""
    items = "".join(
        f"<dt>{escape(rule)}</dt><dd>"
        f"{escape(DESCRIPTIONS.get(rule.partition('?')[0], 'yours'))}</dd>"
        for rule in rules
    )
    return f"<h2>The rules</h2><dl>{items}</dl>"


def _glossary(result: LoadResult) -> str:
    has_twins = bool(result.of_kind("virtual"))
    virtual_only = ("real", "virtual", "order as the laboratory predicts")
    items = "".join(
        f"<dt>{escape(term)}</dt><dd>{escape(words)}</dd>"
        for term, words in _TERMS.items()
        if has_twins or term not in virtual_only
    )
    return f"<h2>Words</h2><dl>{items}</dl>"


def _method(result: LoadResult, link: str) -> str:
    parts = [f"Begun {escape(result.date)} on {escape(result.machine)}."]
    suite = result.suite
    if suite is not None:
        profile = PROFILES.get(suite.profile)
        provenance = f" ({profile.provenance})" if profile else ""
        parts.append(
            f"Suite “{escape(suite.name)}”: {escape(suite.about)} Servers are fake ones that take "
            f"the time that profile “{escape(suite.profile)}”{escape(provenance)} says, changed "
            "where the suite's file says so; the gateway is real. Requests are sent when they are "
            f"due, whatever became of those before. The first {suite.warm_up:.0%} of each run do "
            "not count."
        )
    if result.is_trimmed:
        parts.append("Of adapters and tenants only the most and the least popular are kept.")
    if link:
        parts.append(f'All figures: <a href="{escape(link)}">{escape(link)}</a>.')
    return f'<h2>How this was made</h2><p class="note">{" ".join(parts)}</p>'


def _short(target: str) -> str:
    return target.removeprefix("rule:")
