"""Adapters that pods do not have at first: routers declare them, and their planners load them.

Calls take the time that an engine stops for them, and nothing else; none fails.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from extproc.adapters.adapterstates import Action, CallKind, Failure, Result
from extproc.adapters.declared import Declaration
from extproc.lab.fleet.agenda import Agenda
from extproc.lab.fleet.knowledge import Knowledge
from extproc.lab.fleet.virtualpod import FleetPod
from extproc.lab.fleet.virtualrouter import FleetRouter
from extproc.routing.conflicts import Offer
from extproc.types import ModelCard

PLAN_S, IDLE_PLAN_S = 0.05, 1.0
"""Between two plans while requests are held, and else: production's `INTERVAL_S`,
which it need not wait for where something is new."""


class FleetAdapters:
    """Keeps adapters loaded; the first router leads.

    Args:
        adapters: All of them.
    """

    def __init__(
        self,
        adapters: Iterable[str],
        base: str,
        *,
        agenda: Agenda,
        pods: Mapping[str, FleetPod],
        routers: Sequence[FleetRouter],
        knowledge: Knowledge,
    ) -> None:
        self._base = base
        self._agenda, self._pods, self._knowledge = agenda, pods, knowledge
        offers = {name: Offer(Declaration(name, f"/adapters/{name}")) for name in adapters}
        self._leader = routers[0]
        for router in routers:
            self._declare(router, offers)
            self._plan(router)

    def _declare(self, router: FleetRouter, offers: Mapping[str, Offer]) -> None:
        catalog, now = router.router.catalog, self._agenda.now
        catalog.planner.declare([each.declaration for each in offers.values()], now=now)
        catalog.declare(offers, {frozenset(): self._base})
        router.pool.declare({name: ModelCard(name, self._base) for name in offers}, now=now)

    def plan_soon(self, router: FleetRouter) -> None:
        """Have a router's planner plan now: a request waits for an adapter."""
        self._agenda.after(0.0, partial(self._tick, router))

    def _plan(self, router: FleetRouter) -> None:
        self._tick(router)
        wait_s = PLAN_S if len(router.router.queue) else IDLE_PLAN_S
        self._agenda.after(wait_s, partial(self._plan, router))

    def _tick(self, router: FleetRouter) -> None:
        catalog, queue, now = router.router.catalog, router.router.queue, self._agenda.now
        held, rates = queue.adapters(now), catalog.demand.rates(now)
        states = router.pool.pod_states(now=now)
        leads = router is self._leader
        for action in catalog.planner.tick(states, rates, held, now=now, is_leading=leads):
            self._begin(router, action)

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
