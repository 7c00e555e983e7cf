"""A Kubernetes API server, and the endpoints that are followed there. Part of `app`.

These are asked for, and must be granted by a Role in the namespace of the pods (`get` is not):

| source | apiGroups | resources | verbs | resourceNames |
|---|---|---|---|---|
| `pod_selector` | "" | pods | list, watch | |
| `service` | discovery.k8s.io | endpointslices | list, watch | |
| `inference_pool` | inference.networking.k8s.io | inferencepools | list, watch | the pool's name |
| | "" | pods | list, watch | |

An InferencePool is listed by its name, which is what lets a Role name it. When it is there, its
InferenceObjectives and InferenceModelRewrites are looked for once, to say that they are not read: a
Role may grant `list` of `inferenceobjectives` and `inferencemodelrewrites` in
inference.networking.x-k8s.io and llm-d.ai for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import TypeVar

from extproc.app.inferencepool import PoolPresence, tell_unread
from extproc.core.kubernetes.endpoints import pod_endpoints, selection, slice_endpoints
from extproc.core.kubernetes.objects import (
    EndpointSlice,
    InferencePool,
    KubeObject,
    Query,
    pods_query,
    pool_query,
    slices_query,
)
from extproc.core.types import Endpoint
from extproc.shell.discovery.kubernetes import KubernetesClient
from extproc.shell.discovery.kubewatch import ListWatch, WatchStats, WatchTimes

log = logging.getLogger(__name__)

OnEndpoints = Callable[[Sequence[Endpoint]], None]

COALESCE_S = 0.05
"""A thousand changes in a second are read and told of as twenty: 500 pods take 1 ms to read."""

_Endpoints = tuple[Endpoint, ...]

T = TypeVar("T", bound=KubeObject)


class Kubernetes:
    """One API server, and what is followed there.

    Each `follow_*` runs until it is cancelled. It hands on the whole list of endpoints when it is
    known and at each change; while the API server cannot be asked, nothing.

    Args:
        kubeconfig: As `KubernetesClient` takes it.
        clock: Monotonic seconds.
        rng: For jitter.
        times: Of watches and lists.

    Raises:
        MissingLibraryError: The extra `kubernetes` is not installed.
    """

    def __init__(
        self,
        kubeconfig: Path | None = None,
        *,
        clock: Callable[[], float],
        rng: Random,
        times: WatchTimes | None = None,
    ) -> None:
        self._client = KubernetesClient(kubeconfig)
        self._clock = clock
        self._rng = rng
        self._times = times
        self._stats = WatchStats()

    async def follow_pods(
        self,
        selector: str,
        ports: Sequence[int],
        on_endpoints: OnEndpoints,
        *,
        namespace: str = "",
        scheme: str = "http",
    ) -> None:
        """Pods by label selector; an endpoint for each port. An empty namespace is our own."""
        with _Publisher(on_endpoints) as publisher:
            await self._follow_pods(selector, ports, publisher, namespace, scheme)

    async def follow_service(
        self,
        service: str,
        on_endpoints: OnEndpoints,
        *,
        port: int | str | None = None,
        namespace: str = "",
        scheme: str = "http",
    ) -> None:
        """All endpoints of a Service, those that are not ready too.

        Args:
            service: Its name.
            on_endpoints: Gets them.
            port: A port's name in the Service or number on the pods; None if it has one only.
            namespace: Empty for our own.
            scheme: Of the endpoints' URLs.
        """
        trouble = ""

        def read(slices: Collection[EndpointSlice]) -> _Endpoints | None:
            nonlocal trouble
            try:
                return slice_endpoints(slices, port, scheme=scheme)
            except ValueError as error:
                if str(error) != trouble:
                    trouble = str(error)
                    log.error("Service %s: %s", service, trouble)
                return None

        with _Publisher(on_endpoints) as publisher:
            await self._watch(
                slices_query(service, namespace=namespace),
                lambda slices: publisher.publish(lambda: read(slices)),
            ).run()

    async def follow_pool(
        self,
        presence: PoolPresence,
        on_endpoints: OnEndpoints,
        *,
        namespace: str = "",
        scheme: str = "http",
    ) -> None:
        """The endpoints of an InferencePool: not known before it exists, none once it was deleted.

        When it selects other pods, the ones it selected before stay until those are known.
        """
        chosen: tuple[str, tuple[int, ...]] | None = None
        following: asyncio.Task[None] | None = None
        with _Publisher(on_endpoints) as publisher:
            async with asyncio.TaskGroup() as tasks:

                def on_pools(pools: Collection[InferencePool]) -> None:
                    nonlocal chosen, following
                    pool, was_there = next(iter(pools), None), presence.was_there
                    presence.told(pool, namespace or self._client.known_namespace)
                    if presence.was_there and not was_there:
                        tasks.create_task(tell_unread(self._client, presence.name, namespace))
                    before, chosen = chosen, selection(pool)
                    if following is not None and chosen != before:
                        following.cancel()
                        following = None
                    if chosen is None and presence.was_there:
                        publisher.publish(tuple)
                    elif chosen is not None and following is None:
                        follow = self._follow_pods(*chosen, publisher, namespace, scheme)
                        following = tasks.create_task(follow)

                await self._watch(pool_query(presence.name, namespace=namespace), on_pools).run()

    async def aclose(self) -> None:
        """Close all connections; what follows must have been cancelled."""
        await self._client.aclose()

    # --- what metrics tell -------------------------------------------------------------------

    @property
    def lists(self) -> Mapping[str, int]:
        """Complete lists taken, by resource."""
        return self._stats.lists

    @property
    def failures(self) -> Mapping[str, int]:
        """Lists and watches that failed, by reason."""
        return self._stats.failures

    @property
    def contact_age_s(self) -> float:
        """Seconds since the API server was heard of by the watch that it is longest for."""
        return max((self._clock() - at_s for at_s in self._stats.contacts_s.values()), default=0.0)

    # --- parts -------------------------------------------------------------------------------

    async def _follow_pods(
        self,
        selector: str,
        ports: Sequence[int],
        publisher: _Publisher,
        namespace: str,
        scheme: str,
    ) -> None:
        await self._watch(
            pods_query(selector, namespace=namespace),
            lambda pods: publisher.publish(lambda: pod_endpoints(pods, ports, scheme=scheme)),
        ).run()

    def _watch(self, query: Query[T], on_change: Callable[[Collection[T]], None]) -> ListWatch[T]:
        return ListWatch(
            self._client,
            query,
            on_change=on_change,
            stats=self._stats,
            clock=self._clock,
            rng=self._rng,
            times=self._times,
        )


class _Publisher:
    """Hands endpoints on when they have changed: the first ones at once, the others gathered."""

    def __init__(self, on_endpoints: OnEndpoints) -> None:
        self._on_endpoints = on_endpoints
        self._told: _Endpoints | None = None
        self._read: Callable[[], _Endpoints | None] = tuple
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> _Publisher:
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def publish(self, read: Callable[[], _Endpoints | None]) -> None:
        """Have the endpoints read, now or soon: all of them, None where they cannot be told."""
        self._read = read
        if self._told is None:
            self._tell()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(COALESCE_S, self._tell)

    def _tell(self) -> None:
        self._timer = None
        endpoints = self._read()
        if endpoints is not None and endpoints != self._told:
            self._told = endpoints
            self._on_endpoints(endpoints)
