"""The composition root: one running service, from its configuration to its end.

Start: listen, then discover; ready once each endpoint that is up in the first list has been polled
once. Until then requests are rejected with UNAVAILABLE, so that the data plane tries another router
or fails open. Stop: not ready, long-lived streams end so that Envoy reconnects elsewhere, and
running requests finish within `drain_timeout_s`.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import secrets
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from extproc import __version__
from extproc.address import Address
from extproc.bounds import MAX_ENDPOINTS
from extproc.config import Config
from extproc.config.file import ConfigParser, parse_config
from extproc.discovery.kubernetes.status import AdapterReport
from extproc.fleet.accounting import Accounting
from extproc.fleet.readiness import Readiness
from extproc.observe.counters import PoolMetrics
from extproc.observe.decisions import DecisionsService
from extproc.observe.livepage import LivePage
from extproc.observe.observers import Observers
from extproc.observe.telemetry import Telemetry
from extproc.observe.tracing import Tracing
from extproc.peers.links import Links
from extproc.peers.relay import Relay
from extproc.peers.telling import Hearing, Telling
from extproc.routing.policies import Policy
from extproc.routing.precedence import Loss
from extproc.service import configured, transports
from extproc.service.adapterservice import AdapterService
from extproc.service.admin import AdminServer
from extproc.service.cachewatch import CacheWatch
from extproc.service.clocks import Clocks
from extproc.service.discovery import Discovery
from extproc.service.dispatch import Endings
from extproc.service.gauges import add_gauges
from extproc.service.liveconfig import LiveConfig
from extproc.service.livefeed import LiveFeed
from extproc.service.peering import Peering
from extproc.service.recorder import Recorder
from extproc.service.routing import Routing
from extproc.service.scraping import Pods
from extproc.service.services import Services
from extproc.service.sideports import SidePorts
from extproc.types import Endpoint
from extproc.wire.httpserver import HttpLimit
from extproc.wire.limits import Counters

log = logging.getLogger(__name__)

UPKEEP_INTERVAL_S = 1.0
"""Between two checks for picks whose end was not reported, and for pods that are lost."""
SWITCH_INTERVAL_S = 0.5e-3
"""How long a thread that parses a large page may delay the event loop each time it wakes up; with
Python's default of 5 ms that adds up to tens of milliseconds per request."""
GC_THRESHOLDS = 1_000, 5, 40
"""Python's defaults are 700, 10, 10. A full collection visits everything that the pool and the
decisions hold: 50 to 200 ms with some ten thousand models. Requests leave no cycles behind. The
younger generations, of 1,000 and 5,000 objects, take 1 and 5 ms at most."""
READINESS_LIMIT_S = 5.0
"""The longest time for which an endpoint that does not respond delays readiness."""


