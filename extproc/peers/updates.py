"""Our picks, told to the other routers in sums; and theirs, counted here."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from math import inf

from extproc.meters import Meters
from extproc.observe.observers import Observers
from extproc.peers.adapterpeers import AdapterPeers, AdapterUpdate
from extproc.peers.links import Links
from extproc.peers.peermessages import PickUpdate, encode
from extproc.pods.picksums import PickSums, Sums
from extproc.pods.pool import InFlight
from extproc.queue import Waiting
from extproc.queue.plan import tokens_of
from extproc.queue.waiting import NOBODY
from extproc.routing.router import Router

FLUSH_S = 0.002
"""From one update to the next, at least: a pick after a pause is told at once. The laboratory
finds a gain down to 2 ms from a pick to all other routers, and little below.
"""
WHOLE_S = 1.0
"""From one whole update to the next."""
BEGIN_INTERVAL_S = 0.1
"""The same where a link has opened: a whole update of 20,000 picks takes some 30 ms."""


class UpdateSender:
    """Sums up what a pool starts and ends and who waits, and tells it within milliseconds.

    Args:
        links: Nothing is summed up while nobody listens.
        call_later: As an event loop's.
        clock: Monotonic seconds.
        observers: Calls the links: no request depends on them.
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
        self._call_later, self._clock, self._observers = call_later, clock, observers
        self._sums = PickSums()
        self._flights: Iterable[InFlight] = ()
        self._waiting = self._sent_waiting = NOBODY
        self._is_due = False
        self._sent_at_s = self._whole_at_s = self._next_whole_s = -inf

    @property
    def num_left_out(self) -> int:
        """Picks that were not told: they were at too many places."""
        return self._sums.num_left_out

    def started(self, flight: InFlight, *, is_new: bool) -> None:
        """Tell of a pick, or that it has moved."""
        if self.links.is_telling:
            tokens = tokens_of(flight.pick.request) if is_new else 0.0
            self._sums.began(flight, tokens)
            self._schedule()

    def ended(self, flight: InFlight, *, has_run: bool) -> None:
        """Tell of a pick's end, or that it is elsewhere."""
        if self.links.is_telling:
            self._sums.ended(flight, has_run=has_run)
            self._schedule()

    def waits(self, waiting: Waiting) -> None:
        """Report the waiting requests, if they have changed."""
        self._waiting = waiting
        if self.links.is_telling:
            self._schedule()

    def begin(self, flights: Iterable[InFlight]) -> None:
        """Tell all, as a link may have opened: what is in flight then."""
        self._flights = flights
        if self.links.is_telling:
            self._want_whole(max(self._clock(), self._whole_at_s + BEGIN_INTERVAL_S))

    def _want_whole(self, at_s: float) -> None:
        """Have a whole update be told then, or before."""
        if not self._clock() <= self._next_whole_s <= at_s:
            self._next_whole_s = at_s
            self._call_later(at_s - self._clock(), partial(self._tell_whole, at_s))

    def _schedule(self) -> None:
        if not self._is_due:
            self._is_due = True
            rest_s = self._sent_at_s + FLUSH_S - self._clock()
            self._call_later(max(0.0, rest_s), self._flush)

    def _flush(self) -> None:
        self._is_due, now = False, self._clock()
        self._sent_at_s = now
        sums, waiting = self._sums.take(now=now), None
        if self._waiting != self._sent_waiting:
            self._sent_waiting, waiting = self._waiting, self._waiting.shifted(-now)
        if sums is not None or waiting is not None:
            self._tell(PickUpdate(sums or Sums(), waiting))

    def _tell_whole(self, at_s: float) -> None:
        if at_s != self._next_whole_s:
            return  # another is due
        self._next_whole_s = -inf
        if self.links.is_telling:
            self._flush()
            self._whole_at_s = now = self._clock()
            waiting = None if self._waiting == NOBODY else self._waiting.shifted(-now)
            self._tell(PickUpdate(self._sums.whole(self._flights), waiting))
            self._want_whole(now + WHOLE_S)

    def _tell(self, update: PickUpdate) -> None:
        self._observers.call("telling", self._send, update)

    def _send(self, update: PickUpdate) -> None:
        self.links.tell(encode(update), update.sums.num_begun)


class UpdateReceiver:
    """Counts the messages of other routers; and has messages sent to them.

    Attributes:
        links: To them.

    Args:
        router: Its pool has the picks, and requests that wait elsewhere go before its own.
        adapters: Takes the updates about adapters.
        sender: Sends our side.
        clock: Monotonic seconds.
        observers: Calls all of it: no request depends on it.
    """

    def __init__(
        self,
        router: Router,
        adapters: AdapterPeers,
        sender: UpdateSender,
        *,
        clock: Callable[[], float],
        observers: Observers,
    ) -> None:
        self._router, self._adapters, self._sender = router, adapters, sender
        self.links = sender.links
        self._clock, self._call = clock, observers.call

    def begin(self) -> None:
        """Tell those who listen from now on."""
        self._sender.begin(self._router.pool.flights)

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

    def add_metrics(self, meters: Meters) -> None:
        """Register the metrics of the messages between routers."""
        peer_picks, sender, links = self._router.pool.peer_picks, self._sender, self.links
        meters.add_gauge(
            "told_in_flight",
            "Unfinished picks of other routers, by their own reports.",
            lambda: peer_picks.num_in_flight,
        )
        meters.add_counters(
            "told_picks",
            "Picks that routers sent to each other. out: once for each router. in: received.",
            "direction",
            lambda: {"in": peer_picks.num_received, "out": links.num_sent},
        )
        meters.add_counters(
            "told_dropped",
            "Picks that other routers do not count, or this one. slow_link: updates that a "
            "router did not read. untold: at too many places for one update. unknown_pod, full "
            "(16,384 of a router, or 65,536): received and not counted.",
            "reason",
            lambda: {
                "untold": sender.num_left_out,
                "slow_link": links.num_unsent,
                **peer_picks.num_ignored,
            },
        )

    def _count(self, router_id: str, update: PickUpdate) -> None:
        peer_picks, sums, now = self._router.pool.peer_picks, update.sums, self._clock()
        peer_picks.hear(router_id, sums, now)
        waiting = update.waiting or (NOBODY if sums.is_whole else None)
        if waiting is not None and peer_picks.hears(router_id):
            self._router.hear(router_id, waiting.shifted(now), now=now)

    def _part(self, router_id: str) -> None:
        now = self._clock()
        self._router.pool.peer_picks.forget(router_id, now=now)
        self._router.hear(router_id, NOBODY, now=now)
