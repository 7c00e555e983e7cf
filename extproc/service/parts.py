"""The parts of one router, made from its configuration: the composition, from the bottom up.

Each part gets all that it calls when it is made. Later news comes back as a fact: `changed` is set
where health or the cluster should hear of something new.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from prometheus_client import CollectorRegistry

from extproc import __version__
from extproc.config import Config, configured
from extproc.discovery.endpointlist import EndpointList
from extproc.discovery.kubernetes.source import KubernetesDiscovery
from extproc.envoy.endings import Endings
from extproc.learned.slowness import SlowPods
from extproc.observe.decisions import DecisionsService
from extproc.observe.endpointmetrics import PoolMetrics
from extproc.observe.gauges import add_gauges, add_traffic_gauges
from extproc.observe.observers import Observers
from extproc.observe.recorder import Recorder
from extproc.observe.shadow import Shadow
from extproc.observe.telemetry import Telemetry
from extproc.observe.tracing import Tracing
from extproc.peers.adapterpeers import AdapterUpdate
from extproc.peers.links import Links
from extproc.peers.peering import ObservedRelay, Peering
from extproc.peers.relay import Relay
from extproc.peers.telling import Hearing, Telling
from extproc.pods.accounting import Accounting
from extproc.pods.scraping import Pods
from extproc.reports.engines import PROFILES
from extproc.reports.readiness import Readiness
from extproc.routing.policies import Policy
from extproc.service.adapterservice import AdapterService
from extproc.service.clocks import Clocks
from extproc.service.endpointsource import make_source
from extproc.service.peeraccess import peer_settings
from extproc.service.routing import Routing, shadow_settings
from extproc.service.services import Services
from extproc.wire.budget import Budget
from extproc.wire.httpserver import HttpLimit
from extproc.wire.limits import Counters

log = logging.getLogger(__name__)

READINESS_LIMIT_S = 5.0
"""The longest time for which an endpoint that does not respond delays readiness."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """The counts of the listeners, and the memory that they share.

    Attributes:
        http_dropped: Connections of the HTTP ports that were dropped.
        budget: Of bodies and unsent responses.
    """

    budget: Budget
    wire: Counters = field(default_factory=Counters)
    http_dropped: Counter[HttpLimit] = field(default_factory=Counter)


class Parts:
    """The parts of one router; nothing runs and nobody listens yet.

    Attributes:
        changed: Set when what a pod lists, the endpoints or the adapters have changed.
        endpoints: The endpoints of discovery, handed on to all that follow them.

    Raises:
        ConfigError: A certificate or a key file cannot be used.
    """

    def __init__(
        self, config: Config, policy: Policy, tracing: Tracing | None, *, clocks: Clocks
    ) -> None:
        alone = config.peers is None
        self.clock = clocks.clock
        self._loop = asyncio.get_running_loop()  # whose time the listeners' is
        self.router_id = router_id = secrets.token_hex(4)
        self.changed = changed = asyncio.Event()
        self.traffic = Traffic(configured.budget(config))
        observers, relay = Observers(), Relay(configured.relay_settings(config))
        telling = Telling(
            Links(),
            call_later=asyncio.get_running_loop().call_later,
            clock=clocks.clock,
            observers=observers,
        )
        decisions = DecisionsService(
            config.admin.max_decisions, later=_later(observers), clock=clocks.clock
        )
        self.routing = routing = Routing(
            config,
            policy,
            router_id=router_id,
            clocks=clocks,
            readers=decisions,
            telling=None if alone else telling,
        )
        settings = configured.accounting_settings(config)
        self.accounting = Accounting(routing.pool, router_id, settings, relay)
        self.recorder = recorder = Recorder(
            telemetry=_telemetry(config, routing),
            decisions=decisions,
            attainment=routing.attainment,
            knows_times=self.accounting.knows_times,
            observers=observers,
            claim_of=routing.routes.claim_of,
            rewrites=routing.rewrites,
            clock=clocks.clock,
            wall_clock=clocks.wall_clock,
            arms=routing.arms,
        )
        self.shadow = Shadow(
            shadow_settings(config),
            decisions,
            max_models=config.admin.max_adapter_labels,
            clock=clocks.clock,
            cpu_clock=clocks.cpu_clock,
            rng=clocks.rng,
        )
        self.readiness = Readiness(READINESS_LIMIT_S)
        scrapes, polls = configured.pod_loops(config)
        self.pods = Pods(
            PROFILES[config.pods.engine],
            scrapes,
            polls,
            pace=configured.pace(config),
            slow=SlowPods(routing.pool.group_of, configured.slowness_settings(config)),
            page_url=configured.metrics_pages(config),
            max_page_bytes=config.scrape.max_page_bytes,
            pool=routing.pool,
            readiness=self.readiness,
            accounting=self.accounting,
            recorder=recorder,
            on_asked=_both(changed.set, routing.is_wanting.set),
            clock=clocks.clock,
            cpu_clock=clocks.cpu_clock,
            rng=clocks.rng,
        )
        self.endings = endings = Endings(
            self.accounting, routing.pool.outliers, recorder, self.pods, clocks.clock
        )
        self.services = Services(
            config,
            routing,
            endings,
            recorder,
            ObservedRelay(relay, observers, clocks.clock),
            router_id=router_id,
            tracing=tracing,
            clocks=clocks,
            is_open=self.is_open,
        )
        self.adapters = AdapterService(
            config,
            routing,
            poke=self.pods.poke,
            on_news=changed.set if config.discovery.kubernetes is not None else None,
            say=None if alone else _saying(telling, observers),
            router_id=router_id,
            clocks=clocks,
        )
        self.peering = Peering(
            peer_settings(config, clocks),
            relay,
            Hearing(
                routing.router,
                self.adapters.peers,
                telling,
                clock=clocks.clock,
                observers=observers,
            ),
            router_id=router_id,
            on_entries=self.services.completions.record_relayed,
            on_lost=endings.lost_link,
            num_losses=partial(_num_losses, self.accounting, relay),
            on_num_routers=routing.pool.flights.set_num_routers,
            on_garbage=recorder.telemetry.access_log_errors.add,
            observers=observers,
            clock=clocks.clock,
            rng=clocks.rng,
        )
        followers = (routing, self.pods, self.adapters.loading, self.services.eds)
        self.endpoints = EndpointList(
            self.readiness,
            followers,
            changed.set,
            clock=clocks.clock,
            most=config.discovery.max_endpoints,
        )
        self.kubernetes = kubernetes = KubernetesDiscovery(
            configured.kubernetes_settings(config.discovery.kubernetes),
            on_endpoints=self.endpoints.set,
            on_priorities=routing.routes.set_objectives,
            scheme=configured.scheme(config),
            engine=config.pods.engine,
            fails_open=config.server.fail_open,
            clock=clocks.clock,
            wall_clock=clocks.wall_clock,
            rng=clocks.rng,
            on_rules=self.adapters.declaring.set_rules,
            on_offers=self.adapters.declaring.set_offers,
        )
        routing.sources.add(kubernetes.sources)
        self.discovery = make_source(
            config.discovery,
            kubernetes,
            self.telemetry,
            on_endpoints=self.endpoints.set,
            scheme=configured.scheme(config),
            clock=clocks.clock,
        )

    @property
    def telemetry(self) -> Telemetry:
        """The Prometheus metrics."""
        return self.recorder.telemetry

    def is_open(self) -> bool:
        """Return whether requests are accepted: each endpoint of the start has been asked."""
        return not self.readiness.problems(now=self.clock())

    def why_not_ready(self) -> list[str]:
        """Return the reasons, for people; empty when ready."""
        reasons = self.readiness.problems(now=self.clock())
        return reasons + self.kubernetes.why_not_ready() + self.adapters.why_not_ready()

    def warnings(self) -> Sequence[str]:
        """Return what is wrong elsewhere, for people: another router would not do better."""
        return [
            *self.traffic.wire.mismatches.warnings(now=self._loop.time()),
            *self.services.lost_rewrites.warnings(now=self.clock()),
            *self.routing.rewrites.warnings(),
            *self.kubernetes.warnings(),
            *self.endpoints.warnings(),
            *self.pods.losses.warnings(),
            *self.peering.warnings(),
            *self.adapters.warnings(),
            *self.routing.arms.warnings(),
            *self.shadow.warnings(),
            *self.services.warnings(),
        ]

    def add_metrics(self, is_ready: Callable[[], bool]) -> None:
        """Register the parts' own counts."""
        telemetry, routing = self.telemetry, self.routing
        add_gauges(
            telemetry,
            is_ready=is_ready,
            router=routing.router,
            routes=routing.routes,
            attainment=routing.attainment,
            num_policy_failures=routing.num_policy_failures,
            accounting=self.accounting,
            losses=self.pods.losses,
            slow=self.pods.slow,
            pace=self.pods.pace,
            decisions=self.recorder.decisions,
            observers=self.recorder.observers,
            clock=self.clock,
        )
        traffic = self.traffic
        add_traffic_gauges(telemetry, traffic.budget, traffic.wire, traffic.http_dropped)
        for part in (self.services, self.peering, self.endpoints, self.kubernetes, self.shadow):
            part.add_metrics(telemetry)
        for part_of in (self.adapters.loading, routing.sources, routing.rewrites, routing.arms):
            part_of.add_metrics(telemetry)

    def configure(self, config: Config) -> None:
        """Apply the live fields of a changed configuration.

        Raises:
            ConfigError: The policy cannot be loaded. Nothing has changed.
        """
        self.routing.configure(config)
        self.shadow.configure(shadow_settings(config))
        self.pods.pace.configure(config.scrape.expiry_s, config.scrape.budget)
        self.adapters.configure(config)

    def tick(self) -> None:
        """Do what is due about once a second: forget what nobody ends, and say who is lost."""
        taken_back = self.routing.rewrites.take_news()
        news = (self.traffic.wire.mismatches, self.services.lost_rewrites, self.routing.pool.speeds)
        for line in (*taken_back, *(line for each in news for line in each.take_news())):
            log.warning("%s", line)
        if taken_back:
            self.adapters.tell()
        self.services.tick()
        self.pods.tick()

    def tell(self) -> None:
        """Report to the cluster on its declarations, if there is news."""
        news = self.adapters.take_news()
        if news is not None:
            self.kubernetes.report(*news)


