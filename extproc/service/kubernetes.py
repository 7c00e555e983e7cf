"""Endpoints, priorities and declarations by the Kubernetes API."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from extproc.adapters.sources import SourceStatus
from extproc.config.discovery import KubernetesConfig
from extproc.discovery.kubernetes.kubewatch import WatchTimes
from extproc.discovery.kubernetes.objects import PoolRef
from extproc.discovery.kubernetes.status import AdapterReport
from extproc.observe.telemetry import Telemetry
from extproc.routing.precedence import Loss
from extproc.service.apiserver import Kubernetes, OnPriorities
from extproc.service.clocks import Clocks
from extproc.service.declarations import Declarations, OnOffers, OnRules
from extproc.service.inferencepool import OnEndpoints, PoolPresence, PoolsTogether


class KubernetesDiscovery:
    """The source of endpoints that `discovery.kubernetes` configures; without it, nothing.

    With InferencePools it is that of the objectives' priorities too; with those or a Service, of
    what is declared for it, if that is asked for by `on_rules` and `on_offers`.

    Raises:
        MissingLibraryError: The extra `kubernetes` is not installed.
    """

    def __init__(
        self,
        config: KubernetesConfig | None,
        *,
        on_endpoints: OnEndpoints,
        on_priorities: OnPriorities,
        scheme: str,
        engine: str,
        clocks: Clocks,
        on_rules: OnRules | None = None,
        on_offers: OnOffers | None = None,
    ) -> None:
        self._config = config
        self._on_endpoints = on_endpoints
        self._on_priorities = on_priorities
        self._kubernetes: Kubernetes | None = None
        self._presences: list[PoolPresence] = []
        self._declarations: Declarations | None = None
        if config is not None:
            self._kubernetes = Kubernetes(
                config.kubeconfig,
                clock=clocks.clock,
                rng=clocks.rng,
                times=WatchTimes(config.watch_s, config.relist_s),
                namespace=config.namespace,
                scheme=scheme,
            )
            self._presences = [PoolPresence(name) for name in config.inference_pool or ()]
            pools = _pools(config) if config.declarations else ()
            if pools and on_rules is not None and on_offers is not None:
                self._declarations = Declarations(
                    self._kubernetes,
                    pools,
                    engine=engine,
                    wall_clock=clocks.wall_clock,
                    on_rules=on_rules,
                    on_offers=on_offers,
                )

    def why_not_ready(self) -> list[str]:
        """Return reasons, for people, why no endpoints have been handed on."""
        return [why for each in self._presences for why in each.why_not_ready()]

    def warnings(self) -> list[str]:
        """Return what keeps us from the API server that only people can change."""
        return [] if self._kubernetes is None else self._kubernetes.warnings()

    def sources(self) -> list[SourceStatus]:
        """Return how each kind is by which the cluster declares something, if it does."""
        return [] if self._declarations is None else self._declarations.sources()

    def report(
        self, lost: Mapping[str, Loss], states: Mapping[str, AdapterReport] | None = None
    ) -> None:
        """Say what became of what is declared; see `Declarations.report`."""
        if self._declarations is not None:
            self._declarations.report(lost, states)

    async def run(self) -> None:
        """Hand endpoints on until cancelled; return at once if nothing is configured."""
        if self._config is None or self._kubernetes is None:
            return
        try:
            async with asyncio.TaskGroup() as tasks:
                if self._declarations is not None:
                    tasks.create_task(self._declarations.run())
                await self._follow(self._config, self._kubernetes)
        finally:
            await self._kubernetes.aclose()

    async def _follow(self, config: KubernetesConfig, kubernetes: Kubernetes) -> None:
        port, on_endpoints = config.port, self._on_endpoints
        if config.inference_pool is not None:
            names = config.inference_pool
            together = PoolsTogether(names, on_endpoints)
            async with asyncio.TaskGroup() as tasks:
                for each in self._presences:
                    tasks.create_task(kubernetes.follow_pool(each, together.taker(each.name)))
                tasks.create_task(kubernetes.follow_objectives(names, self._on_priorities))
        elif config.service is not None and not isinstance(port, tuple):
            await kubernetes.follow_service(config.service, on_endpoints, port=port)
        elif config.pod_selector is not None and port is not None and not isinstance(port, str):
            ports = port if isinstance(port, tuple) else (port,)
            await kubernetes.follow_pods(config.pod_selector, ports, on_endpoints)

    def add_metrics(self, telemetry: Telemetry) -> None:
        """Register the metrics."""
        found = self._kubernetes
        telemetry.add_gauges(
            "inference_pool_found",
            "1 if this InferencePool exists, as namespace/name. Until it has existed "
            "once, the router is not ready.",
            "pool",
            lambda: {
                name: is_there
                for each in self._presences
                for name, is_there in each.found().items()
            },
        )
        telemetry.add_counters(
            "kubernetes_lists",
            "Complete lists read from the Kubernetes API: one at the start, one every "
            "ten minutes, one after each loss.",
            "resource",
            lambda: found.lists if found is not None else {},
        )
        telemetry.add_counters(
            "kubernetes_failures",
            "Failed lists and watches: gone (410), connection, timeout, status_403 and "
            "the like, also of kinds that the Role does not permit. A few are normal.",
            "reason",
            lambda: found.failures if found is not None else {},
        )
        telemetry.add_gauge(
            "kubernetes_contact_age_seconds",
            "Time since the Kubernetes API last answered. Above a few minutes, the list "
            "of pods is out of date by that time.",
            lambda: found.contact_age_s if found is not None else 0.0,
        )


def _pools(config: KubernetesConfig) -> tuple[PoolRef, ...]:
    """Return what an object that is for these pods refers to; pods by their labels have no name."""
    if config.inference_pool is not None:
        return tuple(map(PoolRef, config.inference_pool))
    return (PoolRef(config.service, "", "Service"),) if config.service is not None else ()
