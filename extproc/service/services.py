"""The gRPC services of one router, put together."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping

from extproc.config import Config
from extproc.envoy.completions import CompletionService
from extproc.envoy.eds import EdsService
from extproc.envoy.health import HealthService
from extproc.fleet.accounting import Accounting
from extproc.fleet.cpucaches import CpuCaches, GroupCaches
from extproc.fleet.engines import PROFILES
from extproc.observe.decisions import DecisionsService
from extproc.observe.observers import Observers
from extproc.observe.telemetry import Telemetry
from extproc.observe.tracing import Tracing
from extproc.request.codec import Codec
from extproc.request.listbudget import Lists
from extproc.request.processor import ExternalProcessor
from extproc.service import configured
from extproc.service.clocks import World
from extproc.service.dispatch import Dispatcher, Endings, new_stream_of
from extproc.service.peering import Peering
from extproc.service.recorder import Recorder
from extproc.service.routing import Routing
from extproc.wire.rpc import Method

log = logging.getLogger(__name__)

_MAX_REMEMBERED = 100  # sizes: pods may state any number of slots


class CacheWatch:
    """Compares the configured size of the pods' CPU caches with the learned one, by group."""

    def __init__(self, caches: CpuCaches) -> None:
        self._caches = caches
        self._warned_of: deque[tuple[str, int]] = deque(maxlen=_MAX_REMEMBERED)

    def look(self) -> None:
        """Warn of a disagreement, once for each configured size of a group.

        Without a pod whose slots are known, nobody knows what the configuration means.
        """
        for group, caches in self._caches.groups.items():
            learned, presumed = _learned(caches), caches.presumed
            is_known = learned is not None and caches.has_slots
            if is_known and learned != presumed and (group, presumed) not in self._warned_of:
                self._warned_of.append((group, presumed))
                field = f"pods.{f'groups.{group}.' if group else ''}max_cpu_loras"
                log.warning(
                    "pods hold about %s adapters in their CPU caches, while the configuration "
                    "means %d (%s, or as many as slots without it): the router goes by what it "
                    "sees. Set %s to the pods' --max-cpu-loras",
                    *(learned, presumed, field, field),
                )

    def sizes(self) -> Mapping[tuple[str, str], float]:
        """Return each group's configured size, and the learned one if there is one, by source."""
        sizes: dict[tuple[str, str], float] = {}
        for group, caches in self._caches.groups.items():
            sizes[group, "configured"] = caches.presumed
            learned = _learned(caches)
            if learned is not None:
                sizes[group, "learned"] = learned
        return sizes


def _learned(caches: GroupCaches) -> int | None:
    return caches.learned if caches.stated is None else caches.stated


log = logging.getLogger(__name__)


