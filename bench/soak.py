"""Long load with clients that leave, memory flat and every count adding up: `make soak`.

wrk sends on a schedule; beside it one request in a hundred is cut off by its client, at a random
moment: before the body is whole, right after it, or while the pod works on it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import linear_regression

import uvloop

from bench.figures import abuse_of, by_label, total
from bench.fuzzattack import Plan
from bench.load import parse_wrk, wrk_command, wrk_environment
from bench.machine import describe
from bench.processes import memory, raise_file_limit, require
from bench.report import keep, parser
from bench.scenario import settled, unbalanced
from bench.stack import Stack, StackOptions, Variant, running
from bench.target import Attack
from extproc.stack.processes import StackError

BODY_BYTES = 308
_POD_DELAY_S = 0.02  # so that clients leave while a pod works
_CONNECTIONS = 256
_CUT_PART = 0.01
_SETTLE_S = 2.0
_WARM_UP_PART = 0.25  # of the samples; left out of the slope


@dataclass(frozen=True, slots=True)
class Sample:
    """The router at one moment.

    Attributes:
        at_s: Seconds since the load began.
        rss_bytes: Resident memory.
        in_flight: Picks that have not ended.
        streams: Open.
        picks: So far.
    """

    at_s: float
    rss_bytes: int
    in_flight: int
    streams: int
    picks: int

    def __str__(self) -> str:
        held = f"{self.at_s:6.0f} s  {self.rss_bytes / 1e6:6.1f} MB"
        return f"{held}  {self.picks} picks, {self.in_flight} in flight, {self.streams} streams"


def rss_slope_kb_per_min(samples: Sequence[Sample]) -> float:
    """Growth of memory after the warm-up."""
    kept = samples[int(len(samples) * _WARM_UP_PART) :]
    held = [each.rss_bytes / 1e3 for each in kept]
    return linear_regression([each.at_s for each in kept], held).slope * 60


def find_faults(last: dict[str, float], envoy: Mapping[str, int], load_errors: int) -> list[str]:
    """Return the inconsistencies of the metrics once everything has ended; none is good."""
    faults = unbalanced(last)
    completions = by_label(last, "extproc_completions_total", "outcome")
    wrong = {name: completions.get(name, 0) for name in ("failed", "expired")}
    faults += [f"{count} picks {outcome}" for outcome, count in wrong.items() if count]
    rejections = int(total(last, "extproc_rejections_total"))
    unmatched = int(total(last, "extproc_completions_unmatched_total"))
    if rejections or unmatched:
        faults.append(f"{rejections} rejections, {unmatched} unmatched completions")
    started = envoy.get("http.openai.ext_proc.streams_started", 0)
    closed = envoy.get("http.openai.ext_proc.streams_closed", 0)
    if started != closed:
        faults.append(f"Envoy started {started} streams and closed {closed}")
    picks = int(total(last, "extproc_picks_total"))
    if picks > started:
        faults.append(f"{picks} picks from {started} streams")
    # Health checks and access logs are streams, too, but not ext_proc's.
    wire = by_label(last, "extproc_wire_streams_total", "end")
    if wire and sum(wire.values()) < started:
        faults.append(f"Envoy started {started} streams, {wire} ended here")
    wrong = {name: wire.get(name, 0) for name in ("reset_by_us", "lost", "refused")}
    faults += [f"{count} streams {end}" for end, count in wrong.items() if count]
    faults += [f"limit {limit} passed {n} times" for limit, n in abuse_of(last).items()]
    if load_errors:
        faults.append(f"{load_errors} requests of clients that stayed failed")
    return faults


@dataclass(frozen=True, slots=True)
class SoakResult:
    """One run.

    Attributes:
        seconds: Of load.
        num_requests: Answered to clients that stayed.
        num_cut: Requests that their clients cut.
        p99_ms: Of the answered.
        rss_slope_kb_per_min: Growth of the router's memory after the warm-up.
        peak_mb: Its most.
        envoy_faults: Envoy's counters of what must not happen.
        faults: What did not add up.
        samples: One each interval, and the last after everything had ended.
    """

    seconds: float
    num_requests: int
    num_cut: int
    p99_ms: float
    rss_slope_kb_per_min: float
    peak_mb: float
    envoy_faults: dict[str, int]
    faults: list[str]
    samples: list[Sample]


async def soak(stack: Stack, args: argparse.Namespace) -> SoakResult:
    """Run the load, look each interval, and wait for the end of what is in flight."""
    assert stack.server is not None
    plan = Plan(
        envoy_port=stack.gateway.port,
        rate_per_s=args.rate * _CUT_PART,
        num_pods=0,
        kinds=("client/leaves",),
        yields=False,
    )
    async with Attack(plan) as leaving:
        wrk = await asyncio.create_subprocess_exec(
            *wrk_command(stack.url, args.seconds, _CONNECTIONS),
            env=wrk_environment(
                BODY_BYTES, stack.options.num_adapters, args.rate * (1 - _CUT_PART)
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        output = asyncio.get_running_loop().create_task(wrk.communicate())
        began_s, samples = time.monotonic(), [await _sample(stack, 0.0)]
        try:
            while not output.done():
                await asyncio.wait([output], timeout=args.interval)
                leaving.check_running()
                samples.append(await _sample(stack, time.monotonic() - began_s))
                print(samples[-1], file=sys.stderr, flush=True)
            load = parse_wrk(output.result()[0].decode())
        finally:
            if wrk.returncode is None:
                wrk.kill()
        tally = await leaving.end()
    last = await settled(stack.metrics)
    samples.append(await _sample(stack, time.monotonic() - began_s))
    envoy = await asyncio.to_thread(stack.envoy_stats)
    faults = find_faults(last, envoy, load.num_errors)
    envoy = await asyncio.to_thread(stack.envoy_faults)
    # A pod's answer that meets a client that has left is no fault; these are.
    faults += [f"Envoy: {name} {count}" for name, count in envoy.items() if count]
    return SoakResult(
        seconds=load.duration_s,
        num_requests=load.num_requests,
        num_cut=tally.num_begun,
        p99_ms=load.p99_us / 1e3,
        rss_slope_kb_per_min=rss_slope_kb_per_min(samples[:-1]),
        peak_mb=memory(stack.server.pid).peak_bytes / 1e6,
        envoy_faults=envoy,
        faults=faults,
        samples=samples,
    )


async def _sample(stack: Stack, at_s: float) -> Sample:
    assert stack.server is not None
    found = await asyncio.to_thread(stack.metrics)
    if not found:
        raise StackError(f"the router does not answer: {stack.server.log}")
    names = ("extproc_picks_in_flight", "extproc_streams_active", "extproc_picks_total")
    counts = (int(total(found, name)) for name in names)
    return Sample(at_s, memory(stack.server.pid).now_bytes, *counts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; the exit status is 1 where something did not add up."""
    args = _parse(arguments)
    try:
        require("wrk")
        raise_file_limit()
        machine = describe()
        options = StackOptions(Variant.WIRE, pod_delay_s=_POD_DELAY_S)
        with running(options) as stack:
            time.sleep(_SETTLE_S)
            result = uvloop.run(soak(stack, args))
    except StackError as error:
        print(f"soak: {error}", file=sys.stderr)
        return 1
    print(json.dumps(asdict(replace(result, samples=[])), indent=1))
    keep("soak", args, machine, asdict(result))
    return 1 if result.faults else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    options = parser("soak", __doc__)
    add = options.add_argument
    add("--seconds", type=float, help="(default 1800)")
    add("--rate", type=float, default=2000.0, help="requests a second, cut ones too")
    add("--interval", type=float, help="seconds between samples (default 10)")
    args = options.parse_args(arguments)
    args.seconds = args.seconds or (10.0 if args.quick else 1800.0)
    args.interval = args.interval or (1.0 if args.quick else 10.0)
    return args


if __name__ == "__main__":
    sys.exit(main())
