"""The composition root: the only place that knows clock, randomness, config, core and shell.

Start: listen, then discover; ready once every endpoint known at first has been asked once. Until
then requests are turned away with UNAVAILABLE: the data plane asks another picker, or fails open.
Stop: not ready, long-lived streams end so that Envoy reconnects elsewhere, what is under way
finishes within `drain_timeout_s`.
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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from prometheus_client import CollectorRegistry

from extproc.app import settings, transports
from extproc.app.dispatch import Dispatcher, Endings, new_stream_of
from extproc.app.dns import DnsEndpoints
from extproc.app.gauges import add_gauges
from extproc.app.kubernetes import KubernetesDiscovery
from extproc.app.livefeed import LiveFeed
from extproc.app.observers import Observers
from extproc.app.peering import Peering
from extproc.app.recorder import Recorder
from extproc.app.sideports import SidePorts
from extproc.app.traced import make_tracing
from extproc.config import Config
from extproc.config.file import ConfigError, ConfigParser, parse_config
from extproc.core.accounting import Accounting
from extproc.core.address import Address
from extproc.core.attainment import Attainment
from extproc.core.bounds import MAX_ENDPOINTS
from extproc.core.engines import PROFILES
from extproc.core.picker import Picker
from extproc.core.pickids import pick_ids
from extproc.core.pool import Pool
from extproc.core.readiness import FirstLook
from extproc.core.router import Router
from extproc.core.types import Endpoint, LoadReport, ModelCard, Snapshot
from extproc.core.wire.limits import Counters
from extproc.plugins import PolicyError, load_policy
from extproc.shell.admin import AdminServer
from extproc.shell.codec import Codec
from extproc.shell.completions import CompletionService
from extproc.shell.decisions import DecisionsService
from extproc.shell.discovery.file import make_endpoints, parse_endpoints
from extproc.shell.eds import EdsService
from extproc.shell.filewatch import FileWatch
from extproc.shell.health import HealthService
from extproc.shell.httpserver import HttpLimit
from extproc.shell.livepage import LivePage
from extproc.shell.poolmetrics import PoolMetrics
from extproc.shell.rpc import Method
from extproc.shell.scraper import Scraper
from extproc.shell.server import ExternalProcessor
from extproc.shell.telemetry import Telemetry
from extproc.shell.vllm import ModelsPoller

log = logging.getLogger(__name__)

CONFIG_INTERVAL_S = 1.0
"""Between two looks at the configuration file."""
UPKEEP_INTERVAL_S = 1.0
"""Between two looks for picks that nobody will end."""
SWITCH_INTERVAL_S = 0.5e-3
"""How long a thread that reads a large page may keep the interpreter from the event loop, each time
that this wakes up; Python's own 5 ms would add up to tens of milliseconds a request."""
GC_THRESHOLDS = 1_000, 5, 40
"""Python's are 700, 10, 10. A full collection goes through all that the pool and the decisions
hold, 50 to 200 ms with some ten thousand models; what a request leaves behind has no cycles. The
young ones, of 1,000 and 5,000 objects, take 1 and 5 ms at most."""
FIRST_LOOK_S = 5.0
"""An endpoint that does not answer keeps the service from being ready no longer than this."""


