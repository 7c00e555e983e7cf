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

from prometheus_client import CollectorRegistry

from extproc import __version__
from extproc.config import Config
from extproc.observe.counters import PoolMetrics
from extproc.observe.decisions import DecisionsService
from extproc.observe.observers import Observers
from extproc.observe.telemetry import Telemetry
from extproc.observe.tracing import Tracing
from extproc.peers.adapterpeers import AdapterUpdate
from extproc.peers.links import Links
from extproc.peers.relay import Relay
from extproc.peers.telling import Hearing, Telling
from extproc.pods.accounting import Accounting
from extproc.reports.readiness import Readiness
from extproc.routing.policies import Policy
from extproc.service import configured
from extproc.service.adapterservice import AdapterService
from extproc.service.cachewatch import CacheWatch
from extproc.service.clocks import Clocks
from extproc.service.discovery import Discovery, EndpointList
from extproc.service.endings import Endings
from extproc.service.peering import Peering
from extproc.service.recorder import Recorder
from extproc.service.routing import Routing
from extproc.service.scraping import Pods
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
        changed: Set when a pod has been asked, and when the endpoints or the adapters have changed.
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
        self.routing = routing = Routing(
            config,
            policy,
            router_id=router_id,
            clocks=clocks,
            telling=None if alone else telling,
        )
        self.cache_watch = CacheWatch(routing.pool.caches)
        settings = configured.accounting_settings(config)
        self.accounting = Accounting(routing.pool, router_id, settings, relay)
        self.recorder = recorder = Recorder(
            telemetry=_telemetry(config, routing),
            decisions=DecisionsService(
                config.admin.max_decisions, later=_later(observers), clock=clocks.clock
            ),
            attainment=routing.attainment,
            knows_times=self.accounting.knows_times,
            observers=observers,
            claim_of=routing.routes.claim_of,
            clock=clocks.clock,
            wall_clock=clocks.wall_clock,
        )
        self.readiness = Readiness(READINESS_LIMIT_S)
        self.pods = Pods(
            config,
            pool=routing.pool,
            readiness=self.readiness,
            accounting=self.accounting,
            recorder=recorder,
            on_asked=_both(changed.set, routing.is_wanting.set),
            clocks=clocks,
        )
        self.endings = endings = Endings(
            self.accounting, routing.pool.outliers, recorder, relay, self.pods, clocks.clock
        )
        self.services = Services(
            config,
            routing,
            endings,
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
            config,
            relay,
            Hearing(
                routing.router,
                self.adapters.loading.peers,
                telling,
                clock=clocks.clock,
                observers=observers,
            ),
            router_id=router_id,
            on_entries=self.services.completions.record_relayed,
            on_lost=endings.lost_link,
            num_losses=endings.num_losses,
            on_num_routers=routing.pool.set_num_routers,
            on_garbage=recorder.telemetry.access_log_garbage,
            observers=observers,
            clocks=clocks,
        )
        followers = (routing, self.pods, self.adapters.loading, self.services.eds)
        self.endpoints = EndpointList(
            self.readiness,
            followers,
            changed.set,
            clock=clocks.clock,
            most=config.discovery.max_endpoints,
        )
        self.discovery = Discovery(
            config,
            on_endpoints=self.endpoints.set,
            on_priorities=routing.routes.set_objectives,
            on_rules=self.adapters.declaring.set_rules,
            on_offers=self.adapters.declaring.set_offers,
            clocks=clocks,
        )
        routing.sources.add(self.discovery.sources)

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
        return reasons + self.discovery.why_not_ready() + self.adapters.why_not_ready()

    def warnings(self) -> Sequence[str]:
        """Return what is wrong elsewhere, for people: another router would not do better."""
        return [
            *self.traffic.wire.mismatches.warnings(now=self._loop.time()),
            *self.services.lost_rewrites.warnings(now=self.clock()),
            *self.discovery.warnings(),
            *self.endpoints.warnings(),
            *self.pods.losses.warnings(),
            *self.peering.warnings(),
            *self.adapters.warnings(),
            *self.services.warnings(),
        ]

    def configure(self, config: Config) -> None:
        """Apply the live fields of a changed configuration.

        Raises:
            ConfigError: The policy cannot be loaded. Nothing has changed.
        """
        self.routing.configure(config)
        self.pods.pace.configure(config.scrape.expiry_s, config.scrape.budget)
        self.adapters.configure(config)

    def look(self) -> None:
        """Do what is due about once a second: forget what nobody ends, and say who is lost."""
        news = (self.traffic.wire.mismatches, self.services.lost_rewrites)
        for line in (line for each in news for line in each.take_news()):
            log.warning("%s", line)
        self.services.tick()
        self.cache_watch.look()
        self.pods.tick()

    def tell(self) -> None:
        """Report to the cluster on its declarations, if there is news."""
        news = self.adapters.take_news()
        if news is not None:
            self.discovery.report(*news)


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
