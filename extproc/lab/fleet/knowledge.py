"""What the routers of a fleet learn of it, and when: never at once, as in production."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from extproc.fleet.peerpicks import ToldPick
from extproc.lab.engine.activity import NEVER_S
from extproc.lab.fleet.agenda import Agenda
from extproc.lab.fleet.pod import FleetPod
from extproc.lab.fleet.router import FleetRouter
from extproc.lab.fleet.settings import FleetSettings
from extproc.queue.elsewhere import NOBODY
from extproc.queue.plan import share_of
from extproc.types import Endpoint, Pick


class FleetTelling:
    """The picks of one router and who waits there, told to the others: the observer of its pool.

    Args:
        router: The one.
        others: The other routers.
        later: Runs something after so many seconds, with the time as `now`.
        delay_s: Age of what is told when it arrives.
        loss: Part of the messages that are lost, 0 to 1.
    """

    def __init__(
        self,
        router: FleetRouter,
        others: Sequence[FleetRouter],
        *,
        later: Callable[[float, Callable[..., None]], None],
        delay_s: float,
        loss: float,
        rng: random.Random,
    ) -> None:
        self._router, self._routers = router, others
        self._others = [each.pool.told for each in others]
        self._later, self._delay_s, self._loss, self._rng = later, delay_s, loss, rng
        self._waiting, self._is_due = NOBODY, False
        router.router.queue.on_change = self._changed
        for told in self._others:
            told.begin(router.id, now=0.0)

    def started(self, pick: Pick, address: str, *, at_s: float) -> None:
        """Tell of a pick, or that it has moved."""
        request = pick.request
        rest_bytes, share = request.rest_bytes(address), share_of(request)
        message = ToldPick(pick.id, address, request.adapter, rest_bytes, 0.0, share)
        self._tell([partial(told.start, message) for told in self._others])

    def ended(self, pick_id: str, *, now: float, has_run: bool) -> None:
        """Tell of a pick's end."""
        self._tell([partial(told.finish, pick_id, has_run=has_run) for told in self._others])

    def _changed(self) -> None:
        """Tell who waits, once all that happens in this moment has happened."""
        if not self._is_due:
            self._is_due = True
            self._later(0.0, self._tell_waiting)

    def _tell_waiting(self, *, now: float) -> None:
        self._is_due = False
        waiting = self._router.router.queue.waiting(now)
        if waiting != self._waiting:
            self._waiting, name = waiting, self._router.id
            for each in self._routers:
                self._later(self._delay_s, partial(each.router.hear, name, waiting))

    def _tell(self, messages: Sequence[Callable[..., None]]) -> None:
        for message in messages:
            if not self._loss or self._rng.random() >= self._loss:
                self._later(self._delay_s, message)


class Knowledge:
    """Scrapes, lists of models, the access log, discovery, and what routers tell each other.

    Args:
        pods: The living ones by address, as the fleet changes them.
        rng: The fleet's own.
    """

    def __init__(
        self,
        settings: FleetSettings,
        agenda: Agenda,
        pods: Mapping[str, FleetPod],
        routers: Sequence[FleetRouter],
        *,
        rng: random.Random,
    ) -> None:
        self._settings, self._agenda = settings, agenda
        self._pods, self._routers, self._rng = pods, routers, rng

    def start(self, seed: int) -> None:
        """Tell every router of the pods, and begin all that goes on."""
        if self._settings.peer_delay_s is not None:
            for router in self._routers:
                self._let_tell(router, self._settings.peer_delay_s, seed)
        for router in self._routers:
            self._set_endpoints(router)
            phase_s = self._rng.uniform(0, self._settings.completion_flush_s)
            self._agenda.after(phase_s, partial(self._flush, router))

    def _let_tell(self, router: FleetRouter, delay_s: float, seed: int) -> None:
        """Let a router tell the others its picks."""
        agenda = self._agenda
        router.pool.flights.observer = FleetTelling(
            router,
            [other for other in self._routers if other is not router],
            later=lambda wait_s, tell: agenda.after(wait_s, lambda: tell(now=agenda.now)),
            delay_s=delay_s,
            loss=self._settings.peer_loss,
            rng=random.Random(f"peers/{seed}/{router.id}"),
        )

    # --- discovery --------------------------------------------------------------------------

    def change(self) -> None:
        """Let every router see, later, which pods there are."""
        self._agenda.after(self._settings.discovery_delay_s, self._discover)

    def _discover(self) -> None:
        for router in self._routers:
            self._set_endpoints(router)

    def _set_endpoints(self, router: FleetRouter) -> None:
        """Set a router's endpoints and start to scrape new ones."""
        pods = self._pods.values()
        router.pool.set_endpoints(
            Endpoint(p.address, f"http://{p.address}", group=p.group) for p in pods
        )
        router.router.queue.freed(self._agenda.now)
        for pod in pods:
            if pod.address not in router.known:
                router.known.add(pod.address)
                self.read_models(router, pod)
                self._read_page(router, pod)  # now, and later out of phase
                phase_s = self._rng.uniform(0, self._settings.scrape_interval_s)
                self._agenda.after(phase_s, partial(self._scrape, router, pod))

    def list_models(self, pod: FleetPod) -> None:
        """Let every router read, each at its own time, which models a pod lists by then."""
        for router in self._routers:
            wait_s = self._rng.uniform(0, self._settings.models_interval_s)
            self._agenda.after(wait_s, partial(self.read_models, router, pod))

    def read_models(self, router: FleetRouter, pod: FleetPod) -> None:
        """Let a router read now which models a pod lists."""
        router.pool.record_models(pod.address, pod.models, now=self._agenda.now)

    # --- pages and the access log -----------------------------------------------------------

    def _scrape(self, router: FleetRouter, pod: FleetPod) -> None:
        if pod.is_alive:
            self._read_page(router, pod)
            again = partial(self._scrape, router, pod)
            self._agenda.after(self._settings.scrape_interval_s, again)
        else:
            for refused in (router.pool.record_unreachable, router.pool.record_silence):
                self._agenda.after(self._settings.scrape_delay_s, partial(refused, pod.address))

    def _read_page(self, router: FleetRouter, pod: FleetPod) -> None:
        taken_at_s, seen_s = self._agenda.now, router.seen_s.get(pod.address, NEVER_S)
        report, router.seen_s[pod.address] = pod.report(taken_at_s, seen_s)
        record = partial(router.read_page, pod.address, report, taken_at_s=taken_at_s)
        self._agenda.after(self._settings.scrape_delay_s, record)

    def _flush(self, router: FleetRouter) -> None:
        """Send Envoy's access log to a router: requests that ended since the last time."""
        now = self._agenda.now
        for pod in self._pods.values():
            pod.look(now)
            if pod.ended:
                for flight in pod.take_ended():
                    self._routers[flight.router].ended.append(flight)
        router.read_access_log(now)
        self._agenda.after(self._settings.completion_flush_s, partial(self._flush, router))