class App:
    """One running service."""

    def __init__(
        self,
        config: Config,
        *,
        path: Path | None = None,
        text: str = "",
        parse: ConfigParser = parse_config,
    ) -> None:
        """Put everything together; nothing runs before `run`.

        Args:
            config: Checked configuration.
            path: Where it was read from; followed for changes.
            text: What was read there.
            parse: Makes a configuration of what is read there later.

        Raises:
            ConfigError: The rule, a certificate or a key file cannot be used.
        """
        self._config = config
        self._path, self._text, self._parse = path, text, parse
        self._stop = asyncio.Event()
        self._first_look = FirstLook(FIRST_LOOK_S)
        self._num_config_failures = 0
        self._num_left_out = 0
        self._wire = Counters()
        self._http_dropped: Counter[HttpLimit] = Counter()
        self._budget = settings.budget(config)
        self._rng = random.Random(secrets.randbits(64))
        self._router_id = secrets.token_hex(4)
        self.address = ""
        self.admin_address = ""
        self._pool = Pool(settings.pool_settings(config), settings.outlier_settings(config))
        self._picker = self._make_picker()
        self._make_services()
        self._make_readers()

    # --- composition -------------------------------------------------------------------------

    def _make_picker(self) -> Picker:
        config = self._config
        try:
            policy = load_policy(config.policy.name, config.policy.args)
        except PolicyError as error:
            raise ConfigError(str(error)) from error
        return Picker(
            policy,
            config.policy.name,
            rng=self._rng,
            next_id=pick_ids(self._router_id),
            settings=settings.picker_settings(config),
            admission=settings.admission_settings(config),
        )

    def _make_services(self) -> None:
        config = self._config
        self._registry = CollectorRegistry()
        self._telemetry = Telemetry(
            snapshot=self._snapshot,
            version=version("lora-extproc"),
            registry=self._registry,
            max_adapter_labels=config.admin.max_adapter_labels,
        )
        kubernetes = config.discovery.kubernetes
        if kubernetes is not None and kubernetes.inference_pool is not None:
            self._registry.register(PoolMetrics(kubernetes.inference_pool, self._snapshot))
        self._observers = Observers()
        self._decisions = DecisionsService(
            config.admin.max_decisions, later=self._tell_later, clock=time.monotonic
        )
        self._attainment = Attainment(config.admin.slo_ttft_s)
        self._peering = Peering(
            config,
            router_id=self._router_id,
            on_entries=lambda entries: self._completions.take_relayed(entries),
            on_num_routers=self._pool.set_num_routers,
            on_garbage=self._telemetry.access_log_garbage,
            clock=time.monotonic,
            rng=self._rng,
            observers=self._observers,
        )
        self._peering.add_metrics(self._telemetry)
        self._accounting = Accounting(
            self._pool,
            self._router_id,
            settings.accounting_settings(config),
            self._peering.relay,
        )
        recorder = Recorder(
            telemetry=self._telemetry,
            decisions=self._decisions,
            attainment=self._attainment,
            knows_times=self._accounting.knows_times,
            observers=self._observers,
            clock=time.monotonic,
            wall_clock=time.time,
        )
        router = Router(self._pool, self._picker, config.request.max_hold_s)
        self._endings = Endings(
            self._accounting,
            self._pool.outliers,
            recorder,
            clock=time.monotonic,
            on_doubt=lambda address: self._models.look(address),
        )
        dispatcher = Dispatcher(router, self._accounting, recorder, time.monotonic)
        stream_settings = settings.stream_settings(config)
        self._tracing = make_tracing(config.tracing)
        codec = Codec(
            model_namespace=config.request.model_namespace,
            model_key=config.request.model_key,
            session_header=config.request.session_header or "",
            asks_for_load=config.pods.orca,
            honours_subset=config.request.use_subset_hint,
            tells_scores=config.destination.emit_scores,
        )
        self._processor = ExternalProcessor(
            new_stream_of(dispatcher, stream_settings, self._tracing, self._observers),
            codec,
            time.monotonic,
            call_later=asyncio.get_running_loop().call_later,
            is_open=lambda: not self._first_look.why_not_over(now=time.monotonic()),
        )
        self._completions = CompletionService(
            self._endings.complete,
            wall_clock=time.time,
            on_garbage=self._telemetry.access_log_garbage,
            on_foreign=self._peering.pass_on if config.peers is not None else None,
            on_taken=self._peering.flush,
            on_streams=self._accounting.record_access_logs,
        )
        self._eds = EdsService(
            config.destination.eds_cluster, on_nack=self._on_eds_nack, on_unusable=self._on_unusable
        )
        self._health = HealthService()
        add_gauges(
            self._telemetry,
            processor=self._processor,
            pool=self._pool,
            completions=self._completions,
            eds=self._eds,
            wire=self._wire,
            decisions=self._decisions,
            observers=self._observers,
            http_dropped=self._http_dropped,
            budget=self._budget,
            clock=time.monotonic,
            num_config_failures=lambda: self._num_config_failures,
            num_left_out=lambda: self._num_left_out,
            is_ready=lambda: not self._why_not_ready(),
        )
        admin = Address.parse(config.admin.address)
        self._sides = SidePorts(
            config,
            health=self._health.methods(),
            registry=self._registry,
            dropped=self._http_dropped,
        )
        self._admin = AdminServer(
            admin.host,
            admin.port,
            registry=self._registry,
            snapshot=self._snapshot,
            decisions=self._decisions.recent,
            health=self._why_not_ready,
            add_page=LivePage(self._make_feed().compose, time.monotonic).add_to,
            dropped=self._http_dropped,
        )

    def _make_feed(self) -> LiveFeed:
        return LiveFeed(
            about={
                "version": version("lora-extproc"),
                "router": self._router_id,
                "started_wall_ms": round(time.time() * 1000),
            },
            snapshot=self._snapshot,
            registry=lambda: self._pool.registry,
            decisions=self._decisions,
            telemetry=self._telemetry,
            attainment=self._attainment,
            knows_times=self._accounting.knows_times,
            health=self._why_not_ready,
            policy=lambda: self._config.policy.name,
            clock=time.monotonic,
            wall_clock=time.time,
        )

    def _make_readers(self) -> None:
        config = self._config
        self._kubernetes = KubernetesDiscovery(
            config.discovery.kubernetes,
            on_endpoints=self._on_endpoints,
            scheme=settings.scheme(config),
            clock=time.monotonic,
            rng=self._rng,
        )
        self._kubernetes.add_metrics(self._telemetry)
        self._dns = DnsEndpoints(
            config.discovery.dns,
            on_endpoints=self._on_endpoints,
            scheme=settings.scheme(config),
            clock=time.monotonic,
        )
        self._dns.add_metrics(self._telemetry)
        scrapes, polls = settings.pod_loops(config)
        self._scraper = Scraper(
            PROFILES[config.pods.engine],
            scrapes,
            on_report=self._on_report,
            on_failure=self._on_scrape_failure,
            clock=time.monotonic,
            rng=self._rng,
            max_page_bytes=config.scrape.max_page_bytes,
        )
        self._models = ModelsPoller(
            polls,
            on_models=self._on_models,
            on_failure=self._on_models_failure,
            clock=time.monotonic,
            rng=self._rng,
        )

    # --- what the outside says ---------------------------------------------------------------

    def _on_endpoints(self, endpoints: Sequence[Endpoint]) -> None:
        self._num_left_out = max(0, len(endpoints) - MAX_ENDPOINTS)
        if self._num_left_out:
            # By address, so that all replicas and Envoy use the same ones.
            endpoints = sorted(endpoints, key=lambda each: each.address)[:MAX_ENDPOINTS]
            log.error(
                "%d endpoints beyond the first %d left out", self._num_left_out, MAX_ENDPOINTS
            )
        self._first_look.set_endpoints(endpoints, now=time.monotonic())
        self._pool.set_endpoints(endpoints)
        self._scraper.set_endpoints(endpoints)
        self._models.set_endpoints(endpoints)
        self._eds.set_endpoints(endpoints)
        self._update_health()
        log.info("endpoints: %d", len(endpoints))

    def _on_report(
        self, address: str, report: LoadReport, taken_at_s: float, duration_s: float
    ) -> None:
        self._observers.tell("telemetry", self._telemetry.scraped, duration_s)
        asked_at_s = taken_at_s - duration_s
        if self._pool.record_report(address, report, taken_at_s=taken_at_s, asked_at_s=asked_at_s):
            log.info("endpoint %s has restarted", address)
            self._models.poke(address)
        self._endings.reported(address, now=taken_at_s)

    def _on_scrape_failure(self, address: str, error: str, is_unreachable: bool) -> None:
        log.debug("endpoint %s: metrics: %s", address, error)
        self._observers.tell("telemetry", self._telemetry.scrape_failed, address)
        if is_unreachable:
            self._pool.record_unreachable(address)

    def _on_models(
        self, address: str, cards: tuple[ModelCard, ...], taken_at_s: float, duration_s: float
    ) -> None:
        asked_at_s = taken_at_s - duration_s
        self._pool.record_models(address, cards, now=taken_at_s, asked_at_s=asked_at_s)
        self._asked(address, has_told=True)

    def _on_models_failure(self, address: str, error: str, is_unreachable: bool) -> None:
        log.debug("endpoint %s: models: %s", address, error)
        self._pool.record_silence(address)
        if is_unreachable:
            self._pool.record_unreachable(address)
        self._asked(address, has_told=False)

    def _asked(self, address: str, *, has_told: bool) -> None:
        self._first_look.asked(address, has_told=has_told)
        self._update_health()

    def _tell_later(self, seconds: float, tell: Callable[[], None]) -> None:
        """Have decisions told to watchers, behind the requests that are there now."""
        loop = asyncio.get_running_loop()
        loop.call_later(seconds, self._observers.tell, "decisions", tell)

    def _on_unusable(self, address: str) -> None:
        log.error("endpoint %s cannot be told to Envoy: not ip:port", address)

    def _on_eds_nack(self, message: str) -> None:
        log.error("Envoy refused the endpoints: %s", message)
        self._telemetry.eds_refused()

    # --- readiness ---------------------------------------------------------------------------

    def _snapshot(self) -> Snapshot:
        return self._pool.snapshot(now=time.monotonic())

    def _why_not_ready(self) -> list[str]:
        """Reasons, none when ready."""
        reasons = self._first_look.why_not_over(now=time.monotonic())
        reasons += self._kubernetes.why_not_ready()
        return ["draining", *reasons] if self._stop.is_set() else reasons

    def _update_health(self) -> None:
        self._health.set_ready(not self._why_not_ready())

    # --- live configuration ------------------------------------------------------------------

    def _on_config(self, text: str) -> None:
        """Take over what may change while we run.

        Raises:
            ConfigError: Everything stays as it is.
        """
        fresh = self._parse(text, source=str(self._path))
        old = self._config
        policy, name = self._picker.policy, fresh.policy.name
        if fresh.policy != old.policy:
            try:
                policy = load_policy(name, fresh.policy.args)
            except PolicyError as error:
                raise ConfigError(str(error)) from error
        self._picker.configure(
            policy, name, settings.picker_settings(fresh), settings.admission_settings(fresh)
        )
        self._pool.configure(settings.pool_settings(fresh), settings.outlier_settings(fresh))
        self._attainment.ttft_s = fresh.admin.slo_ttft_s
        self._config = fresh
        changed = list(settings.needs_restart(old, fresh))
        if changed:
            log.warning("configuration: needs a restart to take effect: %s", ", ".join(changed))
        log.info("configuration taken over: policy %s %s", name, fresh.policy.args)

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
        transport = await transports.listen(self._config, self._methods(), self._wire, self._budget)
        self.address = transport.address
        await self._sides.start()
        await self._admin.start()
        admin = Address.parse(self._config.admin.address)
        self.admin_address = str(replace(admin, port=self._admin.port))
        log.info("serving on %s, admin on %s", self.address, self.admin_address)
        try:
            async with asyncio.TaskGroup() as tasks:
                background = [tasks.create_task(each) for each in self._background()]
                await self._stop.wait()
                await self._drain(transport)
                for task in background:
                    task.cancel()
        finally:
            await self._peering.aclose()
            if self._tracing is not None:
                await asyncio.to_thread(self._tracing.close)
            await self._scraper.aclose()
            await self._models.aclose()
            await self._admin.stop()
            await self._sides.aclose()

    def _methods(self) -> list[Method]:
        services = (self._processor, self._completions, self._eds, self._health, self._decisions)
        methods = [method for service in services for method in service.methods()]
        return [*methods, *self._peering.methods()]

    def _background(self) -> Iterable[asyncio._CoroutineLike[None]]:
        yield self._upkeep()
        yield self._peering.run()
        discovery = self._config.discovery
        if discovery.kubernetes is not None:
            yield self._kubernetes.run()
        elif discovery.dns is not None:
            yield self._dns.run()
        elif discovery.file is not None:
            watch = FileWatch(
                discovery.file,
                interval_s=discovery.file_interval_s,
                on_change=self._on_endpoints_file,
                on_failure=lambda trouble: log.error("endpoints: %s", trouble),
            )
            yield watch.run()
        else:
            entries = [each.model_dump() for each in discovery.static or ()]
            self._on_endpoints(make_endpoints(entries, scheme=settings.scheme(self._config)))
        if self._path is not None:
            yield FileWatch(
                self._path,
                interval_s=CONFIG_INTERVAL_S,
                on_change=self._on_config,
                on_failure=self._on_config_failure,
                initial=self._text,
            ).run()

    def _on_endpoints_file(self, text: str) -> None:
        self._on_endpoints(parse_endpoints(text, scheme=settings.scheme(self._config)))

    def _on_config_failure(self, trouble: str) -> None:
        self._num_config_failures += 1
        log.error("configuration not taken over: %s", trouble)

    async def _upkeep(self) -> None:
        while True:
            await asyncio.sleep(UPKEEP_INTERVAL_S)
            self._endings.tick(now=time.monotonic())
            self._processor.tick()
            self._update_health()

    async def _drain(self, transport: transports.Transport) -> None:
        config = self._config.server
        log.info("draining: %d streams open", self._processor.num_open)
        self._update_health()
        await asyncio.sleep(config.drain_delay_s)
        await transport.drain(config.drain_timeout_s)
        await self._peering.drain()
