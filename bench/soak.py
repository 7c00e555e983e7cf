"""Long load with clients that leave, memory flat and every count adding up: `make soak`.

wrk sends on a schedule; beside it one request in a hundred is cut off by its client, at a random
moment: before the body is whole, right after it, or while the pod works on it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Mapping, Sequence
from statistics import linear_regression
from typing import Any

from bench.crowd import Plan
from bench.figures import abuse_of, by_label, total
from bench.load import Wrk
from bench.processes import memory, started
from bench.report import keep, measuring, parsed, parser
from bench.stack import Stack, StackOptions, Variant, running
from extproc.stack.processes import StackError
from tests.e2e.fuzz.attack import Plan as AttackPlan
from tests.e2e.fuzz.scenario import settled, unbalanced
from tests.e2e.fuzz.target import Attack

_PODS = Plan(delay_s=0.02)  # so that clients leave while a pod works
_BODY_BYTES = 308
_CONNECTIONS = 256
_CUT_PART = 0.01
_SETTLE_S = 2.0
_MAX_TRIES = 5
_WARM_UP_PART = 0.25  # of the samples; left out of the slope
_COUNTS = {
    "in_flight": "extproc_picks_in_flight",
    "streams": "extproc_streams_active",
    "picks": "extproc_picks_total",
}
_MUST_BE_0 = {
    "extproc_completions_total": ("outcome", ("failed", "expired")),
    "extproc_wire_streams_total": ("end", ("reset_by_us", "lost", "refused")),
}

Sample = dict[str, float]
"""The router at one moment: seconds since the load began, its memory, `_COUNTS`."""


def find_faults(last: dict[str, float], envoy: Mapping[str, int], load_errors: int) -> list[str]:
    """Return the inconsistencies of the metrics once everything has ended; none is good."""
    faults = unbalanced(last)
    for name, (label, values) in _MUST_BE_0.items():
        counts = by_label(last, name, label)
        faults += [f"{counts[each]} {each}: {name}" for each in values if counts.get(each)]
    for name in ("extproc_rejections_total", "extproc_completions_unmatched_total"):
        faults += [f"{num:.0f}: {name}"] if (num := total(last, name)) else []
    began = envoy.get("http.openai.ext_proc.streams_started", 0)
    closed = envoy.get("http.openai.ext_proc.streams_closed", 0)
    if began != closed:
        faults.append(f"Envoy started {began} streams and closed {closed}")
    if (picks := total(last, "extproc_picks_total")) > began:
        faults.append(f"{picks:.0f} picks from {began} streams")
    # Health checks and access logs are streams, too, but not ext_proc's.
    wire = by_label(last, "extproc_wire_streams_total", "end")
    if any(wire.values()) and sum(wire.values()) < began:
        faults.append(f"Envoy started {began} streams, {wire} ended here")
    faults += [f"limit {limit} passed {n} times" for limit, n in abuse_of(last).items()]
    if load_errors:
        faults.append(f"{load_errors} requests of clients that stayed failed")
    return faults


def soak(stack: Stack, args: argparse.Namespace) -> dict[str, Any]:
    """Run the load, look each interval, and wait for the end of what is in flight."""
    assert stack.server is not None
    plan = AttackPlan(
        envoy_port=stack.gateway.port,
        rate_per_s=args.rate * _CUT_PART,
        num_pods=0,
        kinds=("client/leaves",),
        yields=False,
    )
    with started(Attack(plan)) as leaving:
        wrk = Wrk(
            stack.url,
            args.seconds,
            body_bytes=_BODY_BYTES,
            num_adapters=stack.options.crowd.num_adapters,
            rate_per_s=args.rate * (1 - _CUT_PART),
            connections=_CONNECTIONS,
        )
        began_s, samples = time.monotonic(), [_sample(stack, 0.0)]
        while wrk.is_running:
            leaving.check_running()
            time.sleep(args.interval)
            samples.append(_sample(stack, time.monotonic() - began_s))
            print(samples[-1], file=sys.stderr, flush=True)
        load = wrk.result()
        tally = asyncio.run(leaving.end())
    last, stats = asyncio.run(settled(stack.metrics)), stack.envoy_stats()
    kept = samples[int(len(samples) * _WARM_UP_PART) :]
    fit = linear_regression([each["at_s"] for each in kept], [each["rss_mb"] for each in kept])
    # A pod's answer that meets a client that has left is no fault; Envoy's own are.
    envoy = {f"Envoy: {name} {count}" for name, count in stack.envoy_faults().items() if count}
    return {
        "seconds": load["duration_us"] / 1e6,
        "num_requests": load["requests"],
        "num_cut": tally.num_begun,
        "p99_ms": load["p99_us"] / 1e3,
        "rss_slope_kb_per_min": 60e3 * fit.slope,
        "peak_mb": memory(stack.server.pid).peak_bytes / 1e6,
        "faults": find_faults(last, stats, load["errors"]) + sorted(envoy),
        "samples": [*samples, _sample(stack, time.monotonic() - began_s)],
    }


def _sample(stack: Stack, at_s: float) -> Sample:
    assert stack.server is not None
    # A machine that has no time for the router for a while is no fault of the router's.
    tries = iter(range(_MAX_TRIES))
    while not (found := stack.metrics()):
        if next(tries, None) is None:
            raise StackError(f"the router does not answer: {stack.server.log}")
    counts = {short: total(found, name) for short, name in _COUNTS.items()}
    return {"at_s": at_s, "rss_mb": memory(stack.server.pid).now_bytes / 1e6, **counts}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; the exit status is 1 where something did not add up."""
    args = _parse(arguments)
    with (
        measuring("soak", "wrk") as machine,
        running(StackOptions(Variant.WIRE, _PODS)) as stack,
    ):
        time.sleep(_SETTLE_S)
        result = soak(stack, args)
    print(json.dumps({**result, "samples": len(result["samples"])}, indent=1))
    keep("soak", args, machine, result)
    return 1 if result["faults"] else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    options = parser("soak", __doc__)
    add = options.add_argument
    add("--seconds", type=float, help="(default 1800)")
    add("--rate", type=float, default=2000.0, help="requests a second, cut ones too")
    add("--interval", type=float, help="seconds between samples (default 10)")
    return parsed(
        *(options, arguments),
        usual={"seconds": 1800.0, "interval": 10.0},
        quick={"seconds": 10.0, "interval": 1.0},
    )


if __name__ == "__main__":
    sys.exit(main())