def _telemetry(config: Config, routing: Routing) -> Telemetry:
    registry, snapshot = CollectorRegistry(), routing.snapshot
    kubernetes = config.discovery.kubernetes
    if kubernetes is not None and kubernetes.inference_pool is not None:
        in_pool = routing.pool.in_pool
        registry.register(PoolMetrics(kubernetes.inference_pool, snapshot, in_pool))
    return Telemetry(
        snapshot=snapshot,
        version=__version__,
        registry=registry,
        max_adapter_labels=config.admin.max_adapter_labels,
    )


def _num_losses(accounting: Accounting, relay: Relay) -> int:
    """Return how often other routers may have missed entries that were to come from here."""
    return accounting.logs.num_losses + sum(relay.num_dropped.values())


def _saying(telling: Telling, observers: Observers) -> Callable[[AdapterUpdate], None]:
    return lambda update: observers.call("telling", telling.links.say, update)


def _both(first: Callable[[], None], second: Callable[[], None]) -> Callable[[], None]:
    def call() -> None:
        first()
        second()

    return call


def _later(observers: Observers) -> Callable[[float, Callable[[], None]], object]:
    """Return what sends decisions to watchers after the requests that are pending now."""
    loop = asyncio.get_running_loop()
    return lambda seconds, publish: loop.call_later(seconds, observers.call, "decisions", publish)
