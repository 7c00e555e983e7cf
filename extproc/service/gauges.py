"""Metrics that the parts of the service count themselves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping

from extproc.fleet.tpot import Tpots
from extproc.observe.attainment import CappedLabel
from extproc.observe.telemetry import Telemetry
from extproc.queue import HoldQueue
from extproc.service.liveconfig import LiveConfig
from extproc.service.parts import Parts, Traffic
from extproc.wire.httpserver import HttpLimit
from extproc.wire.limits import Counters

_MAX_PRIORITIES = 50
"""With a label of their own; anyone may write an InferenceObjective."""


def add_gauges(
    parts: Parts, live_config: LiveConfig, why_not_ready: Callable[[], list[str]]
) -> None:
    """Register the parts' own counts, read at each scrape of the metrics."""
    telemetry, services, routing = parts.telemetry, parts.services, parts.routing
    add = telemetry.add_gauge
    processor, completions, eds = services.processor, services.completions, services.eds
    decisions, observers = parts.recorder.decisions, parts.recorder.observers
    pool, routes, router = routing.pool, routing.routes, routing.router
    clock, losses, endpoints = parts.clock, parts.pods.losses, parts.endpoints
    pace, slow = parts.pods.pace, parts.pods.slow
    add("ready", "Accepts requests: synced, and not draining", lambda: not why_not_ready())
    add("streams_active", "Open ext_proc streams", lambda: processor.num_open)
    add("picks_in_flight", "Picks that have not ended", lambda: len(pool.flights))
    telemetry.add_gauges(
        "endpoint_oldest_in_flight_seconds",
        "Age of the oldest pick that has not ended",
        "endpoint",
        lambda: pool.oldest_in_flight_s(now=clock()),
    )
    telemetry.add_counters(
        "ejections",
        "Endpoints ejected for failing where other endpoints do not",
        "reason",
        lambda: {str(cause): count for cause, count in pool.outliers.num_ejections.items()},
    )
    telemetry.add_gauges(
        "route_slo_target_ratio",
        "Share of a route's requests that should be answered in time",
        "route",
        lambda: routes.targets,
    )
    telemetry.add_gauges(
        "tpot_target_ratio",
        "Share of a route's streamed responses that should keep their time per output token",
        "route",
        lambda: routes.tpot_targets,
    )
    telemetry.add_counters(
        "policy_failures",
        "Choices for which a policy raised an error or chose an endpoint that is not allowed",
        "policy",
        lambda: routing.num_policy_failures,
    )
    add_queue_gauges(telemetry, router.queue, clock)
    telemetry.add_gauges(
        "endpoint_slowness_ratio",
        "Time per output token, relative to the other pods of the group; 1 is equal",
        "endpoint",
        lambda: {address: each.ratio for address, each in slow.compare(routing.snapshot()).items()},
    )
    add("held_seconds_limit", "Longest time that a request may be held", lambda: router.max_hold_s)
    add("endpoints", "Endpoints that should send load reports", lambda: losses.num_due)
    add(
        "endpoints_lost",
        "Endpoints that should send load reports but do not, or cannot be reached",
        lambda: losses.num_lost,
    )
    add(
        "scrape_interval_seconds",
        "Time between two scrapes of a busy pod; longer while the event loop is late",
        lambda: pace.interval_s,
    )
    telemetry.add_gauges(
        "cpu_cache_adapters",
        "Adapters that each pod's CPU cache holds, as configured and as learned",
        ("group", "source"),
        parts.cache_watch.sizes,
    )
    _add_tpot(telemetry, parts.accounting.tpots)
    add("access_log_streams", "Open access log streams", lambda: completions.num_streams)
    add("eds_streams", "Open endpoint discovery streams", lambda: eds.num_streams)
    add(
        "config_failures",
        "Changes of the configuration file that could not be applied",
        lambda: live_config.num_failures,
    )
    add(
        "endpoints_left_out",
        "Endpoints left out because there are more than the router uses",
        lambda: endpoints.num_left_out,
    )
    telemetry.add_counters(
        "observer_errors",
        "Errors of telemetry, tracing and other observers; requests are not affected",
        "observer",
        lambda: observers.num_errors,
    )
    telemetry.add_counters(
        "streams_broken",
        "Calls that ended with a protocol error, an internal error or a timeout",
        "cause",
        lambda: processor.num_broken,
    )
    add(
        "decisions_dropped",
        "Decisions that slow watchers missed",
        lambda: decisions.num_dropped,
    )
    _add_traffic(telemetry, parts.traffic)
    for part in (parts.peering, parts.discovery, parts.adapters):
        part.add_metrics(telemetry)


