"""A router over one endpoint, with all that looks on, in one process and without a wire."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from extproc.config.configfile import parse_config
from extproc.config.configured import metrics_pages, pace, pod_loops
from extproc.envoy.endings import Endings
from extproc.learned.slowness import SlowPods
from extproc.observe.attainment import Attainment
from extproc.observe.decisions import DecisionsService
from extproc.observe.observers import Observers
from extproc.observe.recorder import Recorder
from extproc.observe.telemetry import Telemetry
from extproc.pods.accounting import Accounting
from extproc.pods.peerpicks import pick_ids
from extproc.pods.scraping import Pods
from extproc.queue import Ticket
from extproc.reports.engines import PROFILES
from extproc.reports.readiness import Readiness
from extproc.request.interfaces import StreamParts
from extproc.request.listbudget import Lists
from extproc.routing.picker import Picker
from extproc.routing.policies import Founding
from extproc.routing.rewrites import Rewrites
from extproc.service.clocks import Clocks
from extproc.tenancy import NO_CLAIM
from extproc.types import Choice, Pick, Rejection, RequestInfo, Snapshot, Wait
from tests.builders import fill, report, request, routing


class Waiting:
    """A policy that lets a request wait so many times before it chooses."""

    def __init__(self, num_waits: int) -> None:
        self.num_waits = num_waits
        self.num_asked = 0

    def choose(
        self, snapshot: Snapshot, request: RequestInfo, *, rng: random.Random
    ) -> Choice | Wait:
        self.num_asked += 1
        if self.num_asked <= self.num_waits:
            return Wait(until_s=snapshot.now, reason="not-yet")
        return Choice((snapshot.endpoints[0],), "at-last")


class Scene:
    """The router `r`. `changes` replace what its recorder records with: tests break that."""

    def __init__(self, *, num_waits: int | None = None, **changes: Any) -> None:
        self.now = 0.0
        self.waiting = None if num_waits is None else Waiting(num_waits)
        picker = Picker(
            self.waiting or Founding(), "p", rng=random.Random(0), next_id=pick_ids("r")
        )
        router = routing(picker)
        self.pool = fill(router.pool, 1, load=report())
        self.observers = Observers()
        self.decisions, self.attainment = DecisionsService(), Attainment(1.0)
        self.doubtful: list[str] = []
        self.failed: list[str] = []
        self.accounting = accounting = Accounting(self.pool, "r")
        accounting.record_access_logs(1)
        self.telemetry = Telemetry(snapshot=lambda: self.pool.snapshot(now=self.now), version="1")
        parts: dict[str, Any] = {
            "telemetry": self.telemetry,
            "decisions": self.decisions,
            "attainment": self.attainment,
            "rewrites": (rewrites := Rewrites(rng=random.Random(0))),
        }
        self.recorder = recorder = Recorder(
            **(parts | changes),
            knows_times=accounting.knows_times,
            observers=self.observers,
            claim_of=lambda _model: NO_CLAIM,
            clock=lambda: self.now,
            wall_clock=lambda: 1_700_000_000.0,
        )
        self.router = router
        self.endings = endings = Endings(
            accounting,
            self.pool.outliers,
            recorder,
            self,
            clock=lambda: self.now,
        )
        self.parts = StreamParts(
            router, router.models, rewrites, endings, Lists(), recorder, lambda: self.now
        )

    def reads(self, clocks: Clocks, on_asked: Callable[[], None] = lambda: None) -> Pods:
        """Return what reads the reports of the pool's pods; it has none to read yet."""
        config = parse_config("discovery: {static: []}")
        scrapes, polls = pod_loops(config)
        return Pods(
            PROFILES[config.pods.engine],
            scrapes,
            polls,
            pace=pace(config),
            slow=SlowPods(self.pool.group_of),
            page_url=metrics_pages(config),
            max_page_bytes=config.scrape.max_page_bytes,
            pool=self.pool,
            readiness=Readiness(limit_s=1.0),
            accounting=self.accounting,
            recorder=self.recorder,
            on_asked=on_asked,
            clock=clocks.clock,
            cpu_clock=clocks.cpu_clock,
            rng=clocks.rng,
        )

    def recheck_models(self, address: str) -> None:
        self.doubtful.append(address)

    def doubt(self, address: str) -> None:
        self.failed.append(address)

    def route(self, now: float = 0.0, **more: Any) -> Pick | Rejection | Ticket:
        """Route a request for the adapter `a` as a stream does."""
        asked = request(None, model="a", arrived_at_s=now, **more)
        result = self.router.route(asked, now=now)
        self.recorder.decided(result, 0.001, now=now)
        return result
