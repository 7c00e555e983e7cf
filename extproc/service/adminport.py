"""The state of a running router, as the admin port shows it."""

from __future__ import annotations

from collections.abc import Callable

from extproc import __version__
from extproc.address import Address
from extproc.observe.admin import AdminServer
from extproc.observe.livefeed import LiveFeed
from extproc.observe.livepage import LivePage
from extproc.service.parts import Parts

Lines = Callable[[], list[str]]


def make_admin(at: Address, parts: Parts, why_not_ready: Lines, warnings: Lines) -> AdminServer:
    """Make the server of the admin port."""
    routing = parts.routing
    return AdminServer(
        at.host,
        at.port,
        registry=parts.telemetry.registry,
        snapshot=routing.snapshot,
        queue=routing.queue,
        adapters=parts.adapters.loading.statuses,
        add_registration=parts.adapters.add_registration,
        decisions=parts.recorder.decisions.recent,
        health=why_not_ready,
        warnings=warnings,
        completions=lambda: parts.accounting.in_force(now=parts.clock()),
        sources=routing.sources.statuses,
        add_page=LivePage(make_feed(parts, why_not_ready, warnings).compose, parts.clock).add_to,
        dropped=parts.traffic.http_dropped,
    )


def make_feed(parts: Parts, why_not_ready: Lines, warnings: Lines) -> LiveFeed:
    """Make what composes the frames of the live page."""
    routing, recorder = parts.routing, parts.recorder
    return LiveFeed(
        about={
            "version": __version__,
            "router": parts.router_id,
            "started_wall_ms": round(recorder.wall_clock() * 1000),
        },
        snapshot=routing.snapshot,
        queue=routing.queue,
        registry=lambda: routing.pool.models.by_name,
        decisions=recorder.decisions,
        telemetry=recorder.telemetry,
        attainment=recorder.attainment,
        knows_times=recorder.knows_times,
        health=why_not_ready,
        warnings=warnings,
        policy=lambda: routing.policy_name,
        slow=parts.pods.slow,
        shadow=parts.shadow.describe,
        clock=recorder.clock,
        wall_clock=recorder.wall_clock,
    )
