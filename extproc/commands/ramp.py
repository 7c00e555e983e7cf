"""The command `extproc loadtest ramp`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from extproc.commands.session import (
    NOT_MEASURED,
    FleetOption,
    KeyOption,
    ProfileOption,
    TpotOption,
    TtftOption,
    key_headers,
    refusing,
    run_until_signalled,
)
from extproc.lab.loadtest.loads import Overrides, find_load
from extproc.lab.loadtest.measures import error_words
from extproc.lab.loadtest.ramp import LaggedError, RampPlan, Step, run_ramp
from extproc.lab.loadtest.targets import parse_target
from extproc.lab.trials.search import CapacitySearch
from extproc.stack.processes import SignalledError


def ramp_command(
    target: Annotated[
        str, typer.Argument(help="Target: policy:NAME, envoy:NAME or url:http://HOST:PORT.")
    ],
    load: Annotated[
        str,
        typer.Option(help="Load to send: a suite, SUITE/SCENARIO, a workload's name, or its file."),
    ] = "standard",
    seconds: Annotated[float, typer.Option(min=1, help="Seconds per step.")] = 20.0,
    from_rps: Annotated[
        float, typer.Option("--from", min=0.01, help="Requests per second of the first step.")
    ] = 4.0,
    part: Annotated[
        float | None,
        typer.Option(
            "--part", min=0.01, max=1, help="Share of requests that must meet the objectives."
        ),
    ] = None,
    resolution: Annotated[
        float,
        typer.Option(
            min=1.01,
            help="Stop when the lowest missed rate is within this ratio of the highest passed one.",
        ),
    ] = 1.1,
    seed: Annotated[int, typer.Option(help="Seed of the workload.")] = 1,
    fleet: FleetOption = None,
    profile: ProfileOption = "",
    ttft_s: TtftOption = None,
    tpot_s: TpotOption = None,
    api_key: KeyOption = "",
) -> None:
    """Search for the highest rate at which a target meets its objectives."""
    with refusing():
        spec = parse_target(target)
        found = find_load(load, Overrides(fleet or (), profile, (ttft_s, tpot_s, part)))
        plan = RampPlan(found, seconds, from_rps, seed)
        slo = plan.block(from_rps).slo
    console = Console(highlight=False)
    console.print(
        f"{spec.label}: steps of {seconds:g} s, until {slo.target:.0%} of the requests get their "
        f"first token within {slo.ttft_s:g} s and each further one within {slo.tpot_s:g} s",
        markup=False,
    )
    search = CapacitySearch(slo.target, resolution)
    status = 0
    try:
        with console.status("") as shown, refusing():
            run_until_signalled(
                run_ramp(
                    spec,
                    plan,
                    search,
                    headers=key_headers(api_key),
                    on_stage=shown.update,
                    on_step=lambda step: console.print(step_words(step), markup=False),
                )
            )
    except LaggedError as error:
        console.print(f"the search ends: {error}", style="red", markup=False, soft_wrap=True)
        status = NOT_MEASURED
    except SignalledError as error:
        console.print(str(error))
        status = 128 + error.number
    console.print(conclusion(search), style="bold", markup=False)
    raise typer.Exit(status)


def step_words(step: Step) -> str:
    """Return a step as one line."""
    sign = "ok    " if step.has_passed else "missed"
    if step.run is None or step.run.result is None:
        return f"{sign} {step.rate_rps:8.2f}/s  at most {step.attainment:.1%}: aborted"
    summary = step.run.result.summary
    return (
        f"{sign} {step.rate_rps:8.2f}/s  {step.attainment:.1%} of {summary.num_requests} requests, "
        f"TTFT p50 {1e3 * summary.ttft_s.p50:.0f} ms, p99 {1e3 * summary.ttft_s.p99:.0f} ms"
        + (f", {error_words(summary)}" if summary.errors else "")
    )


def conclusion(search: CapacitySearch) -> str:
    """Return the result of a search, or of a part of it, as one line."""
    low, high = search.bracket
    if not search.points:
        return "SLO capacity: nothing was measured"
    if high is None:
        return f"SLO capacity: at least {low:.2f} requests/s; no higher rate was measured"
    if not low:
        return f"SLO capacity: below {high:.2f} requests/s; no lower rate was measured"
    return (
        f"SLO capacity: {search.capacity_rps:.2f} requests/s ({low:.2f} passed, {high:.2f} did not)"
    )
