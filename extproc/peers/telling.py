"""Our picks and their ends, sent to the other routers; and theirs, counted here."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from math import inf

from extproc.fleet.peerpicks import PeerPick, PeerPickEnd
from extproc.fleet.pool import InFlight
from extproc.observe.observers import Observers
from extproc.observe.telemetry import Telemetry
from extproc.peers.adapterpeers import AdapterPeers, AdapterUpdate
from extproc.peers.encoding import PickUpdate
from extproc.peers.links import Links
from extproc.queue import Waiting
from extproc.queue.plan import share_of
from extproc.queue.waiting import NOBODY
from extproc.routing.router import Router
from extproc.tenancy import Share
from extproc.types import Pick

FLUSH_S = 0.002
"""From one message to the next, at least: a pick after a pause is sent at once. The laboratory
finds a gain down to 2 ms from a pick to all other routers, and little below.
"""
MAX_WAITING = 16_384
"""Picks and ends that wait for a flush: more come only while the event loop stands still. The
links then begin again."""


class Telling:
    """Collects what a pool starts and ends and who waits, and tells it within milliseconds.

    Args:
        links: Nothing is collected while nobody listens.
        call_later: As an event loop's.
        clock: Monotonic seconds.
        observers: Calls the links: no request depends on them.

    Attributes:
        num_dropped: Picks and ends beyond `MAX_WAITING`.
    """

    def __init__(
        self,
        links: Links,
        *,
        call_later: Callable[[float, Callable[[], None]], object],
        clock: Callable[[], float],
        observers: Observers,
    ) -> None:
        self.links = links
        self._call_later = call_later
        self._clock = clock
        self._observers = observers
        self._started: list[tuple[Pick, str, float]] = []
        self._ended: list[PeerPickEnd] = []
        self._flights: Iterable[InFlight] = ()
        self._waiting = NOBODY
        self._told: Waiting | None = None  # who waits; None for a link that knows nothing
        self._is_due = self._has_dropped = False
        self._told_at_s = -inf
        self.num_dropped = 0

    def started(self, pick: Pick, address: str, *, at_s: float) -> None:
        """Tell of a pick, or that it has moved."""
        if self.links.is_telling and self._has_room():
            self._started.append((pick, address, at_s))

    def ended(self, pick_id: str, *, now: float, has_run: bool) -> None:
        """Tell of a pick's end."""
        if self.links.is_telling and self._has_room():
            self._ended.append(PeerPickEnd(pick_id, has_run))

    def waits(self, waiting: Waiting) -> None:
        """Report the waiting requests, if they have changed."""
        self._waiting = waiting
        if self.links.is_telling:
            self._schedule()

    def begin(self, flights: Iterable[InFlight]) -> None:
        """Begin the links that have not begun, with what is in flight then."""
        self._flights = flights
        self._schedule()

    def _has_room(self) -> bool:
        """Return whether one more may wait, and have it sent soon."""
        if len(self._started) + len(self._ended) >= MAX_WAITING:
            self.num_dropped += 1
            self._has_dropped = True
            return False
        self._schedule()
        return True

    def _schedule(self) -> None:
        if not self._is_due:
            self._is_due = True
            rest_s = self._told_at_s + FLUSH_S - self._clock()
            self._call_later(max(0.0, rest_s), self._flush)

    def _flush(self) -> None:
        started, self._started = self._started, []
        ended, self._ended = self._ended, []
        self._is_due, self._told_at_s = False, self._clock()
        links = self.links
        if self._has_dropped:
            self._has_dropped = False
            links.begin_again()
        now = self._told_at_s
        picks = [
            _told(pick, address, now - at_s, share_of(pick.request))
            for pick, address, at_s in started
        ]
        if links.is_owing:
            self._told = None
        news = None if self._waiting == self._told else self._waiting.shifted(-now)
        self._told = self._waiting
        tell = partial(links.tell, in_flight=self._in_flight)
        self._observers.call("telling", tell, picks, ended, news)
        if links.is_owing:
            self._schedule()

    def _in_flight(self) -> list[PeerPick]:
        now = self._clock()
        return [
            _told(each.pick, each.tracked.endpoint.address, now - each.started_at_s)
            for each in self._flights
        ]


class Hearing:
    """Counts the messages of other routers; and has messages sent to them.

    Attributes:
        links: To them.

    Args:
        router: Its pool has the picks, and requests that wait elsewhere go before its own.
        adapters: Takes the updates about adapters.
        telling: Sends our side.
        clock: Monotonic seconds.
        observers: Calls all of it: no request depends on it.
    """

    def __init__(
        self,
        router: Router,
        adapters: AdapterPeers,
        telling: Telling,
        *,
        clock: Callable[[], float],
        observers: Observers,
    ) -> None:
        self._router, self._adapters, self._telling = router, adapters, telling
        self.links = telling.links
        self._clock, self._call = clock, observers.call

    def begin(self) -> None:
        """Tell those who listen from now on."""
        self._telling.begin(self._router.pool.flights)

    def hear(self, router_id: str, update: PickUpdate) -> None:
        """Count what a router tells."""
        self._call("telling", self._count, router_id, update)

    def hear_adapters(self, router_id: str, update: AdapterUpdate) -> None:
        """Take what a router says of adapters."""
        self._call("telling", self._adapters.hear, router_id, update)

    def forget(self, router_id: str) -> None:
        """Forget a router that is gone."""
        self._call("telling", self._part, router_id)
        self._call("telling", self._adapters.forget, router_id)

    def add_metrics(self, telemetry: Telemetry) -> None:
        """Register the metrics of the messages between routers."""
        told, telling, links = self._router.pool.told, self._telling, self.links
        telemetry.add_gauge(
            "told_in_flight",
            "Unfinished picks of other routers, by their own reports.",
            lambda: told.num_in_flight,
        )
        telemetry.add_counters(
            "told_picks",
            "Picks that routers sent to each other. out: once for each router. in: received.",
            "direction",
            lambda: {"in": told.num_received, "out": links.num_told},
        )
        telemetry.add_counters(
            "told_dropped",
            "Picks and ends that got lost. slow_link: the other router did not read, or "
            "a new stream began with too many. busy: more than 16,384 in 2 ms. "
            "unknown_pod, full (16,384 of a router, or 65,536): received and not "
            "counted.",
            "reason",
            lambda: {
                "busy": telling.num_dropped,
                "slow_link": links.num_untold,
                **told.num_ignored,
            },
        )

    def _count(self, router_id: str, update: PickUpdate) -> None:
        told, now = self._router.pool.told, self._clock()
        if update.is_first:
            told.begin(router_id, now=now)
        waiting = update.waiting or (NOBODY if update.is_first else None)
        if waiting is not None and told.hears(router_id):
            self._router.hear(router_id, waiting.shifted(now), now=now)
        for pick in update.picks:
            told.start(pick, now=now)
        for end in update.ends:
            told.finish(end.id, now=now, has_run=end.has_run)

    def _part(self, router_id: str) -> None:
        now = self._clock()
        self._router.pool.told.forget(router_id, now=now)
        self._router.hear(router_id, NOBODY, now=now)


def _told(pick: Pick, address: str, age_s: float, share: Share | None = None) -> PeerPick:
    request = pick.request
    num_bytes, num = request.rest_bytes(address), request.num_sequences
    return PeerPick(pick.id, address, request.adapter, num_bytes, age_s, share, num)
