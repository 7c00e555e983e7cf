"""A cluster's declarations of adapters, and the reports on them.

InferenceModelRewrites and LLMRoutes of the pools that this router serves, in one namespace.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Generic, TypeVar

from extproc.adapters.sources import SourceStatus
from extproc.discovery.kubernetes.apiserver import Kubernetes
from extproc.discovery.kubernetes.declarers import Declared, DeclaredObject
from extproc.discovery.kubernetes.llmroutes import routes_of
from extproc.discovery.kubernetes.modelrewrites import rewrites_of
from extproc.discovery.kubernetes.objects import (
    DeclaringObject,
    PoolRef,
    Query,
    rewrites_query,
    routes_query,
)
from extproc.discovery.kubernetes.objectstatus import AdapterReport, Finding, ManagedFields, parts
from extproc.discovery.kubernetes.publisher import Publisher
from extproc.discovery.kubernetes.statuses import Statuses
from extproc.routing.conflicts import Loss, Offer, RuleSet

D = TypeVar("D", bound=DeclaringObject)
T = TypeVar("T")

OnRules = Callable[[Sequence[RuleSet]], None]
OnOffers = Callable[[Sequence[Offer], frozenset[str]], None]
"""Gets what counts, and the names of adapters that are declared in a way that cannot be used."""

PATIENCE_S = 5.0
"""For the router whose object it is to say so, before another one says that it is not its own."""
_UNWANTED = "; if there are none on purpose, set discovery.kubernetes.declarations: false"


class Declarations:
    """The declarations for pools of ours, followed while `run` runs.

    Each callback gets the declarations of all objects of a kind, the oldest first, once known and
    at each change. `report` is to be called then, with the result of `routing.conflicts`.
    """

    def __init__(
        self,
        kubernetes: Kubernetes,
        pools: Collection[PoolRef],
        *,
        engine: str,
        fails_open: bool,
        wall_clock: Callable[[], float],
        on_rules: OnRules,
        on_offers: OnOffers,
    ) -> None:
        ours = frozenset(pools)
        rules = rewrites_of(ours)
        offers = routes_of(ours, engine=engine, fails_open=fails_open)
        rewrites = rewrites_query(kubernetes.namespace, rules)
        self._rewrites = _Kind(
            kubernetes, rewrites, rules, lambda each: on_rules(_declared(each)), wall_clock
        )
        routes = routes_query(kubernetes.namespace, offers)
        self._routes = _Kind(
            kubernetes,
            routes,
            offers,
            lambda each: on_offers(_declared(each), _withheld(each)),
            wall_clock,
            _UNWANTED,
        )

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

        def finding(each: DeclaredObject[Offer]) -> Finding:
            loss, offer = lost.get(each.origin), each.declared
            if states is None or offer is None or (loss is not None and loss.is_whole):
                return Finding(loss, knows_state=states is not None)
            return Finding(loss, states.get(offer.declaration.name), knows_state=True)

        self._rewrites.report(lambda each: Finding(lost.get(each.origin)))
        self._routes.report(finding)


class _Kind(Generic[D, T]):
    """One kind: what its objects say, and what is said of them."""

    def __init__(
        self,
        kubernetes: Kubernetes,
        query: Query[D],
        declared: Declared[D, T],
        on_readings: Callable[[Sequence[DeclaredObject[T]]], None],
        wall_clock: Callable[[], float],
        hint: str = "",
    ) -> None:
        self._declared = declared
        self._readings: Sequence[DeclaredObject[T]] = ()
        self._is_read = False
        self._said: dict[str, tuple[DeclaredObject[T], Finding, tuple[ManagedFields, ...]]] = {}
        self._on_readings = on_readings
        self._publisher = Publisher(self._on_change)
        relist_s, client = kubernetes.times.relist_s, kubernetes.client
        self._statuses = Statuses(client, query, wall_clock=wall_clock, relist_s=relist_s)
        self._foreign_statuses = Statuses(
            client, query, wall_clock=wall_clock, relist_s=relist_s, patience_s=PATIENCE_S
        )
        self._watch = kubernetes.watch(query, self._on_objects, hint)

    def source(self, *, has_terms: bool) -> SourceStatus:
        watch = self._watch
        is_read = self._is_read or watch.is_absent
        title = watch.query.title
        return SourceStatus(title, has_terms, is_read, is_read, watch.age_s, watch.problem)

    async def run(self) -> None:
        with self._publisher:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._watch.run())
                tasks.create_task(self._statuses.run())
                tasks.create_task(self._foreign_statuses.run())

    def report(self, finding_of: Callable[[DeclaredObject[T]], Finding]) -> None:
        """Say what was found of each object, made anew only where it is news."""
        before, self._said = self._said, {}
        for each in self._readings:
            finding, said = finding_of(each), before.get(each.origin)
            if said is None or said[:2] != (each, finding):
                said = each, finding, parts(each, finding)
            self._said[each.origin] = said
        if self._said != before:
            ours = {name: each[2] for name, each in self._said.items() if each[0].is_ours}
            self._statuses.want(ours)
            others = self._said.keys() - ours.keys()
            self._foreign_statuses.want({name: self._said[name][2] for name in sorted(others)})

    def _on_objects(self, objects: Collection[D]) -> None:
        for each in (self._statuses, self._foreign_statuses):
            each.know(self._watch.api, objects)
        self._publisher.publish(lambda: self._declared.read(objects))

    def _on_change(self, readings: Sequence[DeclaredObject[T]]) -> None:
        self._readings, self._is_read = readings, True
        self._on_readings(readings)


def _declared(readings: Iterable[DeclaredObject[T]]) -> list[T]:
    return [each.declared for each in readings if each.declared is not None]


def _withheld(readings: Iterable[DeclaredObject[Offer]]) -> frozenset[str]:
    return frozenset(each.withheld for each in readings if each.withheld)