class App:
    """One running service."""

    def __init__(
        self,
        config: Config,
        policy: Policy,
        tracing: Tracing | None = None,
        *,
        path: Path | None = None,
        text: str = "",
        parse: ConfigParser = parse_config,
    ) -> None:
        """Put everything together; nothing runs before `run`.

        Args:
            config: Checked configuration.
            policy: The configured policy, see `make_policy`.
            tracing: As configured, see `make_tracing`; closed at the end of `run`.
            path: The configuration file, followed for changes.
            text: The content of that file.
            parse: Parses the file's later contents.

        Raises:
            ConfigError: A certificate or a key file cannot be used.
        """
        self._config = config
        self._stop = asyncio.Event()
        self._readiness = readiness = Readiness(READINESS_LIMIT_S)
        self._num_left_out = 0
        self._wire = Counters()
        self._http_dropped: Counter[HttpLimit] = Counter()
        self._budget = configured.budget(config)
        self._router_id = router_id = secrets.token_hex(4)
        self.address = ""
        self.admin_address = ""
        self._admin_at = Address.parse(config.admin.address)
        world = Clocks(time.monotonic, time.time, random.Random(secrets.randbits(64)))
        alone, self._observers = config.peers is None, Observers()
        observers, relay = self._observers, Relay(configured.relay_settings(config))
        telling = Telling(
            Links(world.clock),
            call_later=asyncio.get_running_loop().call_later,
            clock=world.clock,
            observers=observers,
        )
        self._routing = routing = Routing(
            config,
            policy,
            router_id=router_id,
            world=world,
            telling=None if alone else telling,
        )
        self._cache_watch = CacheWatch(routing.pool.caches)
        self._registry = CollectorRegistry()
        self._telemetry = self._make_telemetry()
        self._accounting = Accounting(
            routing.pool, router_id, configured.accounting_settings(config), relay
        )
        self._recorder = recorder = Recorder(
            telemetry=self._telemetry,
            decisions=DecisionsService(
                config.admin.max_decisions, later=self._publish_later, clock=world.clock
            ),
            attainment=routing.attainment,
            knows_times=self._accounting.knows_times,
            observers=observers,
            claim_of=routing.routes.claim_of,
            clock=world.clock,
            wall_clock=world.wall_clock,
        )
        self._pods = Pods(
            config,
            pool=routing.pool,
            readiness=readiness,
            accounting=self._accounting,
            recorder=recorder,
            on_asked=self._on_asked,
            world=world,
        )
        self._services = Services(
            config,
            routing,
            Endings(
                self._accounting, routing.pool.outliers, recorder, relay, self._pods, world.clock
            ),
            tracing=tracing,
            world=world,
            is_open=lambda: not readiness.problems(now=time.monotonic()),
        )
        self._adapters = AdapterService(
            config,
            routing,
            poke=self._pods.poke,
            report=self._report if config.discovery.kubernetes is not None else None,
            say=None if alone else lambda word: observers.call("telling", telling.links.say, word),
            router_id=router_id,
            world=world,
        )
        self._peering = Peering(
            config,
            relay,
            Hearing(
                routing.router,
                self._adapters.peers,
                telling,
                clock=world.clock,
                observers=observers,
            ),
            router_id=router_id,
            on_entries=self._services.completions.record_relayed,
            on_num_routers=routing.pool.set_num_routers,
            on_garbage=self._telemetry.access_log_garbage,
            observers=observers,
            world=world,
        )
        self._discovery = Discovery(
            config,
            on_endpoints=self._on_endpoints,
            on_priorities=routing.routes.set_objectives,
            on_rules=self._adapters.set_rules,
            on_offers=self._adapters.set_offers,
            world=world,
        )
        routing.sources.add(self._discovery.sources)
        self._live_config: LiveConfig | None = None
        if path is not None:
            configure = self._configure
            self._live_config = LiveConfig(config, path, text, parse=parse, configure=configure)
        self._sides = SidePorts(
            config,
            health=self._services.health.methods(),
            registry=self._registry,
            dropped=self._http_dropped,
        )
        self._admin = self._make_admin()
        self._add_metrics()

    # --- composition -------------------------------------------------------------------------

    def _make_telemetry(self) -> Telemetry:
        config, snapshot = self._config, self._routing.snapshot
        telemetry = Telemetry(
            snapshot=snapshot,
            version=__version__,
            registry=self._registry,
            max_adapter_labels=config.admin.max_adapter_labels,
        )
        kubernetes = config.discovery.kubernetes
        if kubernetes is not None and kubernetes.inference_pool is not None:
            in_pool = self._routing.pool.in_pool
            self._registry.register(PoolMetrics(kubernetes.inference_pool, snapshot, in_pool))
        return telemetry

    def _make_admin(self) -> AdminServer:
        return AdminServer(
            self._admin_at.host,
            self._admin_at.port,
            registry=self._registry,
            snapshot=self._routing.snapshot,
            queue=self._routing.queue,
            adapters=self._adapters.statuses,
            add_registration=self._adapters.add_registration,
            decisions=self._recorder.decisions.recent,
            health=self._why_not_ready,
            warnings=lambda: [*self._pods.losses.warnings(), *self._adapters.warnings()],
            sources=self._routing.sources.statuses,
            add_page=LivePage(self._make_feed().compose, time.monotonic).add_to,
            dropped=self._http_dropped,
        )

    def _make_feed(self) -> LiveFeed:
        routing = self._routing
        return LiveFeed(
            about={
                "version": __version__,
                "router": self._router_id,
                "started_wall_ms": round(time.time() * 1000),
            },
            snapshot=routing.snapshot,
            queue=routing.queue,
            registry=lambda: routing.pool.registry,
            decisions=self._recorder.decisions,
            telemetry=self._telemetry,
            attainment=routing.attainment,
            knows_times=self._accounting.knows_times,
            health=self._why_not_ready,
            policy=lambda: routing.policy_name,
            clock=time.monotonic,
            wall_clock=time.time,
        )

    def _add_metrics(self) -> None:
        live_config = self._live_config
        add_gauges(
            self._telemetry,
            services=self._services,
            routing=self._routing,
            recorder=self._recorder,
            tpots=self._accounting.tpots,
            cache_watch=self._cache_watch,
            wire=self._wire,
            http_dropped=self._http_dropped,
            budget=self._budget,
            clock=time.monotonic,
            num_config_failures=lambda: live_config.num_failures if live_config else 0,
            num_left_out=lambda: self._num_left_out,
            is_ready=lambda: not self._why_not_ready(),
            losses=self._pods.losses,
        )
        self._peering.add_metrics(self._telemetry)
        self._discovery.add_metrics(self._telemetry)
        self._adapters.add_metrics(self._telemetry)

    # --- endpoints and readiness -------------------------------------------------------------

    def _on_endpoints(self, endpoints: Sequence[Endpoint]) -> None:
        self._num_left_out = max(0, len(endpoints) - MAX_ENDPOINTS)
        if self._num_left_out:
            # By address, so that all replicas and Envoy use the same ones.
            endpoints = sorted(endpoints, key=lambda each: each.address)[:MAX_ENDPOINTS]
            log.error(
                "%d endpoints beyond the first %d left out", self._num_left_out, MAX_ENDPOINTS
            )
        self._readiness.set_endpoints(endpoints, now=time.monotonic())
        self._routing.set_endpoints(endpoints)
        self._pods.set_endpoints(endpoints)
        self._adapters.set_endpoints(endpoints)
        self._services.eds.set_endpoints(endpoints)
        self._update_health()
        log.info("endpoints: %d", len(endpoints))

    def _configure(self, config: Config) -> None:
        self._routing.configure(config)
        self._adapters.configure(config)

    def _report(self, lost: Mapping[str, Loss], states: Mapping[str, AdapterReport] | None) -> None:
        self._discovery.report(lost, states)

    def _on_asked(self) -> None:
        self._update_health()
        self._adapters.look()

    def _why_not_ready(self) -> list[str]:
        """Return the reasons, for people; empty when ready."""
        reasons = self._readiness.problems(now=time.monotonic())
        reasons += self._discovery.why_not_ready() + self._adapters.why_not_ready()
        return ["draining", *reasons] if self._stop.is_set() else reasons

    def _update_health(self) -> None:
        self._services.health.set_ready(not self._why_not_ready())

    def _publish_later(self, seconds: float, publish: Callable[[], None]) -> None:
        """Send decisions to watchers after the requests that are pending now."""
        loop = asyncio.get_running_loop()
        loop.call_later(seconds, self._observers.call, "decisions", publish)

    # --- life --------------------------------------------------------------------------------

    def stop(self) -> None:
        """Begin to drain. May be called more than once."""
        self._stop.set()

    async def run(self) -> None:
        """Serve until `stop` or a signal, then drain.

        Raises:
            OSError: An address cannot be bound.
        """
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        gc.set_threshold(*GC_THRESHOLDS)
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self.stop)
        services = (self._services, self._recorder.decisions, self._peering)
        methods = [method for service in services for method in service.methods()]
        transport: transports.Transport | None = None
        try:
            transport = await transports.listen(self._config, methods, self._wire, self._budget)
            self.address = transport.address
            await self._sides.start()
            await self._admin.start()
            self.admin_address = str(replace(self._admin_at, port=self._admin.port))
            log.info("serving on %s, admin on %s", self.address, self.admin_address)
            async with asyncio.TaskGroup() as tasks:
                background = [tasks.create_task(each) for each in self._background()]
                await self._stop.wait()
                await self._drain(transport)
                for task in background:
                    task.cancel()
        finally:
            await self._peering.aclose()
            await self._services.aclose()
            await self._pods.aclose()
            await self._admin.stop()
            await self._sides.aclose()
            if transport is not None:
                await transport.drain(0.0)  # still open if another port could not be bound

    def _background(self) -> Iterator[Coroutine[Any, Any, None]]:
        yield self._upkeep()
        yield self._peering.run()
        yield self._discovery.run()
        yield self._adapters.run()
        if self._live_config is not None:
            yield self._live_config.run()

    async def _upkeep(self) -> None:
        while True:
            await asyncio.sleep(UPKEEP_INTERVAL_S)
            self._services.tick()
            self._cache_watch.look()
            self._pods.tick()
            self._update_health()

    async def _drain(self, transport: transports.Transport) -> None:
        config = self._config.server
        log.info("draining: %d streams open", self._services.processor.num_open)
        self._update_health()
        await asyncio.sleep(config.drain_delay_s)
        await transport.drain(config.drain_timeout_s)
        await self._peering.drain()
