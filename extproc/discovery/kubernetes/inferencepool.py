"""Whether InferencePools exist, and the endpoints of several as one list."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from extproc.discovery.kubernetes.endpoints import pools_endpoints
from extproc.discovery.kubernetes.objects import InferencePool
from extproc.types import Endpoint

OnEndpoints = Callable[[Sequence[Endpoint]], None]

log = logging.getLogger(__name__)


class PoolPresence:
    """Whether the followed pool exists.

    Until it has been seen once, its endpoints are unknown and the service is not ready: the name
    may be misspelled. If it is deleted later, its endpoints are removed, and the service stays
    ready to answer with 503.

    Attributes:
        was_there: It has been seen once.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._namespace = ""
        self._is_there: bool | None = None
        self.was_there = False

    def record(self, pool: InferencePool | None, namespace: str) -> None:
        """Record the pool of a list or a watch, None if there is none."""
        self._namespace = namespace
        self._is_there = pool is not None and pool.metadata.deletion_timestamp is None
        if self._is_there:
            self.was_there = True
        elif self.was_there:
            log.warning("%s was deleted: requests get 503 until it exists again", self.title)
        else:
            log.warning("%s does not exist: not ready until it does", self.title)

    def why_not_ready(self) -> list[str]:
        """Return the reason, for people; empty before the first list and once the pool was seen."""
        is_missing = self._is_there is False and not self.was_there
        return [f"{self.title} does not exist"] if is_missing else []

    def found(self) -> Mapping[str, float]:
        """Return 1 or 0 by the pool's name; empty while it is unknown."""
        if self._is_there is None:
            return {}
        return {f"{self._namespace}/{self.name}": float(self._is_there)}

    @property
    def title(self) -> str:
        """Its name for people."""
        return f"InferencePool {self._namespace}/{self.name}"


class PoolsTogether:
    """Hands on the endpoints of all pools at once, as soon as those of each are known.

    Of one pool alone they are handed on as they are.
    """

    def __init__(self, names: Collection[str], on_endpoints: OnEndpoints) -> None:
        self._names = names
        self._on_endpoints = on_endpoints
        self._by_pool: dict[str, Sequence[Endpoint]] = {}

    def taker(self, name: str) -> OnEndpoints:
        """Return what takes the endpoints of one pool."""
        return self._on_endpoints if len(self._names) == 1 else partial(self._take, name)

    def _take(self, name: str, endpoints: Sequence[Endpoint]) -> None:
        self._by_pool[name] = endpoints
        if len(self._by_pool) == len(self._names):
            self._on_endpoints(pools_endpoints(self._by_pool))
