"""The command `extproc lab whatif`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product
from operator import attrgetter
from pathlib import Path
from typing import Annotated

import typer

from extproc.commands.failure import FAILED, failing, failure
from extproc.commands.fakepod import profile_of
from extproc.lab.calibration.fromrecord import FITTED, fit_record
from extproc.lab.engine.profiles import PROFILES, EngineProfile
from extproc.lab.fleet.settings import FleetSettings
from extproc.lab.trials.charts import COLOURS, bar_chart
from extproc.lab.trials.prospects import Prospect, prospects
from extproc.lab.trials.report import templates
from extproc.lab.trials.table import table
from extproc.lab.trials.whatif import (
    Case,
    PredictedTime,
    add,
    advice,
    compare_times,
    missing_s,
    simulate,
    without_times,
)
from extproc.lab.workload.intervals import Interval
from extproc.lab.workload.judge import Slo
from extproc.lab.workload.recorded import Record, read_record
from extproc.lab.workload.running import FleetResult
from extproc.plugins import PolicyError

FITTED_FROM = "h100-8b"
"""The profile that has what a record does not say: sizes and limits."""
_CALIBRATE = "`extproc lab calibrate` on one of the pods writes one"
_ADDED = "network, Envoy, router and the pods' servers"
TIMES = "time", "of", "recorded, ms", "predicted, ms", "difference"
PROSPECTS = (
    *("policy", "pods", "slots", "served well, %", "more than recorded, points"),
    *("TTFT p50, ms", "TTFT p99, ms", "loads/1,000", "worst adapter, %"),
)
Rows = list[tuple[str, ...]]
_PEER_DELAY_S = 0.005
"""Of several routers, which tell each other (`extproc.lab.fleet.settings`)."""


def whatif(
    record: Annotated[
        Path, typer.Argument(help="File that `extproc lab record` wrote, or a trace.")
    ],
    profile: Annotated[
        str,
        typer.Option(
            help=f"Costs of the engine: the file of `lab calibrate`, or {', '.join(PROFILES)}; by "
            "default costs that are fitted to the first half of the record."
        ),
    ] = "",
    pods: Annotated[
        str, typer.Option(help="Numbers of pods, as 6,8,10; by default that of the record.")
    ] = "",
    slots: Annotated[
        str, typer.Option(help="Adapter slots of a pod, as 8,16; by default the record's.")
    ] = "",
    policy: Annotated[
        list[str] | None,
        typer.Option(help="Policy to compare with the recorded one; may be repeated."),
    ] = None,
    in_force: Annotated[
        str,
        typer.Option(
            help="Policy that chose the recorded pods, where the record does not have it: of "
            "Envoy's balancers, least_request_p2c, round_robin or random."
        ),
    ] = "",
    cpu_loras: Annotated[
        int | None,
        typer.Option(min=1, help="The pods' --max-cpu-loras; by default as many as slots."),
    ] = None,
    added_ms: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Time that network, Envoy, router and the pods' servers add to a first token, ms; "
            "by default what the fast requests of the record say.",
        ),
    ] = None,
    requests: Annotated[
        int, typer.Option(min=100, help="Requests to send: the busiest stretch of the record.")
    ] = 5_000,
    ttft: Annotated[
        float, typer.Option(help="Longest time to the first token of a request served well, s.")
    ] = 0.5,
    tpot: Annotated[float, typer.Option(help="Longest time per token after it, s.")] = 0.05,
    html: Annotated[
        bool, typer.Option("--html", help="Also write the tables and charts as a page beside it.")
    ] = False,
) -> None:
    """Say what other policies, pods or slots would make of recorded traffic, in virtual time.

    First it tells how well the model predicts what was recorded. Where a time differs by more than
    25 %, it says what to calibrate, promises nothing, and ends with status 1.
    """
    with failing(PolicyError, OSError, ValueError, TypeError, status=FAILED):
        base = profile_of(profile or FITTED_FROM)
        whole = read_record(record, max_total_tokens=base.max_model_len, policy=in_force)
        chosen = whole.busiest(requests)
        cases = cases_of(chosen, policy or ["least_harm"], _numbers(pods), _numbers(slots))
        typer.echo(_about(whole, chosen))
        settings = FleetSettings(
            num_routers=chosen.num_routers,
            peer_delay_s=_PEER_DELAY_S if chosen.num_routers > 1 else None,
            profile=base if profile else _fitted(chosen, base, cases[0].max_loras, cpu_loras),
            max_cpu_loras=cpu_loras,
        )
        result = simulate(chosen, settings, cases[0])
        added_s = missing_s(chosen, result) if added_ms is None else added_ms / 1e3
        typer.echo(f"{1e3 * added_s:.1f} ms are added to each predicted first token: {_ADDED}.")
        add(result, added_s)
        rows, doubt = Rows(), ""
        if why := without_times(chosen):
            doubt = f"Nobody knows how well the model tells this: {why}. No promise."
            typer.echo(f"\n{doubt}")
        else:
            # A model is not judged by what it was fitted to.
            seen = result if profile else replace(result, warm_up_s=_middle_s(chosen))
            compared = compare_times(chosen, seen)
            typer.echo(f"\nHow well the model tells what happened ({cases[0].policy}):\n")
            rows = time_rows(compared)
            typer.echo(table(TIMES, rows))
            if said := advice(compared):
                raise failure(said, FAILED)
        typer.echo("\nWhat it would have been, with 95 % intervals:\n")

        def run(case: Case) -> FleetResult:
            return result if case == cases[0] else add(simulate(chosen, settings, case), added_s)

        found = list(prospects(cases, run, Slo(ttft, tpot)))
        typer.echo(table(PROSPECTS, prospect_rows(found)))
        if html:
            page = _page(_about(whole, chosen), doubt, rows, found, settings.profile.provenance)
            record.with_suffix(".html").write_text(page, encoding="utf-8")
            typer.echo(record.with_suffix(".html"))


def _page(about: str, doubt: str, rows: Rows, found: Sequence[Prospect], provenance: str) -> str:
    """Return the tables and charts as a page."""
    return (
        templates()
        .get_template("whatif.html")
        .render(
            about=about,
            doubt=doubt,
            time_heads=TIMES,
            time_rows=rows,
            heads=PROSPECTS,
            rows=prospect_rows(found),
            bars=_bars(found),
            provenance=provenance,
        )
    )


def _fitted(
    record: Record, base: EngineProfile, max_loras: int, max_cpu_loras: int | None
) -> EngineProfile:
    """Fit costs to the first half of a record, and say so.

    Raises:
        ValueError: There is too little to fit them to, or they do not fit.
    """
    half = [each for each in record.requests if each.arrival.at_s < _middle_s(record)]
    try:
        fitted = fit_record(half, base, max_loras=max_loras, max_cpu_loras=max_cpu_loras)
    except ValueError as error:
        raise ValueError(f"{error}. Give a --profile: {_CALIBRATE}") from error
    typer.echo(f"\nNo --profile: its costs are {fitted.provenance}.")
    typer.echo(", ".join(f"{name} {getattr(fitted, name):.3g}" for name in FITTED))
    return fitted


def _middle_s(record: Record) -> float:
    return record.requests[len(record.requests) // 2].arrival.at_s


def _numbers(text: str) -> list[int]:
    """Return the numbers of a list with commas.

    Raises:
        ValueError: It is none.
    """
    numbers = [int(each) for each in text.split(",") if each]
    if any(each < 1 for each in numbers):
        raise ValueError(f"{text}: less than 1")
    return numbers


def cases_of(
    record: Record, policies: Sequence[str], pods: Sequence[int], slots: Sequence[int]
) -> list[Case]:
    """Return the recorded case, and then every other of these.

    Raises:
        ValueError: The record does not have the pods or their slots, and none are given.
    """
    own = record.max_loras or (slots[0] if slots else None)
    if own is None:
        raise ValueError("the record has no number of adapter slots, or several: give --slots")
    num_pods = record.num_pods or (pods[0] if pods else None)
    if num_pods is None:
        raise ValueError("the record has no pods: give --pods")
    first = Case(record.policy or policies[0], num_pods, own)
    combined = product((first.policy, *policies), pods or (num_pods,), slots or (own,))
    return list(dict.fromkeys((first, *(Case(*each) for each in combined))))


def _about(whole: Record, chosen: Record) -> str:
    seconds = chosen.requests[-1].arrival.at_s
    names = any(each.arrival.adapter for each in chosen.requests)
    broken = "" if whole.is_whole else "; it broke off: its pods are those that answered"
    where = (
        f"to {whole.num_pods} pods by {whole.num_routers} router(s). {whole.num_left_out} were "
        f"refused, failed or had no end, {whole.num_missing} decisions are missing{broken}."
        if whole.num_pods
        else f"of a trace without pods. {whole.num_left_out} were too long."
    )
    return (
        f"{len(chosen.requests)} of {len(whole.requests)} requests, "
        f"{len(chosen.requests) / max(seconds, 1e-9):.1f} a second, {where}"
        + ("" if names else " It names no adapters: nobody knows what loads and slots would cost.")
    )


def time_rows(compared: Sequence[PredictedTime]) -> Rows:
    """Return the recorded times beside the predicted ones, in milliseconds."""
    return [
        (
            each.what,
            each.of,
            f"{1e3 * each.recorded_s:.1f}",
            f"{1e3 * each.predicted_s:.1f}",
            f"{each.error:+.0%}{' OFF' if each.is_off else ''}",
        )
        for each in compared
    ]


def prospect_rows(found: Iterable[Prospect]) -> Rows:
    """Return what each case would have given."""
    return [
        (
            f"`{each.case.policy}`",
            str(each.case.num_pods),
            str(each.case.max_loras),
            _cell(each.served_well, 100),
            _cell(each.gain, 100),
            _cell(each.ttft_p50_s, 1e3),
            _cell(each.ttft_p99_s, 1e3),
            _cell(each.loads_per_1000, 1),
            _cell(each.worst_adapter, 100),
        )
        for each in found
    ]


def _cell(value: Interval, factor: float) -> str:
    mean, low, high = _scaled(value, factor)
    return f"{mean:.1f} ({low:.1f} to {high:.1f})"


def _bars(found: Sequence[Prospect]) -> list[tuple[str, str, str]]:
    """Return the charts of a page, each with its title and no note."""
    cases = [
        (f"{e.case.policy}, {e.case.num_pods} pods, {e.case.max_loras} slots", e) for e in found
    ]
    figures = (
        ("requests served well, %", 100, attrgetter("served_well")),
        ("time to first token, 99th percentile, ms", 1e3, attrgetter("ttft_p99_s")),
    )
    return [
        (
            "",
            bar_chart([(name, *_scaled(of(e), factor), COLOURS[0]) for name, e in cases], label),
            "",
        )
        for label, factor, of in figures
    ]


def _scaled(value: Interval, factor: float) -> tuple[float, float, float]:
    """Return a mean and its bounds, as a prospect has them always."""
    return factor * value.mean, factor * (value.low or 0.0), factor * (value.high or 0.0)
