"""The endpoints that discovery reports of a cluster."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

from extproc.discovery.kubernetes.apiserver import Kubernetes
from extproc.discovery.kubernetes.kubewatch import WatchTimes
from extproc.types import Endpoint
from tests.waiting import beside, eventually

PATIENCE_S = 60.0
TIMES = WatchTimes(watch_s=20.0, relist_s=3600.0)
"""No relist: losses must be found by their signs."""

Truth = Mapping[str, bool]
"""By address: whether it is ready."""


class Followed:
    """Collects the reports.

    Attributes:
        endpoints: The newest; None before the first report.
        num_reports: Number of reports.
        least: The smallest number of endpoints since the first report that had any.
    """

    def __init__(self, kubernetes: Kubernetes) -> None:
        self.kubernetes = kubernetes
        self.endpoints: Sequence[Endpoint] | None = None
        self.num_reports = 0
        self.least = 0

    def record(self, endpoints: Sequence[Endpoint]) -> None:
        self.endpoints = endpoints
        self.num_reports += 1
        self.least = min(self.least, len(endpoints)) if self.least else len(endpoints)

    @property
    def seen(self) -> Truth | None:
        if self.endpoints is None:
            return None
        return {endpoint.address: endpoint.is_ready for endpoint in self.endpoints}

    async def until(self, truth: Truth, *, within_s: float = PATIENCE_S) -> None:
        """Wait until the report is the truth.

        Raises:
            AssertionError: It does not become the truth; with the differences.
        """
        try:
            await eventually(lambda: self.seen == truth, within_s=within_s, every_s=0.005)
        except AssertionError:
            seen = self.seen or {}
            too_many = {each: seen[each] for each in seen if seen[each] != truth.get(each)}
            too_few = {each: truth[each] for each in truth if seen.get(each) != truth[each]}
            message = f"after {within_s} s: seen {too_many}, true {too_few}"
            raise AssertionError(message) from None


@asynccontextmanager
async def following(
    kubeconfig: Path,
    follow: Callable[[Kubernetes, Callable[[Sequence[Endpoint]], None]], Coroutine[Any, Any, None]],
    *,
    times: WatchTimes = TIMES,
) -> AsyncIterator[Followed]:
    """Follow something as the owner of a kubeconfig, for as long as the block lasts."""
    kubernetes = Kubernetes(kubeconfig, clock=time.monotonic, rng=Random(1), times=times)
    followed = Followed(kubernetes)
    try:
        async with beside(follow(kubernetes, followed.record)):
            yield followed
    finally:
        await kubernetes.aclose()