def add_queue_gauges(telemetry: Telemetry, queue: HoldQueue, clock: Callable[[], float]) -> None:
    """Register what is held, and how holds ended."""
    add = telemetry.add_gauge
    priorities = CappedLabel(_MAX_PRIORITIES)
    telemetry.add_gauges(
        "held_requests",
        "Held requests by route and priority",
        ("route", "priority"),
        lambda: _held(queue, priorities),
    )
    add("held_requests_limit", "Limit of held requests", lambda: queue.settings.max_requests)
    add(
        "held_bytes",
        "Bytes of the bodies of held requests",
        lambda: queue.occupancy.num_bytes,
    )
    add("held_bytes_limit", "Limit of these bytes", lambda: queue.settings.max_bytes)
    add(
        "held_oldest_seconds",
        "Time that the oldest held request has waited",
        lambda: queue.oldest_s(clock()),
    )
    add(
        "held_dispatched_per_second",
        "Requests a second that leave the queue for a pod while more wait, as estimated",
        lambda: 1 / queue.service_s if queue.service_s else 0.0,
    )
    telemetry.add_counters(
        "holds",
        "Requests that the policy wanted to hold, by result",
        "end",
        lambda: {str(end): count for end, count in queue.num_ended.items()},
    )


def _held(queue: HoldQueue, priorities: CappedLabel) -> Mapping[tuple[str, str], float]:
    """Return the requests held by route and priority; one figure at least, so that sums exist."""
    counts: defaultdict[tuple[str, str], float] = defaultdict(float, {("", "0"): 0.0})
    for (route, priority), count in queue.occupancy.num_by_claim.items():
        counts[route, priorities.cap(str(priority))] += count
    return counts


def _add_traffic(telemetry: Telemetry, traffic: Traffic) -> None:
    add, budget, wire = telemetry.add_gauge, traffic.budget, traffic.wire
    add("wire_connections", "Open connections of the HTTP/2 server", lambda: wire.connections_open)
    add(
        "body_bytes",
        "Bytes of request bodies and unsent responses in memory",
        lambda: budget.used_bytes,
    )
    add(
        "body_bytes_limit",
        "Limit of bytes of request bodies and unsent responses in memory",
        lambda: budget.max_bytes,
    )
    add(
        "uploads_given_up", "Uploads given up because memory was short", lambda: budget.num_given_up
    )
    telemetry.add_counters(
        "wire_streams",
        "Streams of the HTTP/2 server, by how they ended",
        "end",
        lambda: _ends(wire),
    )
    telemetry.add_counters(
        "wire_abuse",
        "Violations of the HTTP/2 server's limits, by limit",
        "limit",
        lambda: {str(limit): count for limit, count in wire.abuse.items()},
    )
    telemetry.add_counters(
        "http_dropped",
        "Dropped connections of the HTTP ports, by the limit that they exceeded",
        "limit",
        lambda: {str(limit): traffic.http_dropped[limit] for limit in HttpLimit},
    )


def _add_tpot(telemetry: Telemetry, tpots: Tpots) -> None:
    telemetry.add_counters(
        "tpot_responses",
        "Streamed responses by whether their mean time per output token was within the objective",
        ("route", "attained"),
        lambda: tpots.num_responses,
    )
    telemetry.add_counters(
        "tpot_seconds",
        "Sum of the mean times per output token of streamed responses",
        "route",
        lambda: tpots.seconds,
    )
    telemetry.add_gauges(
        "token_bytes",
        "Bytes of a streamed response per token, as learned",
        "route",
        lambda: {route: size.num_bytes for route, size in tpots.sizes.items()},
    )
    telemetry.add_gauges(
        "token_bytes_error_ratio",
        "Relative standard deviation of the bytes per token between responses",
        "route",
        lambda: {route: size.error_ratio for route, size in tpots.sizes.items()},
    )


def _ends(wire: Counters) -> Mapping[str, float]:
    return {
        "answered": wire.streams_answered,
        "reset_by_peer": wire.streams_reset_by_peer,
        "reset_by_us": wire.streams_reset_by_us,
        "lost": wire.streams_lost,
        "refused": wire.streams_refused,
    }
