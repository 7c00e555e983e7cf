"""The knowledge of a fleet's routers, and when they get it: never at once, as in production."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import partial

from extproc.lab.engine.activity import NEVER_S
from extproc.lab.fleet.agenda import Agenda
from extproc.lab.fleet.settings import FleetSettings
from extproc.lab.fleet.virtualpod import FleetPod
from extproc.lab.fleet.virtualrouter import FleetRouter
from extproc.reports.pace import Rest
from extproc.types import Endpoint


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
        self._visits: dict[tuple[str, str], _Visits] = {}

    def start(self) -> None:
        """Tell every router of the pods, and begin all that goes on."""
        for router in self._routers:
            router.pool.tell_due(partial(self._hurry, router))
            self._set_endpoints(router)
            phase_s = self._rng.uniform(0, self._settings.completion_flush_s)
            self._agenda.after(phase_s, partial(self._flush, router))

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
                self._visits[router.id, pod.address] = visits = _Visits(router, pod)
                self._visit_at(self._agenda.now + phase_s, visits)

    def list_models(self, pod: FleetPod) -> None:
        """Let every router read, each at its own time, which models a pod lists by then."""
        for router in self._routers:
            wait_s = self._rng.uniform(0, self._settings.models_interval_s)
            self._agenda.after(wait_s, partial(self.read_models, router, pod))

    def read_models(self, router: FleetRouter, pod: FleetPod) -> None:
        """Let a router read now which models a pod lists."""
        router.pool.record_models(pod.address, pod.models, now=self._agenda.now)

    # --- pages and the access log -----------------------------------------------------------

    def _visit_at(self, at_s: float, visits: _Visits) -> None:
        """Scrape a pod then if it is due, and not when it was to be before."""
        at_s = max(at_s, self._agenda.now)
        visits.next_s = at_s
        self._agenda.at(at_s, partial(self._visit, at_s, visits))

    def _visit(self, at_s: float, visits: _Visits) -> None:
        """Scrape a pod if it is due, as the scraper does: a dead pod, whose connection is closed,
        is due."""
        router, pod, rest = visits.router, visits.pod, visits.rest
        if visits.next_s != at_s:
            return
        if not pod.is_alive:
            rest.close()
            return
        is_expected = router.accounting.is_expected(pod.address, now=at_s)
        wait_s = rest.wait_s(at_s, is_expected=is_expected)
        if wait_s is None:
            rest.asked(at_s)
            self._read_page(router, pod, rest)
            wait_s = router.pace.interval_s
        self._visit_at(at_s + wait_s, visits)

    def _hurry(self, router: FleetRouter, address: str) -> None:
        visits = self._visits.get((router.id, address))
        if visits is not None and visits.rest.hurry():
            self._visit_at(visits.rest.asked_at_s + router.pace.interval_s, visits)

    def lose(self, pod: FleetPod) -> None:
        """Let every router that scrapes a pod find that its connection is closed, and nobody there
        to accept another."""
        for router in self._routers:
            for refused in (router.pool.record_unreachable, router.pool.record_silence):
                self._agenda.after(self._settings.scrape_delay_s, partial(refused, pod.address))

    def _read_page(self, router: FleetRouter, pod: FleetPod, rest: Rest | None = None) -> None:
        taken_at_s, seen_s = self._agenda.now, router.seen_s.get(pod.address, NEVER_S)
        report, router.seen_s[pod.address] = pod.report(taken_at_s, seen_s)
        record = partial(router.read_page, pod.address, report, rest, taken_at_s=taken_at_s)
        self._agenda.after(self._settings.scrape_delay_s, record)

    def _flush(self, router: FleetRouter) -> None:
        """Send Envoy's access log to a router: requests that ended since the last time."""
        now = self._agenda.now
        for pod in self._pods.values():
            pod.poll(now)
            if pod.ended:
                for flight in pod.take_ended():
                    self._routers[flight.router].ended.append(flight)
        router.read_access_log(now)
        self._agenda.after(self._settings.completion_flush_s, partial(self._flush, router))


class _Visits:
    """A router's scrapes of a pod; `next_s` is when the next may be due."""

    def __init__(self, router: FleetRouter, pod: FleetPod) -> None:
        self.router, self.pod = router, pod
        self.rest = Rest(router.pace, router.rest_rng)
        self.next_s = NEVER_S
