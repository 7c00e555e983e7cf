"""The list of endpoints, handed on to all that follow it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from extproc.bounds import MAX_ENDPOINTS
from extproc.fleet.readiness import Readiness
from extproc.types import Endpoint

log = logging.getLogger(__name__)


class Follower(Protocol):
    """Follows the list."""

    def set_endpoints(self, endpoints: Sequence[Endpoint]) -> None:
        """Replace the endpoints."""


class EndpointList:
    """Hands on what discovery lists, `MAX_ENDPOINTS` at most.

    Args:
        readiness: Waits for the endpoints of the first list.
        followers: Told in this order.
        on_change: Called after them.
        clock: Monotonic seconds.

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
    ) -> None:
        self._readiness, self._followers = readiness, followers
        self._on_change, self._clock = on_change, clock
        self.num_left_out = 0

    def set(self, endpoints: Sequence[Endpoint]) -> None:
        """Replace the endpoints."""
        self.num_left_out = max(0, len(endpoints) - MAX_ENDPOINTS)
        if self.num_left_out:
            # By address, so that all replicas and Envoy use the same ones.
            endpoints = sorted(endpoints, key=lambda each: each.address)[:MAX_ENDPOINTS]
            log.error("%d endpoints beyond the first %d left out", self.num_left_out, MAX_ENDPOINTS)
        self._readiness.set_endpoints(endpoints, now=self._clock())
        for each in self._followers:
            each.set_endpoints(endpoints)
        self._on_change()
        log.info("endpoints: %d", len(endpoints))
