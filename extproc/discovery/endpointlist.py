"""The list of endpoints as it is used, and who follows it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from extproc.meters import Meters
from extproc.reports.readiness import Readiness
from extproc.types import Endpoint

log = logging.getLogger(__name__)


class EndpointSource(Protocol):
    """A source of endpoints.

    It is made with the fields of its section, and with callbacks. `on_endpoints` gets the whole
    list at first and at each change. `on_failure` gets a message once per new failure,
    `on_recovery` is called when failures are over. Further it gets `clock` (monotonic seconds) and
    `scheme`, of the endpoints' URLs. All are keyword arguments.
    """

    async def run(self) -> None:
        """Hand endpoints on until cancelled, or once where they do not change."""


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
            warnings = [_left_out_warning(endpoints, self._most)]
            endpoints = endpoints[: self._most]
        self._warn(warnings)
        self._readiness.set_endpoints(endpoints, now=self._clock())
        for each in self._followers:
            each.set_endpoints(endpoints)
        self._on_change()
        log.info("pods: %d", len(endpoints))

    def add_metrics(self, meters: Meters) -> None:
        """Register how many endpoints are left out."""
        meters.add_gauge(
            "endpoints_left_out",
            "Pods beyond discovery.max_endpoints, by address. They get no requests.",
            lambda: self.num_left_out,
        )

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


def _left_out_warning(endpoints: Sequence[Endpoint], most: int) -> str:
    """Say which of the endpoints, in order, are beyond the most that are used."""
    first, last = endpoints[most].address, endpoints[-1].address
    which = first if first == last else f"{first} to {last}, by address"
    return (
        f"{len(endpoints) - most:,} of {len(endpoints):,} pods get no requests: "
        f"discovery.max_endpoints is {most:,}. Left out: {which}"
    )