class Services:
    """The services that Envoy, other routers and watchers call.

    Args:
        config: Checked configuration.
        routing: Chooses endpoints.
        telemetry: Counts.
        tracing: Makes spans; closed by `aclose`. None where tracing is off.
        router_id: First part of the picks' ids.
        world: Clocks and randomness.
        is_open: Whether requests are accepted; called once per request.
        on_doubt: Called with the address of an endpoint that may have lost a model.
        on_failed: Called with the address of an endpoint that failed a request.

    Raises:
        ConfigError: The peers cannot be followed.
    """

    def __init__(
        self,
        config: Config,
        routing: Routing,
        telemetry: Telemetry,
        *,
        tracing: Tracing | None,
        router_id: str,
        world: World,
        is_open: Callable[[], bool],
        on_doubt: Callable[[str], None],
        on_failed: Callable[[str], None],
    ) -> None:
        self._telemetry = telemetry
        self._router = routing.router
        self._clock = clock = world.clock
        self.observers = Observers()
        self.cache_watch = CacheWatch(routing.pool.caches)
        self.decisions = DecisionsService(
            config.admin.max_decisions, later=self._publish_later, clock=clock
        )
        self.peering = Peering(
            config,
            router_id=router_id,
            on_entries=lambda entries: self.completions.record_relayed(entries),
            on_num_routers=routing.pool.set_num_routers,
            on_garbage=telemetry.access_log_garbage,
            clock=clock,
            rng=world.rng,
            observers=self.observers,
        )
        call_later = asyncio.get_running_loop().call_later
        self.peering.tell(routing.router, call_later)
        self.accounting = Accounting(
            routing.pool, router_id, configured.accounting_settings(config), self.peering.relay
        )
        recorder = Recorder(
            telemetry=telemetry,
            decisions=self.decisions,
            attainment=routing.attainment,
            knows_times=self.accounting.knows_times,
            observers=self.observers,
            claim_of=routing.routes.claim_of,
            clock=clock,
            wall_clock=world.wall_clock,
        )
        self.endings = Endings(
            self.accounting, routing.pool.outliers, recorder, clock, on_doubt, on_failed
        )
        dispatcher = Dispatcher(
            routing.router,
            self.accounting,
            recorder,
            clock,
            routing.rewrites,
            Lists(config.request.max_list_bytes_per_s),
            joins_names=PROFILES[config.pods.engine].joins_names,
        )
        routing.router.queue.schedule.at = self._offer_at
        self._offer_handle: asyncio.TimerHandle | None = None
        self._tracing = tracing
        stream_settings = configured.stream_settings(config)
        self.processor = ExternalProcessor(
            new_stream_of(dispatcher, stream_settings, self._tracing),
            _codec(config),
            clock,
            call_later=call_later,
            is_open=is_open,
        )
        self.completions = CompletionService(
            self.endings.complete,
            wall_clock=world.wall_clock,
            on_refusal=self.endings.refused,
            on_garbage=telemetry.access_log_garbage,
            on_foreign=self.peering.pass_on if config.peers is not None else None,
            on_recorded=self.peering.flush,
            on_streams=self.accounting.record_access_logs,
        )
        self.eds = EdsService(
            config.destination.eds_cluster, on_nack=self._on_eds_nack, on_unusable=_on_unusable
        )
        self.health = HealthService()

    def methods(self) -> list[Method]:
        """Return the methods that a transport serves."""
        services = (self.processor, self.completions, self.eds, self.health, self.decisions)
        methods = [method for service in services for method in service.methods()]
        return [*methods, *self.peering.methods()]

    def tick(self) -> None:
        """Expire picks and calls that nobody ends, warn of caches; call it about once a second."""
        self.endings.tick(now=self._clock())
        self.processor.tick()
        self.cache_watch.look()

    async def aclose(self) -> None:
        """Close the links to other routers, and send the remaining spans."""
        await self.peering.aclose()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)

    def _offer_at(self, at_s: float) -> None:
        """Have the queue make an offer then, once the work at hand is done."""
        if self._offer_handle is not None:
            self._offer_handle.cancel()
        wait_s = max(0.0, at_s - self._clock())
        self._offer_handle = asyncio.get_running_loop().call_later(wait_s, self._offer)

    def _offer(self) -> None:
        self._router.offer(now=self._clock())

    def _publish_later(self, seconds: float, publish: Callable[[], None]) -> None:
        """Send decisions to watchers after the requests that are pending now."""
        loop = asyncio.get_running_loop()
        loop.call_later(seconds, self.observers.call, "decisions", publish)

    def _on_eds_nack(self, message: str) -> None:
        log.error("Envoy refused the endpoints: %s", message)
        self._telemetry.eds_refused()


def _on_unusable(address: str) -> None:
    log.error("endpoint %s left out of EDS: not ip:port", address)


def _codec(config: Config) -> Codec:
    return Codec(
        model_namespace=config.request.model_namespace,
        model_key=config.request.model_key,
        session_header=config.request.session_header or "",
        asks_for_load=config.pods.orca,
        honours_subset=config.request.use_subset_hint,
        tells_scores=config.destination.emit_scores,
    )
