"""The gRPC services that Envoy calls, put together."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from functools import partial

from extproc.config import Config, configured
from extproc.envoy.completions import CompletionService
from extproc.envoy.eds import EdsService
from extproc.envoy.endings import Endings
from extproc.envoy.health import HealthService
from extproc.meters import Meters
from extproc.observe.recorder import Recorder
from extproc.observe.tracing import Traced, Tracing
from extproc.peers.peering import ObservedRelay
from extproc.request.codec import Codec
from extproc.request.interfaces import StreamParts
from extproc.request.listbudget import Lists
from extproc.request.marks import Marks
from extproc.request.processor import ExternalProcessor
from extproc.request.sessions import SessionSources
from extproc.service.clocks import Clocks
from extproc.service.peeraccess import keys_of
from extproc.service.routing import Routing
from extproc.wire.rpc import Metadata, Method

log = logging.getLogger(__name__)


class Services:
    """The services that Envoy calls.

    Args:
        config: Checked configuration.
        routing: Chooses endpoints.
        endings: Ends what was chosen.
        recorder: Records what becomes of requests.
        relay: Takes access log entries of other routers' picks.
        router_id: The prefix of this router's pick ids.
        tracing: Makes spans; closed by `aclose`. None where tracing is off.
        clocks: Clocks and randomness.
        is_open: Whether requests are accepted; called once per request.
    """

    def __init__(
        self,
        config: Config,
        routing: Routing,
        endings: Endings,
        recorder: Recorder,
        relay: ObservedRelay,
        *,
        router_id: str,
        tracing: Tracing | None,
        clocks: Clocks,
        is_open: Callable[[], bool],
    ) -> None:
        self._endings, self._clock, self._tracing = endings, clocks.clock, tracing
        accounting, telemetry = endings.accounting, recorder.telemetry
        has_marks = configured.may_be_asked_again(config)
        self.marks = marks = _marks(config, routing, router_id, clocks)
        parts = StreamParts(
            routing.router,
            routing.router.models,
            routing.rewrites,
            endings,
            Lists(config.request.max_list_bytes_per_s),
            recorder,
            clocks.clock,
            marks if has_marks else None,
        )
        self.lost_rewrites = parts.lost_rewrites
        settings = configured.stream_settings(config)
        self.processor = ExternalProcessor(
            parts,
            settings,
            _codec(config, settings.sessions),
            clocks.clock,
            call_later=asyncio.get_running_loop().call_later,
            is_open=is_open,
            trace=None if tracing is None else tracer(recorder, tracing),
        )
        self.completions = CompletionService(
            endings.complete,
            wall_clock=clocks.wall_clock,
            on_refusal=endings.refused,
            on_garbage=telemetry.access_log_errors.add,
            on_foreign=None if config.peers is None else relay.pass_on,
            on_recorded=None if config.peers is None else relay.flush,
            on_streams=accounting.record_access_logs,
            on_lost=endings.lost_log,
            reads_load=config.pods.orca,
            pass_scheduler=self.processor.pass_scheduler,
        )
        self.eds = EdsService(
            config.destination.eds_cluster, on_nack=recorder.eds_refused, on_unusable=_on_unusable
        )
        self.health = HealthService()

    def methods(self) -> list[Method]:
        """Return the methods that a transport serves."""
        services = (self.processor, self.completions, self.eds, self.health)
        return [method for service in services for method in service.methods()]

    def tick(self) -> None:
        """Expire picks and calls that nobody ends; call it about once a second."""
        self._endings.tick(now=self._clock())
        self.processor.tick()
        self.marks.tick(now=self._clock())

    def warnings(self) -> list[str]:
        """Return what is wrong with the gateway, for people."""
        return [*self.marks.warnings(), *self._endings.accounting.servers.warnings()]

    def add_metrics(self, meters: Meters) -> None:
        """Register the services' own counts."""
        for part in (self.processor, self.completions, self.eds, self.marks, self.lost_rewrites):
            part.add_metrics(meters)

    async def aclose(self) -> None:
        """Send the remaining spans."""
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)


def _on_unusable(address: str) -> None:
    log.error("pod %s left out of EDS: not ip:port", address)


def _marks(config: Config, routing: Routing, router_id: str, clocks: Clocks) -> Marks:
    """Return what knows a request again about which a gateway asks several times."""
    flights, shared, own = routing.pool.flights, keys_of(config), [secrets.token_bytes(32)]
    return Marks(
        router_id,
        lambda: shared() or own,
        is_in_flight=lambda pick_id: flights.find(pick_id) is not None,
        wall_clock=clocks.wall_clock,
    )


def _codec(config: Config, sessions: SessionSources) -> Codec:
    return Codec(
        model_namespace=config.request.model_namespace,
        model_key=config.request.model_key,
        session_headers=sessions.headers,
        asks_for_load=config.pods.orca,
        honours_subset=config.request.use_subset_hint,
        tells_scores=config.destination.emit_scores,
    )


def tracer(recorder: Recorder, tracing: Tracing) -> Callable[[Metadata], Traced]:
    """Return what makes a stream's observer, with a span of its own, from its RPC's metadata."""
    return lambda metadata: Traced(recorder, partial(tracing.begin, metadata))
