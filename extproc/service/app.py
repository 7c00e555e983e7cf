"""One running service, from its start to its end.

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
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

from extproc.address import Address
from extproc.config import Config, configured
from extproc.config.configfile import ConfigParser, parse_config
from extproc.config.liveconfig import LiveConfig
from extproc.observe.sideports import SidePorts
from extproc.observe.tracing import Tracing
from extproc.observe.watchdog import Watchdog
from extproc.routing.policies import Policy
from extproc.service.adminport import make_admin
from extproc.service.clocks import Clocks
from extproc.service.garbage import GC_THRESHOLDS, Garbage
from extproc.service.parts import Parts
from extproc.wire import transports
from extproc.wire.server import WireServer

log = logging.getLogger(__name__)

UPKEEP_INTERVAL_S = 1.0
"""Between two checks for picks whose end was not reported, and for pods that are lost."""
SWITCH_INTERVAL_S = 0.5e-3
"""How long a thread that parses a large page may delay the event loop each time it wakes up; with
Python's default of 5 ms that adds up to tens of milliseconds per request."""
REFUSAL_S = 1.0
"""Time for the answers to requests that are held when the time for a drain is over."""
DELAY_INTERVAL_S = 0.1
"""Between two measurements of how late the event loop is."""


class App:
    """One running service.

    Attributes:
        address: `host:port` that was bound for Envoy.
        admin_address: Likewise, of the admin port.

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
        self._config = config
        self._stop = asyncio.Event()
        self.address = self.admin_address = ""
        clocks = Clocks(
            time.monotonic, time.time, random.Random(secrets.randbits(64)), time.thread_time
        )
        self._parts = parts = Parts(config, policy, tracing, clocks=clocks)
        self._live_config = LiveConfig(
            *(config, path, text),
            parse=parse,
            configure=parts.configure,
            wall_clock=clocks.wall_clock,
        )
        self._admin_at = Address.parse(config.admin.address)
        self._admin = make_admin(self._admin_at, parts, self._why_not_ready, self._warnings)
        self._sides = SidePorts(
            config.server.health_address,
            config.admin.metrics_address,
            health=parts.services.health.methods(),
            registry=parts.telemetry.registry,
            dropped=parts.traffic.http_dropped,
        )
        self._watchdog = Watchdog(config.server.max_stall_s or inf)
        parts.add_metrics(lambda: not self._why_not_ready())
        self._live_config.add_metrics(parts.telemetry)

    def _warnings(self) -> list[str]:
        return [*self._live_config.warnings(), *self._parts.warnings()]

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
        parts, server = self._parts, None
        services = (parts.services, parts.recorder.decisions, parts.peering)
        methods = [method for service in services for method in service.methods()]
        try:
            listener, traffic = configured.listener_settings(self._config), parts.traffic
            server = await transports.listen(listener, methods, traffic.wire, traffic.budget)
            self.address = server.address
            await self._sides.start()
            await self._admin.start()
            self.admin_address = str(replace(self._admin_at, port=self._admin.port))
            log.info("serving on %s, admin on %s", self.address, self.admin_address)
            self._watchdog.start()
            async with asyncio.TaskGroup() as tasks:
                background = [tasks.create_task(each) for each in self._background()]
                await self._stop.wait()
                await self._drain(server)
                for task in background:
                    task.cancel()
        finally:
            self._watchdog.stop()
            await parts.peering.aclose()
            await parts.services.aclose()
            await parts.pods.aclose()
            await self._admin.stop()
            await self._sides.aclose()
            if server is not None:
                await server.close()

    def _background(self) -> Iterator[Coroutine[Any, Any, None]]:
        yield self._upkeep()
        yield self._measure_delay()
        yield self._follow_changes()
        yield self._parts.peering.run()
        yield self._parts.discovery.run()
        yield self._parts.adapters.run()
        yield self._live_config.run()
        yield self._parts.shadow.run()

    async def _upkeep(self) -> None:
        parts = self._parts
        garbage = Garbage(
            num_requests=lambda: parts.recorder.decisions.num_published,
            models=lambda: parts.routing.pool.models.by_name,
            clock=parts.clock,
        )
        try:
            while True:
                await asyncio.sleep(UPKEEP_INTERVAL_S)
                parts.tick()
                self._update_health()
                garbage.tick()
        finally:
            garbage.end()

    async def _measure_delay(self) -> None:
        clock, telemetry, pace = self._parts.clock, self._parts.telemetry, self._parts.pods.pace
        while True:
            due_s, began_s = clock() + DELAY_INTERVAL_S, time.thread_time()
            await asyncio.sleep(DELAY_INTERVAL_S)
            self._watchdog.beat()
            delay_s = max(0.0, clock() - due_s)
            telemetry.loop_delay_s.observe(delay_s)
            cpu_s = time.thread_time() - began_s
            pace.delayed(delay_s, cpu_s / (DELAY_INTERVAL_S + delay_s))
            self._parts.endings.delayed(delay_s)

    async def _follow_changes(self) -> None:
        changed = self._parts.changed
        while True:
            await changed.wait()
            changed.clear()
            self._update_health()
            self._parts.tell()

    async def _drain(self, server: WireServer) -> None:
        config, parts = self._config.server, self._parts
        log.info("draining: %d streams open", parts.services.processor.num_open)
        self._update_health()
        await asyncio.sleep(config.drain_delay_s)
        async with asyncio.TaskGroup() as tasks:
            refusing = tasks.create_task(self._refuse_held(config.drain_timeout_s))
            await server.drain(config.drain_timeout_s)
            await server.close()
            refusing.cancel()
        await parts.peering.drain()

    async def _refuse_held(self, within_s: float) -> None:
        """Have those that are still held hear of the end before it comes."""
        await asyncio.sleep(max(within_s - REFUSAL_S, within_s / 2))
        self._parts.routing.router.queue.close(now=self._parts.clock())

    def _why_not_ready(self) -> list[str]:
        """Return the reasons, for people; empty when ready."""
        reasons = self._parts.why_not_ready()
        return ["draining", *reasons] if self._stop.is_set() else reasons

    def _update_health(self) -> None:
        self._parts.services.health.set_ready(not self._why_not_ready())
