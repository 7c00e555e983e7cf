"""An InferencePool, told to people: whether it is there, and what beside it is not read.

Part of `app`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Protocol

from extproc.core.kubernetes.objects import InferencePool, beside_pool_queries
from extproc.core.kubernetes.store import ApiError, Store

log = logging.getLogger(__name__)


class Client(Protocol):
    """What is asked; see `KubernetesClient`."""

    async def namespace(self) -> str:
        """Our own."""

    async def get(self, path: str, parameters: Mapping[str, str]) -> bytes:
        """A body."""


class PoolPresence:
    """Whether the pool that is followed is there.

    Before it was there for the first time nothing is known of its endpoints, and the service is not
    ready: the name may be misspelled. When it goes later, its endpoints go with it, and the service
    stays ready to say so.

    Attributes:
        name: Of the pool.
        was_there: It was seen once.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._namespace = ""
        self._is_there: bool | None = None
        self.was_there = False

    def told(self, pool: InferencePool | None, namespace: str) -> None:
        """Take what a list or a watch said of the pool, None where there is none."""
        self._namespace = namespace
        self._is_there = pool is not None and pool.metadata.deletion_timestamp is None
        if self._is_there:
            self.was_there = True
        elif self.was_there:
            log.warning(
                "%s was deleted: requests are answered with 503 until it is there again",
                self._title,
            )
        else:
            log.warning("%s does not exist: not ready before it does", self._title)

    def why_not_ready(self) -> list[str]:
        """A reason, for people; none before the first list, nor once the pool was there."""
        is_missing = self._is_there is False and not self.was_there
        return [f"{self._title} does not exist"] if is_missing else []

    def found(self) -> Mapping[str, float]:
        """1 or 0 by the pool's name; empty as long as it is not known."""
        if self._is_there is None:
            return {}
        return {f"{self._namespace}/{self.name}": float(self._is_there)}

    @property
    def _title(self) -> str:
        return f"InferencePool {self._namespace}/{self.name}"


async def tell_unread(client: Client, pool: str, namespace: str) -> None:
    """Say in one line of the log what says something of the pool and is not read.

    Where the API server does not know a kind, or we may not list it, nothing is said of it.

    Args:
        client: Asks the API server.
        pool: The pool's name.
        namespace: Where; empty for our own.
    """
    num_unread: Counter[str] = Counter()
    for query in beside_pool_queries(namespace):
        store = Store(query)
        try:
            path = query.path(await client.namespace())
            store.read_page(await client.get(path, {}), is_first=True)
        except ApiError as error:
            log.debug("%s: not looked for: %s", query.resource, error)
        num_unread[query.resource] += sum(each.spec.pool_ref.name == pool for each in store.objects)
    found = ", ".join(f"{number} {resource}" for resource, number in num_unread.items() if number)
    if found:
        log.warning(
            "InferencePool %s: %s not read: priorities are those of `admission.priorities`, and "
            "models are not rewritten",
            pool,
            found,
        )
