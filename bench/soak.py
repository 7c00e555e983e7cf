"""Long load with clients that leave, memory flat and every count adding up: `make soak`.

wrk sends on a schedule; beside it one request in a hundred is cut off by its client, at a random
moment: before the body is whole, right after it, or while the pod works on it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import uvloop

from bench.figures import by_label, parse_counters, slope_per_s, total
from bench.hold import envoy_faults, envoy_stats
from bench.load import chat_body, parse_wrk, wrk_command, wrk_environment
from bench.machine import describe
from bench.processes import get, memory, raise_file_limit, require
from bench.report import default_path, write_json
from bench.stack import Stack, StackOptions, Variant, running
from extproc.stack.processes import StackError

BODY_BYTES = 308
_POD_DELAY_S = 0.02  # so that clients leave while a pod works
_CONNECTIONS = 256
_SETTLE_S = 2.0
_DRAIN_S = 20.0  # longer than completions.lost_after_s, which ends what nobody told us about
_WARM_UP_PART = 0.25  # of the samples; left out of the slope
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close with a TCP reset


@dataclass(frozen=True, slots=True)
class Sample:
    """The router at one moment.

    Attributes:
        at_s: Seconds since the load began.
        rss_bytes: Resident memory.
        in_flight: `extproc_picks_in_flight`.
        streams: `extproc_streams_active`.
        picks: `extproc_picks_total`.
        completions: `extproc_completions_total` by outcome.
        rejections: `extproc_rejections_total`.
        unmatched: `extproc_completions_unmatched_total`.
        wire: `extproc_wire_streams_total` by end; all 0 on grpcio.
        abuse: `extproc_wire_abuse_total` by limit.
    """

    at_s: float
    rss_bytes: int
    in_flight: int
    streams: int
    picks: int
    completions: dict[str, int]
    rejections: int
    unmatched: int
    wire: dict[str, int]
    abuse: dict[str, int]


def read_sample(page: str, *, at_s: float, rss_bytes: int) -> Sample:
    """From the router's metrics page."""
    samples = parse_counters(page)
    return Sample(
        at_s=at_s,
        rss_bytes=rss_bytes,
        in_flight=int(total(samples, "extproc_picks_in_flight")),
        streams=int(total(samples, "extproc_streams_active")),
        picks=int(total(samples, "extproc_picks_total")),
        completions=by_label(samples, "extproc_completions_total", "outcome"),
        rejections=int(total(samples, "extproc_rejections_total")),
        unmatched=int(total(samples, "extproc_completions_unmatched_total")),
        wire=by_label(samples, "extproc_wire_streams_total", "end"),
        abuse=by_label(samples, "extproc_wire_abuse_total", "limit"),
    )


def rss_slope_kb_per_min(samples: Sequence[Sample]) -> float:
    """Growth of memory after the warm-up."""
    kept = samples[int(len(samples) * _WARM_UP_PART) :]
    return slope_per_s([(each.at_s, each.rss_bytes / 1e3) for each in kept]) * 60


def find_faults(last: Sample, envoy: dict[str, int], load_errors: int) -> list[str]:
    """Return the inconsistencies once everything has ended; none is good."""
    faults = []
    if last.in_flight or last.streams:
        faults.append(f"{last.in_flight} picks and {last.streams} streams are still open")
    ended = sum(last.completions.values())
    if ended != last.picks:
        faults.append(f"{last.picks} picks, but {ended} ended")
    wrong = {name: last.completions.get(name, 0) for name in ("failed", "expired")}
    faults += [f"{count} picks {outcome}" for outcome, count in wrong.items() if count]
    if last.rejections or last.unmatched:
        faults.append(f"{last.rejections} rejections, {last.unmatched} unmatched completions")
    started = envoy.get("http.openai.ext_proc.streams_started", 0)
    closed = envoy.get("http.openai.ext_proc.streams_closed", 0)
    if started != closed:
        faults.append(f"Envoy started {started} streams and closed {closed}")
    if last.picks > started:
        faults.append(f"{last.picks} picks from {started} streams")
    # Health checks and access logs are streams, too, but not ext_proc's.
    if any(last.wire.values()) and sum(last.wire.values()) < started:
        faults.append(f"Envoy started {started} streams, {last.wire} ended here")
    wrong = {name: last.wire.get(name, 0) for name in ("reset_by_us", "lost", "refused")}
    faults += [f"{count} streams {end}" for end, count in wrong.items() if count]
    faults += [f"limit {limit} passed {n} times" for limit, n in last.abuse.items() if n]
    if load_errors:
        faults.append(f"{load_errors} requests of clients that stayed failed")
    return faults


