"""Where endpoints come from, the one source that `discovery` names, and who follows them.

A source is a file in `discovery/` that is named like its section, with a class named
accordingly (`dns`, `DnsDiscovery`; see `Source`). It is imported only where it is configured.
Sources that take more than one file are put together here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any, Protocol

from extproc.adapters.sources import SourceStatus
from extproc.config import Config
from extproc.discovery.file import make_endpoints, parse_endpoints
from extproc.discovery.kubernetes.status import AdapterReport
from extproc.files.filewatch import FileWatch
from extproc.observe.telemetry import Telemetry
from extproc.reports.readiness import Readiness
from extproc.routing.precedence import Loss
from extproc.service import configured
from extproc.service.clocks import Clocks
from extproc.service.declarations import OnOffers, OnRules
from extproc.service.kubernetes import KubernetesDiscovery
from extproc.types import Endpoint

log = logging.getLogger(__name__)


class Follower(Protocol):
    """Follows the list."""

    def set_endpoints(self, endpoints: Sequence[Endpoint]) -> None:
        """Replace the endpoints."""


class EndpointList:
    """Hands on what discovery lists, the first by address where that is more than the most.

    Args:
        readiness: Waits for the endpoints of the first list.
        followers: Told in this order.
        on_change: Called after them.
        clock: Monotonic seconds.
        most: Endpoints that are used (`discovery.max_endpoints`).

    Attributes:
        num_left_out: Endpoints beyond the most that are used.
    """

    def __init__(
        self,
        readiness: Readiness,
        followers: Iterable[Follower],
        on_change: Callable[[], None],
        *,
        clock: Callable[[], float],
        most: int,
    ) -> None:
        self._readiness, self._followers = readiness, followers
        self._on_change, self._clock = on_change, clock
        self._most = most
        self._warnings: list[str] = []
        self.num_left_out = 0

    def set(self, endpoints: Sequence[Endpoint]) -> None:
        """Replace the endpoints."""
        self.num_left_out = max(0, len(endpoints) - self._most)
        warnings = []
        if self.num_left_out:
            # By address, so that all replicas and Envoy use the same ones.
            endpoints = sorted(endpoints, key=lambda each: each.address)
            warnings = [_told_left_out(endpoints, self._most)]
            endpoints = endpoints[: self._most]
        self._warn(warnings)
        self._readiness.set_endpoints(endpoints, now=self._clock())
        for each in self._followers:
            each.set_endpoints(endpoints)
        self._on_change()
        log.info("endpoints: %d", len(endpoints))

    def warnings(self) -> list[str]:
        """Return which endpoints are left out, for people; empty where none is."""
        return self._warnings

    def _warn(self, warnings: list[str]) -> None:
        """Log what is new: the list changes often where there are many endpoints."""
        before, self._warnings = self._warnings, warnings
        if before and not warnings:
            log.info("all pods get requests again")
        elif warnings != before:
            log.error("%s", warnings[0])


def _told_left_out(endpoints: Sequence[Endpoint], most: int) -> str:
    """Say which of the endpoints, in order, are beyond the most that are used."""
    first, last = endpoints[most].address, endpoints[-1].address
    which = first if first == last else f"{first} to {last}, by address"
    return (
        f"{len(endpoints) - most:,} of {len(endpoints):,} pods get no requests: "
        f"discovery.max_endpoints is {most:,}. Left out: {which}"
    )


class Source(Protocol):
    """A source of endpoints.

    It is made with the fields of its section, and with callbacks. `on_endpoints` gets the whole
    list at first and at each change. `on_failure` gets a message once per new failure,
    `on_recovery` is called when failures are over. Further it gets `clock` (monotonic seconds) and
    `scheme`, of the endpoints' URLs. All are keyword arguments.
    """

    num_failures: int

    async def run(self) -> None:
        """Hand endpoints on until cancelled."""


class Discovery:
    """Hands on the list of endpoints, at first and at each change.

    Where it follows an InferencePool, also the priorities by objective; with `on_rules` and
    `on_offers` its cluster's declarations of adapters.

    Raises:
        MissingLibraryError: The source needs an extra that is not installed.
    """

    def __init__(
        self,
        config: Config,
        *,
        on_endpoints: Callable[[Sequence[Endpoint]], None],
        on_priorities: Callable[[Mapping[str, int]], None],
        on_rules: OnRules | None = None,
        on_offers: OnOffers | None = None,
        clocks: Clocks,
    ) -> None:
        self._config = config.discovery
        self._on_endpoints = on_endpoints
        self._scheme = configured.scheme(config)
        self._kubernetes = KubernetesDiscovery(
            config.discovery.kubernetes,
            on_endpoints=on_endpoints,
            on_priorities=on_priorities,
            scheme=self._scheme,
            engine=config.pods.engine,
            clocks=clocks,
            on_rules=on_rules,
            on_offers=on_offers,
        )
        self._source = self._load(*config.discovery.source, clocks)

    def add_metrics(self, telemetry: Telemetry) -> None:
        """Register the sources' metrics."""
        self._kubernetes.add_metrics(telemetry)
        telemetry.add_counters(
            "dns_failures",
            "Lookups of discovery.dns that failed, wholly or in part. The pods stay as they were.",
            "name",
            self._dns_failures,
        )

    def sources(self) -> list[SourceStatus]:
        """Return how each kind is by which the cluster declares something, if it does."""
        return self._kubernetes.sources()

    def report(
        self, lost: Mapping[str, Loss], states: Mapping[str, AdapterReport] | None = None
    ) -> None:
        """Say what became of what the cluster declares; see `Declarations.report`."""
        self._kubernetes.report(lost, states)

    def why_not_ready(self) -> list[str]:
        """Return reasons, for people, why no endpoints have been handed on."""
        return self._kubernetes.why_not_ready()

    def warnings(self) -> list[str]:
        """Return what keeps us from a source that only people can change."""
        return self._kubernetes.warnings()

    async def run(self) -> None:
        """Hand endpoints on until cancelled, or once where the configuration lists them."""
        config = self._config
        if self._source is not None:
            await self._source.run()
        elif config.kubernetes is not None:
            await self._kubernetes.run()
        elif config.file is not None:
            await FileWatch(
                config.file,
                interval_s=config.file_interval_s,
                on_change=self._on_file,
                on_failure=_log_failure,
                on_recovery=_log_recovery,
            ).run()
        else:
            entries = [each.model_dump() for each in config.static or ()]
            self._on_endpoints(make_endpoints(entries, scheme=self._scheme))

    def _load(self, name: str, section: Any, clocks: Clocks) -> Source | None:
        """Return the source that is one file of `discovery`; None for any other."""
        if name in ("static", "file", "kubernetes"):
            return None
        module = import_module(f"extproc.discovery.{name}")
        source: Source = getattr(module, f"{name.capitalize()}Discovery")(
            **section.model_dump(),
            on_endpoints=self._on_endpoints,
            on_failure=_log_failure,
            on_recovery=_log_recovery,
            clock=clocks.clock,
            scheme=self._scheme,
        )
        return source

    def _dns_failures(self) -> Mapping[str, int]:
        dns, source = self._config.dns, self._source
        return {} if dns is None or source is None else {dns.name: source.num_failures}

    def _on_file(self, text: str) -> None:
        self._on_endpoints(parse_endpoints(text, scheme=self._scheme))


def _log_failure(message: str) -> None:
    log.error("endpoints: %s", message)


def _log_recovery() -> None:
    log.info("endpoints: discovery works again")
