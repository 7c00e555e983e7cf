"""Requests held at the gateway, and many connections: `make bench-hold`.

A policy (`bench.holdpolicy`) makes every request wait, behind an Envoy whose message timeout is a
second: each answer must come before Envoy gives up, each hold be announced in time. What counts is
how many of the requests, all sent at once, end with 200, and what the router holds meanwhile.

The same burst under the default policy, with prompts for far more than the pods can compute in the
time that a request may be held: each answer must be a 200 or a 429 of the router's.

A thousand connections, as many Envoy workers would open them, each asking once a second.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from bench.crowd import Plan
from bench.figures import abuse_of, render_table, total
from bench.load import Burst, chat_body
from bench.processes import memory
from bench.report import keep, measuring, parsed, parser
from bench.stack import Stack, StackOptions, Variant, running
from extproc.lab.workload.judge import percentile

_CONNECTIONS = 100  # of the burst's clients
_MESSAGE_TIMEOUT_S = 1.0
_SAMPLE_S = 0.25
_SETTLE_S = 2.0
_MAX_OVERTIME_S = 60.0
_HEALTH_PATH = "/grpc.health.v1.Health/Check"
_OVERLOADED_PODS, _LONG_BODY_BYTES = 4, 4096
"""Some 90 requests a second, by the router's first estimate of how fast pods compute prompts."""
_OVERLOAD_HOLD_S = 5.0  # as manifests/envoy-gateway has it
_EMPTY_MESSAGE = bytes(5)  # not compressed, no bytes
_GRPC_HEADERS = {"content-type": "application/grpc", "te": "trailers"}

Row = dict[str, Any]


def rows(args: argparse.Namespace) -> list[Row]:
    """Return what became of each kind of burst.

    Raises:
        StackError: Something did not start.
    """
    hold = {"policy": {"name": "bench.holdpolicy:Hold", "args": {"hold_s": args.hold}}}
    overload = {"request": {"max_hold_s": _OVERLOAD_HOLD_S}}
    timeout_s, num = args.message_timeout, args.requests
    held = StackOptions(Variant.WIRE, message_timeout_s=timeout_s, router=hold)
    full = StackOptions(Variant.WIRE, Plan(_OVERLOADED_PODS), timeout_s, overload)
    num_direct = args.connections * max(1, round(args.seconds))
    return [
        _row("hold", held, num, args.hold, body_bytes=args.body_bytes),
        _row("overload", full, num, _OVERLOAD_HOLD_S, body_bytes=_LONG_BODY_BYTES),
        _row(
            *("connections", StackOptions(Variant.WIRE), num_direct, args.seconds),
            num_connections=args.connections,
        ),
    ]


def _row(
    kind: str,
    options: StackOptions,
    num_requests: int,
    lasts_s: float,
    *,
    body_bytes: int = 0,
    num_connections: int = 0,
) -> Row:
    """Send a burst by the gateway, or on connections of its own to the router, and watch it."""
    with running(options) as stack:
        assert stack.server is not None
        time.sleep(_SETTLE_S)
        pid = stack.server.pid
        before_bytes = memory(pid).now_bytes
        burst = _burst(stack, num_requests, body_bytes, num_connections)
        num_held, held_bytes = 0, 0
        deadline_s = time.monotonic() + lasts_s + _MAX_OVERTIME_S
        while burst.is_running and time.monotonic() < deadline_s:
            num_streams = int(total(stack.metrics(), "extproc_streams_active"))
            if num_streams >= num_held:
                num_held, held_bytes = num_streams, memory(pid).now_bytes
            time.sleep(_SAMPLE_S)
        requests = burst.result()
        seconds = sorted(each for _, each in requests)
        return {
            **{"kind": kind, "num_requests": num_requests},
            "statuses": dict(Counter(status for status, _ in requests)),
            "num_held": num_held,
            "p50_s": percentile(seconds, 0.5),
            "max_s": max(seconds, default=0.0),
            "rss_before_mb": before_bytes / 1e6,
            "held_mb": held_bytes / 1e6,
            "peak_mb": memory(pid).peak_bytes / 1e6,
            "envoy_peak_mb": memory(stack.gateway.pid).peak_bytes / 1e6,
            "envoy_faults": stack.envoy_faults(),
            "abuse": abuse_of(stack.metrics()),
        }


def _burst(stack: Stack, num_requests: int, body_bytes: int, num_connections: int) -> Burst:
    assert stack.server is not None
    if num_connections:
        return Burst(
            f"http://{stack.server.address}{_HEALTH_PATH}",
            num_requests=num_requests,
            connections=num_connections,
            body=_EMPTY_MESSAGE,
            headers=_GRPC_HEADERS,
            rate_per_connection=1.0,
        )
    return Burst(
        f"{stack.url}/v1/chat/completions",
        num_requests=num_requests,
        connections=_CONNECTIONS,
        body=chat_body("adapter-00", body_bytes),
        headers={"content-type": "application/json"},
    )


def is_good(row: Row) -> bool:
    """Return whether every request was answered as it should be and nobody saw a fault."""
    allowed = {200, 429} if row["kind"] == "overload" else {200}
    statuses, faults = row["statuses"], (*row["envoy_faults"].values(), *row["abuse"].values())
    is_answered = sum(statuses.values()) == row["num_requests"]
    return is_answered and statuses.keys() <= allowed and not any(faults)


def _render(found: Sequence[Row]) -> str:
    header = ["burst", "requests", "held at once", "statuses", "p50 / max s"]
    header += ["router MB", "Envoy MB", "Envoy's faults", "abuse"]
    cells = [
        [
            *(str(each[name]) for name in ("kind", "num_requests", "num_held")),
            _counts(each["statuses"]),
            f"{each['p50_s']:.1f} / {each['max_s']:.1f}",
            f"{each['rss_before_mb']:.0f} -> {each['held_mb']:.0f}, most {each['peak_mb']:.0f}",
            f"{each['envoy_peak_mb']:.0f}",
            _counts(each["envoy_faults"]) or "none",
            _counts(each["abuse"]) or "none",
        ]
        for each in found
    ]
    return render_table(header, cells)


def _counts(counts: Mapping[Any, int]) -> str:
    return ", ".join(f"{name}: {count}" for name, count in counts.items() if count)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all; the exit status is 1 where a request was not answered."""
    args = _parse(arguments)
    with measuring("bench-hold", "h2load") as machine:
        found = rows(args)
    print(_render(found))
    keep("hold", args, machine, {"rows": found})
    return 0 if all(is_good(each) for each in found) else 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    options = parser("hold", __doc__)
    add = options.add_argument
    add("--requests", type=int, help="in the burst (default 10000)")
    add("--hold", type=float, help="seconds (default 15)")
    said = "Envoy's, seconds (default 1; what `extproc envoy` prints is 10)"
    add("--message-timeout", type=float, default=_MESSAGE_TIMEOUT_S, help=said)
    add("--body-bytes", type=int, default=308)
    add("--connections", type=int, help="to the router (default 1000)")
    add("--seconds", type=float, help="that they stay (default 10)")
    return parsed(
        *(options, arguments),
        usual={"requests": 10_000, "hold": 15.0, "connections": 1000, "seconds": 10.0},
        quick={"requests": 1000, "hold": 3.0, "connections": 200, "seconds": 3.0},
    )


if __name__ == "__main__":
    sys.exit(main())