class Cutter:
    """Clients that leave, each on a connection of its own."""

    def __init__(self, port: int, num_adapters: int, rng: random.Random) -> None:
        self._port = port
        self._rng = rng
        self._bodies = [chat_body(f"adapter-{n:02d}", BODY_BYTES) for n in range(num_adapters)]
        self.num_cut = 0

    async def run(self, rate_per_s: float) -> None:
        """Cut `rate_per_s` requests a second until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                tasks.create_task(self._cut())
                await asyncio.sleep(self._rng.expovariate(rate_per_s))

    async def _cut(self) -> None:
        body = self._rng.choice(self._bodies)
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        whole = self._rng.random() < 0.7
        sent = body if whole else body[: self._rng.randrange(len(body))]
        with contextlib.suppress(OSError):
            _reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            writer.write(head.encode() + sent)
            await asyncio.sleep(self._rng.choice((0.0, 1.0)) * self._rng.random() * _POD_DELAY_S)
            if self._rng.random() < 0.5:
                sock = writer.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            writer.transport.abort()
            self.num_cut += 1


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
    num_adapters = stack.options.num_adapters
    rate = args.rate * (1 - args.cut)
    wrk = await asyncio.create_subprocess_exec(
        *wrk_command(stack.url, args.seconds, _CONNECTIONS),
        env=wrk_environment(BODY_BYTES, num_adapters, rate),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    port = int(stack.url.rpartition(":")[2])
    cutter = Cutter(port, num_adapters, random.Random(args.seed))
    cutting = asyncio.get_running_loop().create_task(cutter.run(args.rate * args.cut))
    output = asyncio.get_running_loop().create_task(wrk.communicate())
    began_s, samples = time.monotonic(), [await _sample(stack, 0.0)]
    try:
        while not output.done():
            await asyncio.wait([output], timeout=args.interval)
            if cutting.done():
                cutting.result()
            samples.append(await _sample(stack, time.monotonic() - began_s))
            _show(samples[-1])
        load = parse_wrk(output.result()[0].decode())
    finally:
        cutting.cancel()
        if wrk.returncode is None:
            wrk.kill()
    last = await _wait_for_the_end(stack, began_s)
    faults = find_faults(last, await asyncio.to_thread(envoy_stats, stack), load.num_errors)
    envoy = await asyncio.to_thread(envoy_faults, stack)
    # A pod's answer that meets a client that has left is no fault; these are.
    faults += [f"Envoy: {name} {count}" for name, count in envoy.items() if count]
    return SoakResult(
        seconds=load.duration_s,
        num_requests=load.num_requests,
        num_cut=cutter.num_cut,
        p99_ms=load.p99_us / 1e3,
        rss_slope_kb_per_min=rss_slope_kb_per_min(samples),
        peak_mb=memory(stack.server.pid).peak_bytes / 1e6,
        envoy_faults=envoy,
        faults=faults,
        samples=[*samples, last],
    )


async def _sample(stack: Stack, at_s: float) -> Sample:
    server = stack.server
    assert server is not None
    page = await asyncio.to_thread(get, f"{stack.server_admin_url}/metrics")
    if page is None:
        raise StackError(f"the router does not answer: {server.log}")
    return read_sample(page, at_s=at_s, rss_bytes=memory(server.pid).now_bytes)


async def _wait_for_the_end(stack: Stack, began_s: float) -> Sample:
    deadline = time.monotonic() + _DRAIN_S
    while True:
        last = await _sample(stack, time.monotonic() - began_s)
        is_over = not last.in_flight and not last.streams
        if is_over or time.monotonic() > deadline:
            return last
        await asyncio.sleep(0.2)


def _show(sample: Sample) -> None:
    print(
        f"{sample.at_s:6.0f} s  {sample.rss_bytes / 1e6:6.1f} MB  {sample.picks} picks, "
        f"{sample.in_flight} in flight, {sample.streams} streams, {sample.completions}",
        file=sys.stderr,
        flush=True,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; the exit status is 1 where something did not add up."""
    args = _parse(arguments)
    try:
        require("wrk")
        raise_file_limit()
        machine = describe()
        options = StackOptions(args.transport, pod_delay_s=_POD_DELAY_S)
        with running(options) as stack:
            time.sleep(_SETTLE_S)
            result = uvloop.run(soak(stack, args))
    except StackError as error:
        print(f"soak: {error}", file=sys.stderr)
        return 1
    print(json.dumps(asdict(replace(result, samples=[])), indent=1))
    path = args.out or default_path("soak", machine, is_quick=args.quick)
    called: dict[str, Any] = {key: value for key, value in vars(args).items() if key != "out"}
    write_json({"machine": machine, "options": called, **asdict(result)}, path)
    print(f"\n{path}", file=sys.stderr)
    return 1 if result.faults else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="10 s: a look only")
    parser.add_argument("--seconds", type=float, help="(default 1800)")
    parser.add_argument(
        "--rate", type=float, default=2000.0, help="requests a second, cut ones too"
    )
    parser.add_argument("--cut", type=float, default=0.01, help="part that its client cuts")
    parser.add_argument("--interval", type=float, help="seconds between samples (default 10)")
    parser.add_argument("--transport", type=Variant, default=Variant.WIRE)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", help="JSON file (default: bench/results/soak-DATE-machine.json)")
    args = parser.parse_args(arguments)
    args.seconds = args.seconds or (10.0 if args.quick else 1800.0)
    args.interval = args.interval or (1.0 if args.quick else 10.0)
    return args


if __name__ == "__main__":
    sys.exit(main())
