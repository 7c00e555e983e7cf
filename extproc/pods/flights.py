"""Our own picks in flight on a pool's endpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from math import inf
from typing import NamedTuple

from extproc.costs import Probe
from extproc.learned.comparison import SHORT_BYTES
from extproc.learned.evidence import FAILURES, Evidence, judged_attempts, likeness, tried_in_order
from extproc.learned.expected import HEARD_S
from extproc.learned.outliers import Outliers
from extproc.learned.prefixes import PrefixIndex, with_cached
from extproc.pods.disbelief import Disbelief
from extproc.pods.endpointstate import EndpointState, InFlight
from extproc.pods.listeners import PickObserver, WaitingLine
from extproc.pods.peerpicks import PeerPicks
from extproc.pods.podrequests import Flight
from extproc.pods.speeds import probe_of
from extproc.pods.tenants import Tenants
from extproc.types import Pick

USUAL_S = 1.0
"""Time that served requests take, before any was."""
USUAL_KEPT = 31 / 32
"""Of the mean time that served requests take, with each."""
# To look up a member takes 0.1 us.
_SERVED, _NOT_FOUND = Evidence.SERVED, Evidence.NOT_FOUND
_FAILED, _FULL = Evidence.FAILED, Evidence.FULL


class Trust(NamedTuple):
    """How far an endpoint's own counts are believed about the ends of picks.

    Attributes:
        grace_s: A pick younger than this may not have arrived there yet.
        lost_after_s: An endpoint that has served a pick which came so much later has lost the older
            one, whoever else reports ends.
        whole_from_s: Returns since when another source reports the ends of all picks like this one,
            as of a time: minus infinite for ever, infinite for not now.
    """

    grace_s: float
    lost_after_s: float
    whole_from_s: Callable[[Flight, float], float]


class Flights:
    """The picks of this router that have not ended, from the oldest on.

    Args:
        find: Returns the endpoint with an address, if it is in the pool.
        peer_picks: The picks of other routers.
        queue: Told of room.
        observer: Follows what is counted here.

    Attributes:
        num_routers: That use these endpoints, this one included.
        tenants: Whose they are.
    """

    def __init__(
        self,
        find: Callable[[str], EndpointState | None],
        *,
        peer_picks: PeerPicks,
        prefix_index: PrefixIndex,
        outliers: Outliers,
        disbelief: Disbelief,
        queue: WaitingLine,
        observer: PickObserver | None,
    ) -> None:
        self._find = find
        self._peer_picks = peer_picks
        self._prefix_index = prefix_index
        self._outliers, self._disbelief = outliers, disbelief
        self._usual_s = USUAL_S
        self._flights: dict[str, InFlight] = {}
        self._by_request_id: dict[str, str] = {}
        self._refused: dict[str, tuple[str, ...]] = {}
        self.num_routers = 1
        self.tenants = Tenants()
        self._queue, self._observer = queue, observer

    def __len__(self) -> int:
        return len(self._flights)

    def __iter__(self) -> Iterator[InFlight]:
        return iter(self._flights.values())

    def set_num_routers(self, num_routers: int) -> None:
        """Record how many routers use these endpoints, this one included."""
        self.num_routers = num_routers

    @property
    def num_alike(self) -> int:
        """The routers that do not tell us of their picks, and this one: all send as much."""
        return max(1, self.num_routers - self._peer_picks.num_routers)

    def start(self, pick: Pick, *, now: float) -> None:
        """Count a request that is sent to `pick.address` now.

        Raises:
            KeyError: That is not in the pool.
        """
        address, request = pick.endpoints[0], pick.request
        if (pod := self._find(address)) is None:
            raise KeyError(address)
        adapter, cached = pod.listed.adapter_of(request), request.cached_bytes
        num_bytes = request.rest_bytes(address)
        probe = probe_of(pod, request, num_bytes, adapter, now=now)
        if cached:
            pick = with_cached(pick, cached)
        flight = self._count(pick, now, pod, adapter, num_bytes, now, probe)
        if self._observer is not None:
            self._observer.started(flight, is_new=True)
        self.tenants.count(request.claim, request.num_sequences, now=now)
        if request.request_id:
            self._by_request_id[request.request_id] = pick.id

    def move(self, pick_id: str, address: str, *, now: float) -> bool:
        """Count a pick at `address` instead: the data plane fell back to another endpoint.

        Return False if it does not move: not in flight, already there, or the address unknown.
        """
        flight, pod = self._flights.get(pick_id), self._find(address)
        if flight is None or pod is None or pod is flight.pod:
            return False
        flight.pod.ours.ended(flight, False, now, now)
        before = flight.pod.address
        self._judge(flight, before, Evidence.NONE, now=now, at_s=now)
        request = flight.pick.request
        self._prefix_index.drop(request, flight.pod.load.kv_cache)
        pick = with_cached(flight.pick, self._prefix_index.find(request), address)
        adapter = pod.listed.adapter_of(request)
        num_bytes = pick.request.rest_bytes(address)
        moved = self._count(pick, flight.started_at_s, pod, adapter, num_bytes, now)
        if self._observer is not None:
            self._observer.ended(flight, has_run=False)
            self._observer.started(moved, is_new=False)
        return True

    def refused(self, pick_id: str, address: str, *, now: float) -> bool:
        """Record that an endpoint refused a pick as it is full, so that the next one is tried.

        Return False if it is not in flight.
        """
        if (flight := self._flights.get(pick_id)) is None:
            return False
        pod, before = flight.pod, self._refused.get(pick_id, ())
        tried = tried_in_order(flight.pick)
        is_here = pod.address == address and self._find(address) is pod
        if is_here and address in tried and address not in before:
            pod.load.fullness.refused(pick_id, flight.num_beside, now=now)
            pod.row.touch()
            self._refused[pick_id] = (*before, address)
            for following in tried[tried.index(address) + 1 :][:1]:
                self.move(pick_id, following, now=now)
        return True

    def finish(
        self,
        pick_id: str,
        *,
        now: float,
        reported_at_s: float | None = None,
        has_run: bool = True,
        verdict: Evidence = Evidence.NONE,
        address: str = "",
        num_attempts: int = 1,
        num_bytes: int = SHORT_BYTES,
    ) -> InFlight | None:
        """End a pick's accounting; return None if it is not in flight: ended before, or not ours.

        The request ended at `now`, which was reported at `reported_at_s` (None for `now`).
        `has_run` is False if the endpoint's engine cannot have worked on it (refused, not reached),
        `num_bytes` the length of the response. For the rest see `judged_attempts`.
        """
        if (flight := self._flights.pop(pick_id, None)) is None:
            return None
        pick, pod = flight.pick, flight.pod
        request, at_s = pick.request, now if reported_at_s is None else reported_at_s
        if self._by_request_id.get(request.request_id) == pick_id:
            del self._by_request_id[request.request_id]
        self.tenants.count(request.claim, -request.num_sequences, now=now)
        refused = self._refused.pop(pick_id, ())
        for full in refused:
            if (each := self._find(full)) is not None:
                each.load.fullness.ended(pick_id, was_taken=verdict is _SERVED)
                each.row.touch()
        # An endpoint that came back under the address has not served it.
        own = pod.address
        served = (self._find(address) if address != own else None) or pod
        has_run_here = has_run and served is pod
        pod.ours.ended(flight, has_run_here, now, at_s)
        if not has_run_here:
            self._prefix_index.drop(request, pod.load.kv_cache)
        if served is not pod:
            adapter, claim = served.listed.adapter_of(request), request.claim
            served.load.note(adapter, claim.priority, claim.flow, now=now, has_run=has_run)
            if has_run:
                served.load.kv_cache.picked(request.rest_bytes(address))
                self._prefix_index.add(request, served.load.kv_cache)
        if self._observer is not None:
            self._observer.ended(flight, has_run=has_run_here)
        if num_attempts > 1 or (address or pick.endpoints[0]) != own:
            judged = judged_attempts(
                pick, verdict, address=address, num_attempts=num_attempts, refused=refused
            )
            for each_address, said in {own: Evidence.NONE, **judged}.items():
                self._judge(flight, each_address, said, now=now, at_s=at_s, num_bytes=num_bytes)
        else:
            said = _FAILED if verdict is _FULL else verdict
            self._judge(flight, own, said, now=now, at_s=at_s, num_bytes=num_bytes)
        if verdict is _SERVED:
            served.ours.served(flight.started_at_s)
        self._queue.freed(at_s)
        return flight

    def find(self, pick_id: str) -> InFlight | None:
        """Return a pick that is in flight."""
        return self._flights.get(pick_id)

    def pick_id_of(self, request_id: str) -> str | None:
        """Return the newest pick in flight with this `x-request-id`."""
        return self._by_request_id.get(request_id)

    def expire(self, *, now: float, max_age_s: float) -> list[InFlight]:
        """Finish every pick older than `max_age_s`; return them, oldest first."""
        flights = self._flights.values()
        old = list(takewhile(lambda each: now - each.started_at_s > max_age_s, flights))
        for flight in old:
            self.finish(flight.pick.id, now=now, has_run=False)
        return old

    def reconcile(self, address: str, trust: Trust, *, now: float) -> list[InFlight]:
        """Finish the oldest picks, as many as the endpoint's reports do not account for.

        Only those whose ends nobody else can be trusted to report. Where ends of the rest come
        late, an earlier report is the judge: of what ended before it, all is known by now.
        """
        pod = self._find(address)
        if pod is None or pod.reports.report is None or pod.reports.reported_at_s is None:
            return []
        total = pod.reports.report.num_running + pod.reports.report.num_waiting
        flights = pod.ours.flights.values()
        if len(flights) <= total:
            return []
        at_s, grace_s = pod.reports.reported_at_s, trust.grace_s
        old = list(takewhile(lambda each: at_s - each.started_at_s >= grace_s, flights))
        if len(old) <= total:
            return []
        lost = _lost(pod, old, total, trust, now=now)
        ended = [self.finish(each.pick.id, now=now) for each in lost]
        return [each for each in ended if each is not None]

    # --- inside -----------------------------------------------------------------------------

    def _count(
        self,
        pick: Pick,
        at_s: float,
        pod: EndpointState,
        adapter: str | None,
        num_bytes: int,
        now: float,
        probe: Probe | None = None,
    ) -> InFlight:
        """Count a pick with so many bytes to compute, as a trial if its endpoint is on one; beside
        those that are known there, or as many as the last report has."""
        address, request = pod.address, pick.request
        num_alike = 1 if self.num_routers == 1 else self.num_alike
        trial = self._outliers.picked(address, now=now)
        load, report = pod.load, pod.reports.report
        num_beside = load.num_sequences + load.foreign.num_from_peers + load.foreign.num_foreign
        if report is not None and report.num_running + report.num_waiting > num_beside:
            num_beside = report.num_running + report.num_waiting
        flight = InFlight(
            pick,
            at_s,
            adapter,
            num_beside,
            pod=pod,
            trial=trial,
            group=pod.group,
            probe=probe,
        )
        self._flights[pick.id] = pod.ours.flights[pick.id] = flight
        num, claim = request.num_sequences, request.claim
        load.num_sequences += num
        load.picked(
            pick.id,
            adapter,
            num_bytes,
            claim.priority,
            claim.flow,
            1,
            num,
            num_alike,
            at_s,
            now,
        )
        load.settle()
        if request.prefix_hashes:
            self._prefix_index.add(request, load.kv_cache)
        return flight

    def _judge(
        self,
        flight: InFlight,
        address: str,
        verdict: Evidence,
        *,
        now: float,
        at_s: float,
        num_bytes: int = SHORT_BYTES,
    ) -> None:
        """Tell outlier detection how a request that ended at `now` went at one endpoint."""
        pod, counted, request = self._find(address), flight.pod, flight.pick.request
        if pod is None or (pod is not counted and address == counted.address):
            return  # it has left, even if another has joined under its address
        trial = flight.trial if pod is counted else 0
        if verdict is _SERVED:
            took_s = now - flight.started_at_s
            self._usual_s = took_s + USUAL_KEPT * (self._usual_s - took_s)
            load = pod.load
            load.response_s = took_s + USUAL_KEPT * ((load.response_s or took_s) - took_s)
            self._disbelief.served(pod, request.model)
        elif verdict in FAILURES or verdict is _NOT_FOUND:
            pod.health.failed(pod.listed.adapter_of(request), flight.started_at_s + self._usual_s)
            if verdict is _NOT_FOUND and request.model:
                self._disbelief.not_found(pod, request.model, now=at_s)
        sent_at_s = flight.started_at_s
        self._outliers.ended(
            address,
            verdict,
            likeness(request),
            model=request.model,
            trial=trial,
            num_bytes=num_bytes,
            sent_at_s=sent_at_s,
            outlived_s=-inf if verdict is _SERVED else pod.ours.newest_s(sent_at_s),
            ended_s=now,
            now=at_s,
        )
        if verdict is _SERVED and not pod.health.answers:
            pod.health.answers = True
            pod.row.renew()
        else:
            pod.load.settle()


def _lost(
    pod: EndpointState, old: Sequence[Flight], total: int, trust: Trust, *, now: float
) -> list[Flight]:
    """Return the picks whose end is lost, of the `old` ones of which a report shows `total`."""
    whole_from_s, lost_before_s = trust.whole_from_s, pod.ours.served_s - trust.lost_after_s
    doubtful, is_never_whole = [], True
    for each in old:
        from_s = whole_from_s(each, now)
        if each.started_at_s < max(from_s, lost_before_s):
            doubtful.append(each)
        is_never_whole = is_never_whole and from_s == inf
    if is_never_whole:
        return doubtful[: len(old) - total]
    pages, by_s = pod.reports.pages, now - HEARD_S
    pages.append((now, total))
    while len(pages) > 1 and pages[1][0] <= by_s:
        pages.popleft()
    at_s, total = pages[0]
    if at_s > by_s:
        return []
    until_s = at_s - trust.grace_s
    num_shown = sum(each.started_at_s <= until_s for each in old)
    lost = [each for each in doubtful if each.started_at_s <= until_s]
    return lost[: max(0, num_shown - total)]
