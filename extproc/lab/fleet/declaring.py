"""Adapters that pods do not have at first: routers declare them, and their planners load them.

Calls take the time that an engine stops for them, and nothing else; none fails.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from extproc.adapters.adapterstates import Action, AdapterSettings, CallKind, Failure, Result
from extproc.adapters.declared import Declaration
from extproc.lab.fleet.agenda import Agenda
from extproc.lab.fleet.knowledge import Knowledge
from extproc.lab.fleet.settings import Loading
from extproc.lab.fleet.virtualpod import FleetPod
from extproc.lab.fleet.virtualrouter import FleetRouter
from extproc.routing.conflicts import Offer
from extproc.types import ModelCard, Pick, RequestInfo

LOOK_S, IDLE_LOOK_S = 0.05, 1.0
"""Between two looks of a planner while requests are held, and else: production's `INTERVAL_S`,
which it need not wait for where something is new."""
_NEW = "new"
"""Stands for an adapter that no pod has."""


class FleetAdapters:
    """Keeps adapters loaded; the first router leads.

    Args:
        adapters: All of them.
        loading: When, and where to.
    """

    def __init__(
        self,
        adapters: Iterable[str],
        base: str,
        *,
        loading: Loading,
        agenda: Agenda,
        pods: Mapping[str, FleetPod],
        routers: Sequence[FleetRouter],
        knowledge: Knowledge,
    ) -> None:
        self._base, self._loading = base, loading
        self._agenda, self._pods, self._knowledge = agenda, pods, knowledge
        offers = {name: Offer(Declaration(name, source_of(name))) for name in adapters}
        self._leader = routers[0]
        for router in routers:
            self._declare(router, offers)
            self._look(router)

    def _declare(self, router: FleetRouter, offers: Mapping[str, Offer]) -> None:
        catalog, now = router.router.catalog, self._agenda.now
        if self._loading is Loading.ANYWHERE:
            catalog.planner.configure(AdapterSettings(patience_s=0.0))
        catalog.planner.declare([each.declaration for each in offers.values()], now=now)
        catalog.declare(offers, {frozenset(): self._base})
        router.pool.declare({name: ModelCard(name, self._base) for name in offers}, now=now)

    def look_soon(self, router: FleetRouter) -> None:
        """Have a router's planner look now: a request waits for an adapter."""
        self._agenda.after(0.0, partial(self._tick, router))

    def _look(self, router: FleetRouter) -> None:
        self._tick(router)
        wait_s = LOOK_S if len(router.router.queue) else IDLE_LOOK_S
        self._agenda.after(wait_s, partial(self._look, router))

    def _tick(self, router: FleetRouter) -> None:
        catalog, queue, now = router.router.catalog, router.router.queue, self._agenda.now
        held = queue.adapters(now) if self._may_load(router) else []
        states, rates = router.pool.pod_states(now=now), catalog.demand.rates(now)
        leads = router is self._leader
        for action in catalog.planner.tick(states, rates, held, now=now, is_leading=leads):
            self._begin(router, action)

    def _may_load(self, router: FleetRouter) -> bool:
        """Return whether what requests wait for is loaded already now."""
        if self._loading is not Loading.IN_TURN:
            return True
        now = self._agenda.now
        asked = RequestInfo(self._base, adapter=_NEW, arrived_at_s=now)
        columns = router.pool.columns(now=now)
        return isinstance(router.router.picker.pick(columns, asked, now=now), Pick)

    def _begin(self, router: FleetRouter, action: Action) -> None:
        pod, ends_s = self._pods.get(action.address), self._agenda.now
        if pod is not None and action.kind is CallKind.UNLOAD:
            pod.unregister(action.name)
        elif pod is not None:
            pod.register(action.name, ends_s, root=action.path)
            ends_s = pod.free_at_s
        self._agenda.at(ends_s, partial(self._end, router, action))

    def _end(self, router: FleetRouter, action: Action) -> None:
        now, pod = self._agenda.now, self._pods.get(action.address)
        result = Result() if pod is not None else Result(Failure.UNREACHABLE, "it has gone")
        router.router.catalog.planner.finished(action, result, now=now)
        if pod is not None:
            self._knowledge.read_models(router, pod)
            self._knowledge.list_models(pod)
        self._tick(router)
        router.router.queue.freed(now)


def source_of(adapter: str) -> str:
    """Return the folder of an adapter."""
    return f"/adapters/{adapter}"
