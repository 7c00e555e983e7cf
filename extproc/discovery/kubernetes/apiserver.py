"""The endpoints that a Kubernetes API server lists.

These permissions are needed, by a Role in the namespace of the pods (`get` is not):

| source | apiGroups | resources | verbs | resourceNames |
|---|---|---|---|---|
| `pod_selector` | "" | pods | list, watch | |
| `service` | discovery.k8s.io | endpointslices | list, watch | |
| `inference_pool` | inference.networking.k8s.io | inferencepools | list, watch | the pools' names |
| | "" | pods | list, watch | |

An InferencePool is listed by its name, so that a Role can name it. In llm-d.ai and
inference.networking.x-k8s.io a Role may grant more: `list` and `watch` of `inferenceobjectives`,
whose priorities are followed, and of `inferencemodelrewrites`. In llm.extproc it may grant the same
of `llmroutes`. For the status of the last two, `patch` of `inferencemodelrewrites/status` and
`llmroutes/status`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import TypeVar

from extproc.discovery.kubernetes.api import KubernetesClient
from extproc.discovery.kubernetes.endpoints import (
    pod_endpoints,
    priorities,
    selection,
    slice_endpoints,
    why_no_endpoints,
    why_no_pods,
    without_pool,
)
from extproc.discovery.kubernetes.inferencepool import OnEndpoints, PoolPresence
from extproc.discovery.kubernetes.kubewatch import ListWatch, WatchStats, WatchTimes
from extproc.discovery.kubernetes.objects import (
    EndpointSlice,
    InferenceObjective,
    InferencePool,
    KubeObject,
    Pod,
    Query,
    objectives_query,
    pods_query,
    pool_query,
    slices_query,
)
from extproc.discovery.kubernetes.publisher import Publisher
from extproc.phrases import listed
from extproc.types import Endpoint

log = logging.getLogger(__name__)

OnPriorities = Callable[[Mapping[str, int]], None]

_Endpoints = tuple[Endpoint, ...]

T = TypeVar("T", bound=KubeObject)


class Kubernetes:
    """One API server, and the endpoints that are followed there.

    Each `follow_*` runs until it is cancelled. It hands on the whole list of endpoints once it is
    known and at each change; nothing while the API server cannot be reached.

    Args:
        kubeconfig: As for `KubernetesClient`.
        clock: Monotonic seconds.
        rng: For jitter.
        times: Of watches and lists.
        namespace: Of the pods; empty for our own.
        scheme: Of the endpoints' URLs.

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
        namespace: str | None = None,
        scheme: str = "http",
    ) -> None:
        self.client = KubernetesClient(kubeconfig)
        self._clock = clock
        self._rng = rng
        self.times = times or WatchTimes()
        self.namespace = namespace or ""
        self._scheme = scheme
        self._stats = WatchStats()
        self._lacking: dict[str, str] = {}

    async def follow_pods(
        self, selector: str, ports: Sequence[int], on_endpoints: OnEndpoints
    ) -> None:
        """Follow pods by label selector; each port is an endpoint."""
        with Publisher(on_endpoints) as publisher:
            await self._follow_pods(selector, ports, publisher, "discovery")

    async def follow_service(
        self, service: str, on_endpoints: OnEndpoints, *, port: int | str | None = None
    ) -> None:
        """Follow all endpoints of a Service, including those that are not ready.

        `port` is a port's name in the Service or its number on the pods; None if it has only one.
        """

        def read(slices: Collection[EndpointSlice]) -> _Endpoints | None:
            try:
                found = slice_endpoints(slices, port, scheme=self._scheme)
            except ValueError as error:
                self._note_lack(f"Service {service}", str(error))
                return None
            why = "" if found else why_no_endpoints(slices, port)
            self._note_lack(f"Service {service}", why)
            return found

        with Publisher(on_endpoints) as publisher:
            await self.watch(
                slices_query(service, namespace=self.namespace),
                lambda slices: publisher.publish(lambda: read(slices)),
            ).run()

    async def follow_pool(self, presence: PoolPresence, on_endpoints: OnEndpoints) -> None:
        """Follow an InferencePool: unknown before it exists, no endpoints once it was deleted.

        When it selects other pods, the previous ones stay until the new ones are known.
        """
        chosen: tuple[str, tuple[int, ...]] | None = None
        following: asyncio.Task[None] | None = None
        with Publisher(on_endpoints) as publisher:
            async with asyncio.TaskGroup() as tasks:

                def on_pools(pools: Collection[InferencePool]) -> None:
                    nonlocal chosen, following
                    pool = next(iter(pools), None)
                    presence.record(pool, self.namespace or self.client.known_namespace)
                    before, chosen = chosen, selection(pool)
                    if following is not None and chosen != before:
                        following.cancel()
                        following = None
                    if chosen is None and presence.was_there:
                        self._lacking[presence.title] = "was deleted: requests get 503"
                        publisher.publish(tuple)
                    elif chosen is not None and following is None:
                        followed = self._follow_pods(*chosen, publisher, presence.title)
                        following = tasks.create_task(followed)

                query = pool_query(presence.name, namespace=self.namespace)
                await self.watch(query, on_pools).run()

    async def follow_objectives(self, pools: Sequence[str], on_priorities: OnPriorities) -> None:
        """Follow the priorities that the InferenceObjectives of pools give, by their names."""

        def on_objectives(found: Collection[InferenceObjective]) -> None:
            on_priorities(priorities(found, pools))
            if lost := without_pool(found):
                log.warning(
                    "InferenceObjectives that name no pool have no effect: %s", listed(lost)
                )

        await self.watch(objectives_query(self.namespace), on_objectives).run()

    async def aclose(self) -> None:
        """Close all connections; each `follow_*` must have been cancelled."""
        await self.client.aclose()

    @property
    def lists(self) -> Mapping[str, int]:
        """Complete lists received, by resource."""
        return self._stats.lists

    @property
    def failures(self) -> Mapping[str, int]:
        """Lists and watches that failed, by reason."""
        return self._stats.failures

    def warnings(self) -> list[str]:
        """Return what only people can change: why the API server is not read, or lists no pods."""
        refusal = self.client.refusal
        troubles = [refusal] if refusal else sorted(set(self._stats.troubles.values()))
        return [*troubles, *(f"{what} {why}" for what, why in self._lacking.items())]

    @property
    def contact_age_s(self) -> float:
        """Seconds since the API server last sent something, of the watch with the longest gap."""
        return max((self._clock() - at_s for at_s in self._stats.contacts_s.values()), default=0.0)

    async def _follow_pods(
        self,
        selector: str,
        ports: Sequence[int],
        publisher: Publisher[Sequence[Endpoint]],
        what: str,
    ) -> None:
        def read(pods: Collection[Pod]) -> _Endpoints:
            found = pod_endpoints(pods, ports, scheme=self._scheme)
            self._note_lack(what, "" if found else why_no_pods(pods, selector))
            return found

        await self.watch(
            pods_query(selector, namespace=self.namespace),
            lambda pods: publisher.publish(lambda: read(pods)),
        ).run()

    def _note_lack(self, what: str, why: str) -> None:
        """Note why something has no pods for us, "" where it has; each reason is logged once."""
        if why == self._lacking.get(what, ""):
            return
        self._lacking.pop(what, None)
        if why:
            self._lacking[what] = why
            log.warning("%s %s", what, why)

    def watch(
        self, query: Query[T], on_change: Callable[[Collection[T]], None], hint: str = ""
    ) -> ListWatch[T]:
        """Return what follows a query; see there. Nothing is followed yet."""
        return ListWatch(
            self.client,
            query,
            on_change=on_change,
            stats=self._stats,
            clock=self._clock,
            rng=self._rng,
            times=self.times,
            hint=hint,
        )
