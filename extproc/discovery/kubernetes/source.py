"""Endpoints, priorities and declarations by the Kubernetes API."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random

from msgspec import Struct

from extproc.adapters.sources import SourceStatus
from extproc.discovery.kubernetes.apiserver import Kubernetes, OnPriorities
from extproc.discovery.kubernetes.declarations import Declarations, OnOffers, OnRules
from extproc.discovery.kubernetes.inferencepool import OnEndpoints, PoolPresence, PoolsTogether
from extproc.discovery.kubernetes.kubewatch import WatchTimes
from extproc.discovery.kubernetes.objects import PoolRef
from extproc.discovery.kubernetes.objectstatus import AdapterReport
from extproc.meters import Meters
from extproc.routing.conflicts import Loss


class KubernetesSettings(Struct, frozen=True):
    """The objects that are followed, and the API server that lists them.

    Attributes:
        kubeconfig: As for `KubernetesClient`.
        namespace: Of the pods; None for our own.
        pod_selector: Of the pods; else `service` or `inference_pool` says which they are.
        service: Name of their Service.
        inference_pool: Names of their InferencePools.
        port: Of the pods, or of the Service.
        watch_s: After which a watch is renewed.
        relist_s: Between two complete lists.
        declarations: Whether what is declared for them is followed.
    """

    kubeconfig: Path | None
    namespace: str | None
    pod_selector: str | None
    service: str | None
    inference_pool: tuple[str, ...] | None
    port: int | str | tuple[int, ...] | None
    watch_s: float
    relist_s: float
    declarations: bool


class KubernetesDiscovery:
    """The source of endpoints that `discovery.kubernetes` configures; without it, nothing.

    With InferencePools it is that of the objectives' priorities too; with those or a Service, of
    what is declared for it, if that is to be followed.

    Raises:
        MissingLibraryError: The extra `kubernetes` is not installed.
    """

    def __init__(
        self,
        settings: KubernetesSettings | None,
        *,
        on_endpoints: OnEndpoints,
        on_priorities: OnPriorities,
        scheme: str,
        engine: str,
        fails_open: bool,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        rng: Random,
        on_rules: OnRules,
        on_offers: OnOffers,
    ) -> None:
        self._settings = settings
        self._on_endpoints = on_endpoints
        self._on_priorities = on_priorities
        self._kubernetes: Kubernetes | None = None
        self._presences: list[PoolPresence] = []
        self._declarations: Declarations | None = None
        if settings is not None:
            self._kubernetes = Kubernetes(
                settings.kubeconfig,
                clock=clock,
                rng=rng,
                times=WatchTimes(settings.watch_s, settings.relist_s),
                namespace=settings.namespace,
                scheme=scheme,
            )
            self._presences = [PoolPresence(name) for name in settings.inference_pool or ()]
            pools = _pools(settings) if settings.declarations else ()
            if pools:
                self._declarations = Declarations(
                    self._kubernetes,
                    pools,
                    engine=engine,
                    fails_open=fails_open,
                    wall_clock=wall_clock,
                    on_rules=on_rules,
                    on_offers=on_offers,
                )

    def why_not_ready(self) -> list[str]:
        """Return reasons, for people, why no endpoints have been handed on."""
        return [why for each in self._presences for why in each.why_not_ready()]

    def warnings(self) -> list[str]:
        """Return what only people can change: why the API server is not read, or lists no pods."""
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
        if self._settings is None or self._kubernetes is None:
            return
        try:
            async with asyncio.TaskGroup() as tasks:
                if self._declarations is not None:
                    tasks.create_task(self._declarations.run())
                await self._follow(self._settings, self._kubernetes)
        finally:
            await self._kubernetes.aclose()

    async def _follow(self, settings: KubernetesSettings, kubernetes: Kubernetes) -> None:
        port, on_endpoints = settings.port, self._on_endpoints
        if settings.inference_pool is not None:
            names = settings.inference_pool
            together = PoolsTogether(names, on_endpoints)
            async with asyncio.TaskGroup() as tasks:
                for each in self._presences:
                    tasks.create_task(kubernetes.follow_pool(each, together.taker(each.name)))
                tasks.create_task(kubernetes.follow_objectives(names, self._on_priorities))
        elif settings.service is not None and not isinstance(port, tuple):
            await kubernetes.follow_service(settings.service, on_endpoints, port=port)
        elif settings.pod_selector is not None and port is not None and not isinstance(port, str):
            ports = port if isinstance(port, tuple) else (port,)
            await kubernetes.follow_pods(settings.pod_selector, ports, on_endpoints)

    def add_metrics(self, meters: Meters) -> None:
        """Register the metrics."""
        found = self._kubernetes
        meters.add_gauges(
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
        meters.add_counters(
            "kubernetes_lists",
            "Complete lists read from the Kubernetes API: one at the start, one every "
            "ten minutes, one after each loss.",
            "resource",
            lambda: found.lists if found is not None else {},
        )
        meters.add_counters(
            "kubernetes_failures",
            "Failed lists and watches: gone (410), connection, timeout, status_403 and "
            "the like, also of kinds that the Role does not permit. A few are normal.",
            "reason",
            lambda: found.failures if found is not None else {},
        )
        meters.add_gauge(
            "kubernetes_contact_age_seconds",
            "Time since the Kubernetes API last answered. Above a few minutes, the list "
            "of pods is out of date by that time.",
            lambda: found.contact_age_s if found is not None else 0.0,
        )


def _pools(settings: KubernetesSettings) -> tuple[PoolRef, ...]:
    """Return what an object that is for these pods refers to; pods by their labels have no name."""
    if settings.inference_pool is not None:
        return tuple(map(PoolRef, settings.inference_pool))
    return (PoolRef(settings.service, "", "Service"),) if settings.service is not None else ()
