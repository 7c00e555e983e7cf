"""Metrics that the parts of the service count themselves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping

from extproc.learned.losses import Losses
from extproc.learned.slowness import SlowPods
from extproc.learned.tpot import Tpots
from extproc.observe.attainment import Attainment, CappedLabel
from extproc.observe.decisions import DecisionsService
from extproc.observe.observers import Observers
from extproc.observe.telemetry import Telemetry
from extproc.pods.accounting import Accounting
from extproc.queue import HoldQueue
from extproc.reports.pace import ScrapePace
from extproc.routing.modelroutes import ModelRoutes
from extproc.routing.router import Router
from extproc.types import Snapshot
from extproc.wire.budget import Budget
from extproc.wire.httpserver import HttpLimit
from extproc.wire.limits import Counters

_MAX_PRIORITIES = 50
"""With a label of their own; anyone may write an InferenceObjective."""


def add_gauges(
    telemetry: Telemetry,
    *,
    is_ready: Callable[[], bool],
    router: Router,
    routes: ModelRoutes,
    attainment: Attainment,
    num_policy_failures: Mapping[str, int],
    accounting: Accounting,
    losses: Losses,
    slow: SlowPods,
    pace: ScrapePace,
    decisions: DecisionsService,
    observers: Observers,
    clock: Callable[[], float],
) -> None:
    """Register what others count and keep, read at each scrape of the metrics."""
    add, pool = telemetry.add_gauge, router.pool

    def snapshot() -> Snapshot:
        return pool.snapshot(now=clock())

    add(
        "ready",
        "1 if the router accepts requests. 0: discovery has not synced, or the router drains.",
        is_ready,
    )
    add("picks_in_flight", "Unfinished picks of this router.", lambda: len(pool.flights))
    telemetry.add_gauges(
        "endpoint_oldest_in_flight_seconds",
        "Age of the pod's oldest unfinished pick. If it only grows, nobody reported "
        "the end of that request.",
        "endpoint",
        lambda: pool.oldest_in_flight_s(now=clock()),
    )
    telemetry.add_counters(
        "ejections",
        "Pods ejected: unreachable, consecutive_failures, failure_rate or failed_trial.",
        "reason",
        lambda: {str(cause): count for cause, count in pool.outliers.ejections.num.items()},
    )
    telemetry.add_counters(
        "slo_requests",
        "Requests by whether they were answered within admin.slo_ttft_s. At most 50 "
        "paths have a label of their own; the rest count as other.",
        ("path", "attained"),
        lambda: attainment.counts,
    )
    telemetry.add_gauges(
        "route_slo_target_ratio",
        "Share of a route's requests that should be in time: objectives.ttft.percentile as 0 to 1.",
        "route",
        lambda: routes.targets,
    )
    telemetry.add_gauges(
        "tpot_target_ratio",
        "Share of a route's streamed responses that should meet it: "
        "objectives.tpot.percentile as 0 to 1.",
        "route",
        lambda: routes.tpot_targets,
    )
    telemetry.add_counters(
        "policy_failures",
        "Requests for which a policy raised an error or chose what it may not. "
        "policy.fallback took them, or they got a 503 policy_failed. The log has "
        "the error and its place.",
        "policy",
        lambda: num_policy_failures,
    )
    add_queue_gauges(telemetry, router.queue, clock)
    telemetry.add_gauges(
        "endpoint_slowness_ratio",
        "Time per output token, divided by that of the other pods of the group. 1: the same. "
        "Absent for a pod without other pods to compare with.",
        "endpoint",
        lambda: {address: each.ratio for address, each in slow.compare(snapshot()).items()},
    )
    telemetry.add_gauges(
        "endpoint_slow",
        "1 for a pod that has been slow for pods.slow_for_s, by pods.slow_ratio; else 0. "
        "Absent for a pod without a valid load report: nobody knows then.",
        "endpoint",
        lambda: {
            each.address: slow.is_slow(each.address)
            for each in snapshot().endpoints
            if each.is_known
        },
    )
    add(
        "held_seconds_limit",
        "Longest that a request may be held: request.max_hold_s.",
        lambda: router.max_hold_s,
    )
    add(
        "endpoints",
        "Pods that should send load reports: discovery says that they are ready, or "
        "said so when they were lost.",
        lambda: losses.num_due,
    )
    add(
        "endpoints_lost",
        "Pods of these that are lost: no reports, no list of models, or no connection.",
        lambda: losses.num_lost,
    )
    add(
        "scrape_interval_seconds",
        "Time between two scrapes of a pod whose reports surprise: scrape.interval_s. It is longer "
        "while the event loop is late, at most half of scrape.expiry_s, and by the factor "
        "extproc_scrape_stretch.",
        lambda: pace.interval_s,
    )
    add(
        "scrape_stretch",
        "Factor by which all pods wait longer to be scraped, so that this takes at most "
        "scrape.budget; 1 where that is enough.",
        lambda: pace.stretch,
    )
    _add_tpot(telemetry, accounting.tpots)
    telemetry.add_gauges(
        "completions_source",
        "Envoys whose requests end by this source. access_log: what Envoy's log tells. pages: the "
        "pods' own counts, as no log of that Envoy tells now, or completions.source is scrape (1). "
        "response: completions.source is response_phases (1).",
        "source",
        lambda: accounting.in_force(now=clock()),
    )
    telemetry.add_counters(
        "observer_errors",
        "Failures of observers: telemetry, decisions, attainment, tracing, relay, "
        "telling, canaries or arms. Requests continue. At most one log line in 10 s.",
        "observer",
        lambda: observers.num_errors,
    )
    add(
        "decisions_dropped",
        "Decisions that an extproc watch was too slow for. All watchers together "
        "get at most a fifth of the event loop's time.",
        lambda: decisions.num_dropped,
    )
    telemetry.add_counters(
        "served_by",
        "Requests by the pod that served them, as gateways of an InferencePool report. chosen: the "
        "router's choice. fallback: one that it named for that. other: one that it did not name. "
        "unknown: one that it does not know.",
        "pod",
        lambda: accounting.servers.num,
    )


def add_queue_gauges(telemetry: Telemetry, queue: HoldQueue, clock: Callable[[], float]) -> None:
    """Register what is held, and how holds ended."""
    add = telemetry.add_gauge
    priorities = CappedLabel(_MAX_PRIORITIES)
    telemetry.add_gauges(
        "held_requests",
        "Requests that are held, by route of models and priority.",
        ("route", "priority"),
        lambda: _held(queue, priorities),
    )
    add(
        "held_requests_limit",
        "Most requests that may be held: queue.max_requests.",
        lambda: queue.settings.max_requests,
    )
    add(
        "held_bytes",
        "Bytes of the bodies of held requests, as far as the router keeps them.",
        lambda: queue.occupancy.num_bytes,
    )
    add(
        "held_bytes_limit", "Most bytes of them: queue.max_bytes.", lambda: queue.settings.max_bytes
    )
    add(
        "held_oldest_seconds",
        "For how long the oldest held request has been held.",
        lambda: queue.oldest_s(clock()),
    )
    add(
        "held_dispatched_per_second",
        "Requests that leave the queue for a pod while more wait. By this estimate the router "
        "refuses requests that would come too late.",
        lambda: 1 / queue.pace.service_s if queue.pace.service_s else 0.0,
    )
    telemetry.add_counters(
        "holds",
        "Requests that were to be held, by how that ended.",
        "end",
        lambda: {str(end): count for end, count in queue.num_ended.items()},
    )


def _held(queue: HoldQueue, priorities: CappedLabel) -> Mapping[tuple[str, str], float]:
    """Return the requests held by route and priority; one figure at least, so that sums exist."""
    counts: defaultdict[tuple[str, str], float] = defaultdict(float, {("", "0"): 0.0})
    for (route, priority), count in queue.occupancy.num_by_claim.items():
        counts[route, priorities.cap(str(priority))] += count
    return counts


def add_traffic_gauges(
    telemetry: Telemetry, budget: Budget, wire: Counters, http_dropped: Mapping[HttpLimit, int]
) -> None:
    """Register the connections of the listeners, and the memory that they share."""
    add = telemetry.add_gauge
    add("wire_connections", "Open gRPC connections.", lambda: wire.connections_open)
    add(
        "body_bytes",
        "Bytes in memory of request bodies, complete or not, and of unsent answers.",
        lambda: budget.used_bytes,
    )
    add(
        "body_bytes_limit",
        "Most bytes of them: request.max_bytes_in_memory.",
        lambda: budget.max_bytes,
    )
    add("uploads_given_up", "Uploads that got a 429 memory.", lambda: budget.num_given_up)
    telemetry.add_counters(
        "wire_streams",
        "Streams by how they ended: answered, reset_by_peer, reset_by_us, lost with "
        "their connection, or refused by a limit.",
        "end",
        lambda: _ends(wire),
    )
    telemetry.add_counters(
        "wire_abuse",
        "Limits that a peer exceeded. An Envoy exceeds only the limits of one "
        "stream, and only if a client makes it.",
        "limit",
        lambda: {str(limit): count for limit, count in wire.abuse.items()},
    )
    telemetry.add_counters(
        "tls_mismatches",
        "Connections of peers that speak TLS where there is none, or the reverse: "
        "plaintext_to_tls, tls_to_plaintext or tls_without_http2. /healthz names the peers "
        "and the remedy.",
        "kind",
        lambda: {str(kind): count for kind, count in wire.mismatches.counts.items()},
    )
    telemetry.add_counters(
        "http_dropped",
        "Connections of the HTTP ports that were dropped, by limit: connections, "
        "request, answer or ahead.",
        "limit",
        lambda: {str(limit): http_dropped.get(limit, 0) for limit in HttpLimit},
    )


def _add_tpot(telemetry: Telemetry, tpots: Tpots) -> None:
    telemetry.add_counters(
        "tpot_responses",
        "Streamed responses by whether their time per output token met the "
        "objective. none: they had no objective.",
        ("route", "attained"),
        lambda: tpots.num_responses,
    )
    telemetry.add_counters(
        "tpot_seconds",
        "Sum of the times per output token of these responses. Divided by the "
        "responses, it is the mean.",
        "route",
        lambda: tpots.seconds,
    )
    telemetry.add_gauges(
        "token_bytes",
        "Bytes of a streamed response per token, as learned.",
        "route",
        lambda: {route: size.num_bytes for route, size in tpots.sizes.items()},
    )
    telemetry.add_gauges(
        "token_bytes_error_ratio",
        "Standard deviation of the bytes per token from one response to the next, "
        "as a share of them. Above 0.2 no response is judged.",
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
