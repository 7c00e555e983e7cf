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
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from bench.figures import abuse_of, percentile, render_table, total
from bench.load import Burst, chat_body
from bench.machine import describe
from bench.processes import memory, raise_file_limit, require
from bench.report import keep, parser
from bench.stack import StackOptions, Variant, running
from extproc.stack.processes import StackError

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


@dataclass(frozen=True, slots=True)
class Row:
    """One burst.

    Attributes:
        kind: `hold`, `overload` or `connections`.
        num_requests: Sent, all at once; by `connections` one a second on each.
        statuses: How many ended how; those without an answer do not appear.
        num_held: Most open ext_proc streams at one look.
        p50_s: Median time to the end of the answer.
        max_s: Longest.
        rss_before_mb: The router's memory before.
        held_mb: Its memory at the last such look.
        peak_mb: Its most (VmHWM), answers included.
        envoy_peak_mb: The gateway's most.
        envoy_faults: Envoy's counters of what must not happen.
        abuse: The router's limits that Envoy ran into.
    """

    kind: str
    num_requests: int
    statuses: dict[int, int]
    num_held: int
    p50_s: float
    max_s: float
    rss_before_mb: float
    held_mb: float
    peak_mb: float
    envoy_peak_mb: float
    envoy_faults: dict[str, int]
    abuse: dict[str, int]

    @property
    def is_good(self) -> bool:
        """Whether every request was answered as it should be and nobody saw a fault."""
        faults = (*self.envoy_faults.values(), *self.abuse.values())
        allowed = {200, 429} if self.kind == "overload" else {200}
        is_answered = sum(self.statuses.values()) == self.num_requests
        return is_answered and self.statuses.keys() <= allowed and not any(faults)


def hold(args: argparse.Namespace) -> Row:
    """Send a burst that a policy holds for a while.

    Raises:
        StackError: Something did not start.
    """
    options = StackOptions(
        Variant.WIRE,
        message_timeout_s=args.message_timeout,
        router={"policy": {"name": "bench.holdpolicy:Hold", "args": {"hold_s": args.hold}}},
    )
    return _measure("hold", options, args.requests, args.hold, args.body_bytes)


def overload(args: argparse.Namespace) -> Row:
    """Send a burst of which most must wait, and many in vain.

    Raises:
        StackError: Something did not start.
    """
    options = StackOptions(
        Variant.WIRE,
        num_pods=_OVERLOADED_PODS,
        message_timeout_s=args.message_timeout,
        router={"request": {"max_hold_s": _OVERLOAD_HOLD_S}},
    )
    return _measure("overload", options, args.requests, _OVERLOAD_HOLD_S, _LONG_BODY_BYTES)


def connections(args: argparse.Namespace) -> Row:
    """Open connections to the router itself and ask on each of them once a second.

    Raises:
        StackError: Something did not start.
    """
    num_requests = args.connections * max(1, round(args.seconds))
    options = StackOptions(Variant.WIRE)
    return _measure("connections", options, num_requests, args.seconds, 0, args.connections)


def _measure(
    kind: str,
    options: StackOptions,
    num_requests: int,
    lasts_s: float,
    body_bytes: int,
    num_direct: int = 0,
) -> Row:
    """Send a burst by the gateway, or on connections of its own to the router, and watch it."""
    with running(options) as stack:
        assert stack.server is not None
        time.sleep(_SETTLE_S)
        pid = stack.server.pid
        rss_before = memory(pid).now_bytes
        if num_direct:
            burst = Burst(
                f"http://{stack.server.address}{_HEALTH_PATH}",
                num_requests=num_requests,
                connections=num_direct,
                body=_EMPTY_MESSAGE,
                headers=_GRPC_HEADERS,
                rate_per_connection=1.0,
            )
        else:
            burst = Burst(
                f"{stack.url}/v1/chat/completions",
                num_requests=num_requests,
                connections=_CONNECTIONS,
                body=chat_body("adapter-00", body_bytes),
                headers={"content-type": "application/json"},
            )
        num_held, held_bytes = 0, 0
        deadline = time.monotonic() + lasts_s + _MAX_OVERTIME_S
        while burst.is_running and time.monotonic() < deadline:
            num_streams = int(total(stack.metrics(), "extproc_streams_active"))
            if num_streams >= num_held:
                num_held, held_bytes = num_streams, memory(pid).now_bytes
            time.sleep(_SAMPLE_S)
        requests = burst.finish()
        durations = [request.duration_us / 1e6 for request in requests] or [0.0]
        return Row(
            kind=kind,
            num_requests=num_requests,
            statuses=dict(Counter(request.status for request in requests)),
            num_held=num_held,
            p50_s=percentile(durations, 50),
            max_s=max(durations),
            rss_before_mb=rss_before / 1e6,
            held_mb=held_bytes / 1e6,
            peak_mb=memory(pid).peak_bytes / 1e6,
            envoy_peak_mb=memory(stack.gateway.pid).peak_bytes / 1e6,
            envoy_faults=stack.envoy_faults(),
            abuse=abuse_of(stack.metrics()),
        )


def _render(rows: Sequence[Row]) -> str:
    header = ["burst", "requests", "held at once", "statuses", "p50 / max s"]
    header += ["router MB", "Envoy MB", "Envoy's faults", "abuse"]
    cells = [
        [
            each.kind,
            str(each.num_requests),
            str(each.num_held),
            _counts(each.statuses),
            f"{each.p50_s:.1f} / {each.max_s:.1f}",
            f"{each.rss_before_mb:.0f} -> {each.held_mb:.0f}, most {each.peak_mb:.0f}",
            f"{each.envoy_peak_mb:.0f}",
            _counts({name: n for name, n in each.envoy_faults.items() if n}) or "none",
            _counts(each.abuse) or "none",
        ]
        for each in rows
    ]
    return render_table(header, cells)


def _counts(counts: dict[int, int] | dict[str, int]) -> str:
    return ", ".join(f"{name}: {count}" for name, count in counts.items())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all; the exit status is 1 where a request was not answered."""
    args = _parse(arguments)
    try:
        require("h2load")
        raise_file_limit()
        machine = describe()
        rows = [kind(args) for kind in (hold, overload, connections)]
    except StackError as error:
        print(f"bench-hold: {error}", file=sys.stderr)
        return 1
    print(_render(rows))
    keep("hold", args, machine, {"rows": [asdict(each) for each in rows]})
    return 0 if all(each.is_good for each in rows) else 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    options = parser("hold", __doc__)
    add = options.add_argument
    add("--requests", type=int, help="in the burst (default 10000)")
    add("--hold", type=float, help="seconds (default 15)")
    add(
        "--message-timeout",
        type=float,
        default=_MESSAGE_TIMEOUT_S,
        help="Envoy's, seconds (default 1; what `extproc envoy` prints is 10)",
    )
    add("--body-bytes", type=int, default=308)
    add("--connections", type=int, help="to the router (default 1000)")
    add("--seconds", type=float, help="that they stay (default 10)")
    args = options.parse_args(arguments)
    args.requests = args.requests or (1000 if args.quick else 10_000)
    args.hold = args.hold or (3.0 if args.quick else 15.0)
    args.connections = args.connections or (200 if args.quick else 1000)
    args.seconds = args.seconds or (3.0 if args.quick else 10.0)
    return args


if __name__ == "__main__":
    sys.exit(main())
