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
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from bench.figures import by_label, count_statuses, parse_counters, percentile, render_table, total
from bench.load import Burst, chat_body
from bench.machine import describe
from bench.processes import get, memory, raise_file_limit, require
from bench.report import default_path, write_json
from bench.stack import Stack, StackOptions, Variant, running
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
_FAULTS = (
    "http.openai.downstream_rq_5xx",
    "http.openai.ext_proc.message_timeouts",
    "http.openai.ext_proc.spurious_msgs_received",
    "http.openai.ext_proc.streams_failed",
    "cluster.router.http2.keepalive_timeout",
)
_GRPC_HEADERS = {"content-type": "application/grpc", "te": "trailers"}


@dataclass(frozen=True, slots=True)
class HoldResult:
    """One burst.

    Attributes:
        kind: `hold` or `overload`.
        transport: That carried it.
        num_requests: Sent, all at once.
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
    transport: str
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


@dataclass(frozen=True, slots=True)
class ConnectionsResult:
    """Many connections to the router itself.

    Attributes:
        transport: That carried them.
        num_connections: Open at once.
        statuses: Of the requests on them.
        num_requests: Sent.
        rss_before_mb: The router's memory before.
        rss_mb: Its memory while they are open.
        peak_mb: Its most.
    """

    transport: str
    num_connections: int
    statuses: dict[int, int]
    num_requests: int
    rss_before_mb: float
    rss_mb: float
    peak_mb: float

    @property
    def is_good(self) -> bool:
        """Whether every request was answered."""
        return self.statuses == {200: self.num_requests}


def hold(
    transport: Variant,
    num_requests: int,
    hold_s: float,
    body_bytes: int,
    message_timeout_s: float = _MESSAGE_TIMEOUT_S,
) -> HoldResult:
    """Send a burst that a policy holds for `hold_s`.

    Raises:
        StackError: Something did not start.
    """
    options = StackOptions(
        transport,
        message_timeout_s=message_timeout_s,
        router={"policy": {"name": "bench.holdpolicy:Hold", "args": {"hold_s": hold_s}}},
    )
    return _burst("hold", options, num_requests, hold_s, body_bytes)


def overload(transport: Variant, num_requests: int, message_timeout_s: float) -> HoldResult:
    """Send a burst of which most must wait, and many in vain.

    Raises:
        StackError: Something did not start.
    """
    options = StackOptions(
        transport,
        num_pods=_OVERLOADED_PODS,
        message_timeout_s=message_timeout_s,
        router={"request": {"max_hold_s": _OVERLOAD_HOLD_S}},
    )
    return _burst("overload", options, num_requests, _OVERLOAD_HOLD_S, _LONG_BODY_BYTES)


def _burst(
    kind: str, options: StackOptions, num_requests: int, hold_s: float, body_bytes: int
) -> HoldResult:
    """Send a burst and watch it wait."""
    with running(options) as stack:
        time.sleep(_SETTLE_S)
        pid = _router_pid(stack)
        rss_before = memory(pid).now_bytes
        burst = Burst(
            f"{stack.url}/v1/chat/completions",
            num_requests=num_requests,
            connections=_CONNECTIONS,
            body=chat_body("adapter-00", body_bytes),
            headers={"content-type": "application/json"},
        )
        num_held, held_bytes = 0, 0
        deadline = time.monotonic() + hold_s + _MAX_OVERTIME_S
        while burst.is_running and time.monotonic() < deadline:
            num_streams = _num_streams(stack)
            if num_streams >= num_held:
                num_held, held_bytes = num_streams, memory(pid).now_bytes
            time.sleep(_SAMPLE_S)
        requests = burst.finish()
        durations = [request.duration_us / 1e6 for request in requests] or [0.0]
        return HoldResult(
            kind=kind,
            transport=options.variant,
            num_requests=num_requests,
            statuses=count_statuses(requests),
            num_held=num_held,
            p50_s=percentile(durations, 50),
            max_s=max(durations),
            rss_before_mb=rss_before / 1e6,
            held_mb=held_bytes / 1e6,
            peak_mb=memory(pid).peak_bytes / 1e6,
            envoy_peak_mb=memory(stack.gateway.pid).peak_bytes / 1e6,
            envoy_faults=envoy_faults(stack),
            abuse=by_label(_metrics(stack), "extproc_wire_abuse_total", "limit"),
        )


def connections(transport: Variant, num_connections: int, duration_s: float) -> ConnectionsResult:
    """Open connections to the router and ask on each of them once a second.

    Raises:
        StackError: Something did not start.
    """
    with running(StackOptions(transport)) as stack:
        assert stack.server is not None
        time.sleep(_SETTLE_S)
        pid = _router_pid(stack)
        rss_before, rss = memory(pid).now_bytes, 0
        num_requests = num_connections * max(1, round(duration_s))
        burst = Burst(
            f"http://{stack.server.address}{_HEALTH_PATH}",
            num_requests=num_requests,
            connections=num_connections,
            body=_EMPTY_MESSAGE,
            headers=_GRPC_HEADERS,
            rate_per_connection=1.0,
        )
        deadline = time.monotonic() + duration_s + _MAX_OVERTIME_S
        while burst.is_running and time.monotonic() < deadline:
            rss = max(rss, memory(pid).now_bytes)
            time.sleep(_SAMPLE_S)
        return ConnectionsResult(
            transport=transport,
            num_connections=num_connections,
            statuses=count_statuses(burst.finish()),
            num_requests=num_requests,
            rss_before_mb=rss_before / 1e6,
            rss_mb=rss / 1e6,
            peak_mb=memory(pid).peak_bytes / 1e6,
        )


def _router_pid(stack: Stack) -> int:
    assert stack.server is not None
    return stack.server.pid


def _num_streams(stack: Stack) -> int:
    return int(total(_metrics(stack), "extproc_streams_active"))


def _metrics(stack: Stack) -> dict[str, float]:
    if not stack.server_admin_url:
        return {}
    return parse_counters(get(f"{stack.server_admin_url}/metrics") or "")


def envoy_faults(stack: Stack) -> dict[str, int]:
    """Envoy's counters that must stay 0: its own errors, and what it holds against our answers."""
    counts = envoy_stats(stack)
    return {name.rpartition(".")[2]: counts.get(name, 0) for name in _FAULTS}


