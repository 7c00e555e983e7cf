"""What a cluster declares of adapters, and what it is told of that. Part of `app`.

InferenceModelRewrites and LLMRoutes of the pools that this router serves, in one namespace.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Generic, Protocol, TypeVar

from extproc.app.optionalkind import Client as Listing
from extproc.app.optionalkind import NewWatch, OptionalKind
from extproc.app.publisher import Publisher
from extproc.app.statuses import Client as Writing
from extproc.app.statuses import Statuses
from extproc.core.adapters.precedence import Loss, Offer, RuleSet
from extproc.core.adapters.sources import SourceStatus
from extproc.core.kubernetes.declaring import Reader, Reading, SpecKeeper, origin_of
from extproc.core.kubernetes.llmroutes import adapter_named_in, is_route_of, read_route
from extproc.core.kubernetes.objects import (
    DeclaringObject,
    InferenceModelRewrite,
    LLMRoute,
    PoolRef,
    Query,
    rewrite_queries,
    route_queries,
)
from extproc.core.kubernetes.rewrites import is_rewrite_of, read_rewrite
from extproc.core.kubernetes.status import AdapterReport, Finding, Part, parts

log = logging.getLogger(__name__)

D = TypeVar("D", bound=DeclaringObject)
T = TypeVar("T")

OnRules = Callable[[Sequence[Reading[RuleSet]]], None]
OnOffers = Callable[[Sequence[Reading[Offer]]], None]

_UNWANTED = "; if there are none on purpose, set discovery.kubernetes.declarations: false"


class Client(Listing, Writing, Protocol):
    """The part of `KubernetesClient` that is used here."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Where declarations are looked for.

    Attributes:
        pools: Ours; what refers to others is not read.
        namespace: Empty for our own.
        engine: Name of the profile by which the pods' metrics are read.
        relist_s: Within which a definition that was installed is found.
        wall_clock: Wall seconds.
        clock: Monotonic seconds.
        rng: For jitter.
    """

    client: Client
    pools: frozenset[PoolRef]
    namespace: str
    engine: str
    relist_s: float
    wall_clock: Callable[[], float]
    clock: Callable[[], float]
    rng: Random


class Declarations:
    """The declarations of a cluster, followed while `run` runs.

    Each callback gets what all objects of a kind say, the oldest first, once known and at each
    change. `report` is to be called then, with what `core.adapters.precedence` says of it.
    """

    def __init__(
        self, cluster: Cluster, new_watch: NewWatch[Any], *, on_rules: OnRules, on_offers: OnOffers
    ) -> None:
        def rules_of(source: InferenceModelRewrite) -> tuple[RuleSet, str] | None:
            return _ours(source, read_rewrite(source, cluster.pools), cluster.pools)

        def offer_of(source: LLMRoute) -> tuple[Offer, str] | None:
            read = read_route(source, cluster.pools, engine=cluster.engine)
            return _ours(source, read, cluster.pools)

        pools, namespace = cluster.pools, cluster.namespace
        rewrites = rewrite_queries(namespace, SpecKeeper(lambda each: is_rewrite_of(each, pools)))
        routes = route_queries(
            namespace, SpecKeeper(lambda each: is_route_of(each, pools), adapter_named_in)
        )
        self._rewrites = _Kind(
            cluster, "InferenceModelRewrites", rewrites, new_watch, Reader(rules_of), on_rules
        )
        reader = Reader(offer_of, adapter_named_in)
        self._routes = _Kind(cluster, "LLMRoutes", routes, new_watch, reader, on_offers, _UNWANTED)

    async def run(self) -> None:
        """Follow until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._rewrites.run())
            tasks.create_task(self._routes.run())

    def sources(self) -> list[SourceStatus]:
        """Return how each kind is."""
        return [self._routes.source(has_terms=True), self._rewrites.source(has_terms=False)]

    def report(
        self, lost: Mapping[str, Loss], states: Mapping[str, AdapterReport] | None = None
    ) -> None:
        """Say what became of what was handed on last; what is news is written.

        Args:
            lost: By origin, of those who lost something.
            states: How adapters are served, by the names that clients write. None: this router
                does not know, and leaves it to those that do.
        """

        def finding(each: Reading[Offer]) -> Finding:
            loss, offer = lost.get(each.origin), each.declared
            if states is None or offer is None or (loss is not None and loss.is_whole):
                return Finding(loss, knows_state=states is not None)
            return Finding(loss, states.get(offer.declaration.name), knows_state=True)

        self._rewrites.report(lambda each: Finding(lost.get(each.origin)))
        self._routes.report(finding)


def _ours(source: DeclaringObject, read: T | None, pools: Collection[PoolRef]) -> T | None:
    """Return what was read of an object; say so where it is of none of our pools."""
    if read is None:  # maybe another router's, so its status is not ours to write
        ours = ", ".join(f"{each.kind} {each.name}" for each in pools)
        log.info("%s: of no pool of this router (%s): no effect here", origin_of(source), ours)
    return read


class _Kind(Generic[D, T]):
    """One kind: what its objects say, and what is said of them."""

    def __init__(
        self,
        cluster: Cluster,
        title: str,
        queries: Sequence[Query[D]],
        new_watch: NewWatch[D],
        reader: Reader[D, T],
        on_readings: Callable[[Sequence[Reading[T]]], None],
        hint: str = "",
    ) -> None:
        self._title, self._reader = title, reader
        self._readings: Sequence[Reading[T]] = ()
        self._is_read = False
        self._said: dict[str, tuple[Reading[T], Finding, tuple[Part, ...]]] = {}
        self._on_readings = on_readings
        self._publisher = Publisher(self._on_change)
        client, relist_s = cluster.client, cluster.relist_s
        self._statuses = Statuses(client, wall_clock=cluster.wall_clock, relist_s=relist_s)
        self._kind = OptionalKind(
            client,
            title,
            queries,
            new_watch=new_watch,
            on_objects=self._on_objects,
            relist_s=relist_s,
            clock=cluster.clock,
            rng=cluster.rng,
            hint=hint,
        )

    def source(self, *, has_terms: bool) -> SourceStatus:
        kind = self._kind
        is_read = self._is_read or kind.is_absent
        return SourceStatus(self._title, has_terms, is_read, is_read, kind.age_s, kind.problem)

    async def run(self) -> None:
        with self._publisher:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._kind.run())
                tasks.create_task(self._statuses.run())

    def report(self, finding_of: Callable[[Reading[T]], Finding]) -> None:
        """Say what was found of each object, made anew only where it is news."""
        before, self._said = self._said, {}
        for each in self._readings:
            finding, said = finding_of(each), before.get(each.origin)
            if said is None or said[:2] != (each, finding):
                said = each, finding, parts(each, finding)
            self._said[each.origin] = said
        if self._said != before:
            self._statuses.want({origin: each[2] for origin, each in self._said.items()})

    def _on_objects(self, query: Query[D] | None, objects: Collection[D]) -> None:
        self._statuses.know(query, objects)
        self._publisher.publish(lambda: self._reader.read(objects))

    def _on_change(self, readings: Sequence[Reading[T]]) -> None:
        self._readings, self._is_read = readings, True
        self._on_readings(readings)
