"""A fleet in virtual time: pods, routers, clients, and faults.

Each router is the production one (pool, admission, picker, policy, accounting) with the production
router's knowledge. It gets scrapes with their real delay, completions when Envoy flushes its access
log, messages of other routers (if configured), and endpoints when discovery sees them. One seed
determines everything, to the byte.

Left out, being the same for every policy: the time that the network and Envoy take.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from extproc.lab.fleet.agenda import Agenda
from extproc.lab.fleet.declaring import FleetAdapters
from extproc.lab.fleet.knowledge import Knowledge
from extproc.lab.fleet.settings import (
    AdapterRegistered,
    FleetEvent,
    FleetSettings,
    PodJoin,
    PodLoss,
    SlowPod,
)
from extproc.lab.fleet.virtualpod import FleetPod, started_engine
from extproc.lab.fleet.virtualrouter import (
    BODY_BYTES_PER_TOKEN,
    FleetRouter,
    FleetTelling,
    claim_of,
    prefix_hashes,
)
from extproc.lab.workload.requests import PLAIN
from extproc.lab.workload.running import FleetResult, FlightState, LabFlight
from extproc.queue import Ticket
from extproc.routing.policies import Policy
from extproc.types import Pick, Rejection, RequestInfo, Wait

if TYPE_CHECKING:
    from extproc.lab.workload.requests import Workload

BASE_MODEL = "base"
ARRIVALS_PER_CHECK = 100
"""Arrivals between two checks whether to give a run up."""


class Fleet:
    """One run.

    Args:
        settings: The fleet.
        workload: The clients.
        policy: The factory of each router's policy.
        seed: Of everything random.
        events: Events besides arrivals.
        policy_name: For the picks.
        gives_up: Whether to stop, given the requests so far and the time.
    """

    def __init__(
        self,
        settings: FleetSettings,
        workload: Workload,
        policy: Callable[[], Policy],
        *,
        seed: int,
        events: Sequence[FleetEvent] = (),
        policy_name: str = "policy",
        gives_up: Callable[[Iterable[LabFlight], float], bool] | None = None,
    ) -> None:
        self.settings = settings
        self.workload = workload
        self.pods: dict[str, FleetPod] = {}
        self.flights: dict[str, LabFlight] = {}
        self._tickets: dict[LabFlight, Ticket] = {}
        self._gone: list[FleetPod] = []
        # An order that aborts nobody is one of a queue that knows of no objectives.
        policies = [policy() for _ in range(settings.num_routers)]
        declared = settings.declared if getattr(policies[0], "aborts", True) else None
        self._claim_by_tenant = {
            name: claim_of(tenant, declared, name) for name, tenant in workload.tenants.items()
        }
        self._plain_claim = claim_of(PLAIN, declared)
        self._agenda = Agenda()
        self._gives_up = gives_up
        self._rng = random.Random(f"fleet/{seed}")
        late = {event.adapter for event in events if isinstance(event, AdapterRegistered)}
        at_first = () if settings.loads_adapters else workload.adapters
        self._adapters = [name for name in at_first if name not in late]
        for _ in range(settings.num_pods):
            self._add_pod()
        self.routers: list[FleetRouter] = []
        tellings = [self._telling(str(number), seed) for number in range(settings.num_routers)]
        for number, (each, telling) in enumerate(zip(policies, tellings, strict=True)):
            router = FleetRouter(
                each,
                policy_name,
                settings,
                router_id=str(number),
                rng=random.Random(f"router/{seed}/{number}"),
                agenda=self._agenda,
                on_cold=partial(self._on_cold, number),
                telling=telling,
            )
            self.routers.append(router)
        for telling in filter(None, tellings):
            telling.begin()
        self._knowledge = Knowledge(settings, self._agenda, self.pods, self.routers, rng=self._rng)
        self._knowledge.start()
        self._declaring: FleetAdapters | None = None
        if settings.loads_adapters:
            self._declaring = FleetAdapters(
                workload.adapters,
                BASE_MODEL,
                agenda=self._agenda,
                pods=self.pods,
                routers=self.routers,
                knowledge=self._knowledge,
            )
        self._agenda.at(settings.warm_up_s, self._start_measuring)
        for event in events:
            self._agenda.at(event.at_s, partial(self._apply, event))

    @property
    def now(self) -> float:
        """Virtual seconds."""
        return self._agenda.now

    def run(self) -> FleetResult:
        """Run to the end, or until it is given up.

        Raises:
            ValueError: The policy broke its contract.
        """
        end_s, gives_up = self.settings.drain_s, self._gives_up
        choose_router = self._rng.randrange
        num_routers = self.settings.num_routers
        for number, arrival in enumerate(self.workload.arrivals):
            self._agenda.go_to(arrival.at_s)
            router = choose_router(num_routers) if num_routers > 1 else 0
            tenant = self.workload.tenants.get(arrival.tenant, PLAIN)
            flight = LabFlight(str(number), arrival, router, tenant.has_objectives)
            self.flights[flight.id] = flight
            if self.settings.patience_s is not None:
                self._agenda.after(self.settings.patience_s, partial(self._lose_patience, flight))
            self._decide(flight, self._info(flight))
            end_s = self.now + self.settings.drain_s
            is_checked = number % ARRIVALS_PER_CHECK == 0
            if is_checked and gives_up is not None and gives_up(self.flights.values(), self.now):
                return self._result(is_cut=True)
        self._drain(end_s)
        return self._result()

    def _drain(self, end_s: float) -> None:
        """Run until no request is running, or until the end."""
        agenda, open_flights = self._agenda, list(self.flights.values())
        while open_flights and agenda.next_s <= end_s:
            agenda.run_until(min(end_s, agenda.next_s + 1.0))
            open_flights = [f for f in open_flights if f.state is FlightState.RUNNING]

    # --- requests ---------------------------------------------------------------------------

    def _info(self, flight: LabFlight) -> RequestInfo:
        """Return the facts that its router gets of a request."""
        arrival, picker = flight.arrival, self.routers[flight.router].router.picker
        has_hashes = arrival.prefix and picker.uses_cached_bytes
        return RequestInfo(
            model=arrival.adapter or BASE_MODEL,
            path="/v1/completions",
            body_bytes=arrival.prompt_tokens * BODY_BYTES_PER_TOKEN,
            request_id=flight.id,
            arrived_at_s=arrival.at_s,
            claim=self._claim_by_tenant.get(arrival.tenant, self._plain_claim),
            prefix_hashes=prefix_hashes(arrival, flight.id) if has_hashes else (),
        )

    def _decide(self, flight: LabFlight, request: RequestInfo) -> None:
        """Ask the flight's router now."""
        router = self.routers[flight.router].router
        # Sent at once when there is room: bounds look at the pods before the next one's turn.
        wake = partial(self._resume, flight)
        decision = router.route(request, now=self.now, wake=wake)
        if isinstance(decision, Ticket):
            self._tickets[flight] = decision
            self._agenda.at(decision.give_up_s, partial(self._resume, flight))
        else:
            self._decided(flight, decision)

    def _resume(self, flight: LabFlight) -> None:
        """Take a held request's result, if it has one."""
        ticket = self._tickets.get(flight)
        if ticket is None:
            return
        decision = self.routers[flight.router].router.resume(ticket, now=self.now)
        if not isinstance(decision, Ticket) and self._tickets.pop(flight, None) is not None:
            self._decided(flight, decision)

    def _decided(self, flight: LabFlight, decision: Pick | Rejection | Wait) -> None:
        if isinstance(decision, Pick):
            self._dispatch(flight, decision)
        elif isinstance(decision, Rejection):
            flight.status, flight.reason = decision.status, decision.reason.value
            flight.end(FlightState.SHED, self.now)

    def _dispatch(self, flight: LabFlight, pick: Pick) -> None:
        flight.pod, flight.pick_id, flight.dispatched_s = pick.address, pick.id, self.now
        pod = self.pods.get(pick.address)
        model = flight.arrival.adapter or BASE_MODEL
        if pod is None or model not in pod.registered:
            flight.has_run, flight.was_unknown = False, pod is not None
            flight.end(FlightState.FAILED, self.now)
            self.routers[flight.router].ended.append(flight)
            return
        pod.submit(flight, self.now)

    def _lose_patience(self, flight: LabFlight) -> None:
        if flight.state is not FlightState.RUNNING:
            return
        pod = self.pods.get(flight.pod)
        if pod is not None:
            pod.catch_up(self.now)
        if flight.state is FlightState.RUNNING and flight.first_token_s is None:
            ticket = self._tickets.pop(flight, None)
            if ticket is not None:
                self.routers[flight.router].router.leave(ticket, now=self.now)
            if pod is not None:
                pod.abort(flight, self.now)
                self.routers[flight.router].ended.append(flight)
            flight.end(FlightState.ABANDONED, self.now)

    def _on_cold(self, router: int) -> None:
        if self._declaring is not None:
            self._declaring.plan_soon(self.routers[router])

    def _telling(self, router_id: str, seed: int) -> FleetTelling | None:
        """Return the sender of a router's messages to the other routers, if they get any."""
        settings = self.settings
        if settings.peer_delay_s is None:
            return None
        return FleetTelling(
            router_id,
            self.routers,
            agenda=self._agenda,
            delay_s=settings.peer_delay_s,
            loss=settings.peer_loss,
            rng=random.Random(f"peers/{seed}/{router_id}"),
        )

    # --- the world --------------------------------------------------------------------------

    def _add_pod(self) -> FleetPod:
        number, ranks = len(self.pods) + len(self._gone) + 1, self.workload.adapters
        group = self.settings.group_of(number - 1)
        settings = self.settings.of(group)
        adapters = [name for name in self._adapters if ranks[name] <= settings.rank_limit]
        pod = FleetPod(
            f"10.0.{number // 250}.{number % 250}:8000",
            started_engine(settings, adapters, ranks),
            base_model=BASE_MODEL,
            adapters=adapters,
            now=self.now,
            group=group,
        )
        self.pods[pod.address] = pod
        return pod

    def _start_measuring(self) -> None:
        for pod in [*self.pods.values(), *self._gone]:
            pod.start_measuring(self.now)

    def _apply(self, event: FleetEvent) -> None:
        match event:
            case PodLoss(pod=number):
                pod = list(self.pods.values())[number]
                self._kill(pod)
                self._knowledge.lose(pod)
                self._knowledge.change()
            case PodJoin():
                self._add_pod()
                self._knowledge.change()
            case SlowPod(pod=number, factor=factor):
                list(self.pods.values())[number].slow_down(factor, self.now)
            case AdapterRegistered(adapter=adapter):
                self._register(adapter)

    def _kill(self, pod: FleetPod) -> None:
        lost = pod.kill(self.now)
        del self.pods[pod.address]
        self._gone.append(pod)
        for flight in [*pod.take_ended(), *lost]:
            self.routers[flight.router].ended.append(flight)

    def _register(self, adapter: str) -> None:
        self._adapters.append(adapter)
        rank = self.workload.adapters[adapter]
        for pod in self.pods.values():
            if rank > self.settings.of(pod.group).rank_limit:
                continue
            pod.register(adapter, self.now)
            self._knowledge.list_models(pod)

    def _result(self, *, is_cut: bool = False) -> FleetResult:
        pods = sorted([*self.pods.values(), *self._gone], key=lambda pod: pod.address)
        return FleetResult(
            list(self.flights.values()),
            [pod.totals for pod in pods],
            self.settings.warm_up_s,
            self.now,
            is_cut,
            tuple(self.workload.tenants),
        )