def envoy_stats(stack: Stack) -> dict[str, int]:
    """The gateway's counters of requests, ext_proc streams and the router's cluster."""
    filters = "^http.openai|^cluster.router"
    page = get(f"{stack.gateway.admin_url}/stats?type=Counters&filter={filters}") or ""
    lines = (line.partition(": ") for line in page.splitlines())
    return {name: int(value) for name, _, value in lines}


def _render(holds: Sequence[HoldResult], many: Sequence[ConnectionsResult]) -> str:
    header = [
        "burst",
        "transport",
        "requests",
        "held at once",
        "statuses",
        "p50 / max s",
        "router MB",
    ]
    header += ["Envoy MB", "Envoy's faults", "abuse"]
    rows = [
        [
            each.kind,
            each.transport,
            str(each.num_requests),
            str(each.num_held),
            _counts(each.statuses),
            f"{each.p50_s:.1f} / {each.max_s:.1f}",
            f"{each.rss_before_mb:.0f} -> {each.held_mb:.0f}, most {each.peak_mb:.0f}",
            f"{each.envoy_peak_mb:.0f}",
            _counts({name: n for name, n in each.envoy_faults.items() if n}) or "none",
            _counts({name: n for name, n in each.abuse.items() if n}) or "none",
        ]
        for each in holds
    ]
    parts = [render_table(header, rows)] if rows else []
    header = ["transport", "connections", "statuses", "router MB", "most"]
    rows = [
        [
            each.transport,
            str(each.num_connections),
            _counts(each.statuses),
            f"{each.rss_before_mb:.0f} -> {each.rss_mb:.0f}",
            f"{each.peak_mb:.0f}",
        ]
        for each in many
    ]
    return "\n\n".join([*parts, render_table(header, rows)] if rows else parts)


def _counts(counts: dict[int, int] | dict[str, int]) -> str:
    return ", ".join(f"{name}: {count}" for name, count in counts.items())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run both; the exit status is 1 where a request on our own transport was not answered."""
    args = _parse(arguments)
    try:
        require("h2load")
        raise_file_limit()
        machine = describe()
        holds = [
            hold(t, args.requests, args.hold, args.body_bytes, args.message_timeout)
            for t in args.transports
        ]
        holds += [
            overload(t, args.requests, args.message_timeout)
            for t in args.transports
            if t is not Variant.CONSTANT
        ]
        routers = [t for t in args.transports if t is not Variant.CONSTANT]
        many = [connections(t, args.connections, args.seconds) for t in routers]
    except StackError as error:
        print(f"bench-hold: {error}", file=sys.stderr)
        return 1
    print(_render(holds, many))
    path = args.out or default_path("hold", machine, is_quick=args.quick)
    results = {
        "machine": machine,
        "options": {key: value for key, value in vars(args).items() if key != "out"},
        "holds": [asdict(each) for each in holds],
        "connections": [asdict(each) for each in many],
    }
    write_json(results, path)
    print(f"\n{path}", file=sys.stderr)
    every: list[HoldResult | ConnectionsResult] = [*holds, *many]
    ours = [each for each in every if each.transport == Variant.WIRE]
    return 0 if all(each.is_good for each in ours) else 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.hold", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter: a look only")
    parser.add_argument("--requests", type=int, help="in the burst (default 10000)")
    parser.add_argument("--hold", type=float, help="seconds (default 15)")
    parser.add_argument(
        "--message-timeout",
        type=float,
        default=_MESSAGE_TIMEOUT_S,
        help="Envoy's, seconds (default 1; what `extproc envoy` prints is 10)",
    )
    parser.add_argument("--body-bytes", type=int, default=308)
    parser.add_argument("--connections", type=int, help="to the router (default 1000)")
    parser.add_argument("--seconds", type=float, help="that they stay (default 10)")
    parser.add_argument(
        "--transports",
        type=Variant,
        nargs="+",
        default=[Variant.GRPCIO, Variant.CONSTANT, Variant.WIRE],
    )
    parser.add_argument("--out", help="JSON file (default: bench/results/hold-DATE-machine.json)")
    args = parser.parse_args(arguments)
    args.requests = args.requests or (1000 if args.quick else 10_000)
    args.hold = args.hold or (3.0 if args.quick else 15.0)
    args.connections = args.connections or (200 if args.quick else 1000)
    args.seconds = args.seconds or (3.0 if args.quick else 10.0)
    return args


if __name__ == "__main__":
    sys.exit(main())
