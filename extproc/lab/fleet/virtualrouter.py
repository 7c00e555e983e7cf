"""One router of a fleet: the production parts, messages that have not reached it yet, and what it
tells the other routers."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from hashlib import blake2b

from extproc.lab.engine.activity import NEVER_S
from extproc.lab.fleet.agenda import Agenda
from extproc.lab.fleet.settings import FleetSettings
from extproc.lab.workload.judge import Slo
from extproc.lab.workload.requests import Arrival, Tenant
from extproc.lab.workload.running import FlightState, LabFlight
from extproc.learned.evidence import Evidence
from extproc.learned.prefixes import MARKS_BYTES
from extproc.pods.accounting import Accounting
from extproc.pods.completion import Completion
from extproc.pods.peerpicks import pick_ids
from extproc.pods.picksums import PickSums, Sums
from extproc.pods.pool import InFlight, Pool, PoolSettings
from extproc.queue import HoldQueue, Waiting
from extproc.queue.plan import tokens_of
from extproc.queue.waiting import NOBODY
from extproc.reports.pace import Rest, ScrapePace
from extproc.routing.admission import AdmissionSettings
from extproc.routing.catalog import Catalog
from extproc.routing.picker import Picker
from extproc.routing.policies import Policy
from extproc.routing.router import Router
from extproc.tenancy import Claim
from extproc.types import LoadReport, Outcome

_OUTCOMES = {
    FlightState.FINISHED: Outcome.COMPLETED,
    FlightState.FAILED: Outcome.FAILED,
    FlightState.ABANDONED: Outcome.CANCELLED,
}
EVENT_BYTES, NUM_OTHER_EVENTS = 220, 1
"""Of a streamed response: the event of a token, and those without one."""
WHOLE_S = 1.0
"""From one whole update for other routers to the next, as in production."""
_STATUSES = {Outcome.COMPLETED: 200, Outcome.FAILED: 503, Outcome.CANCELLED: 0}


class FleetRouter:
    """A router; `id` is the first part of its picks' ids.

    A policy may have its own settings for the router's queue, as `queue`.

    Args:
        agenda: Has offers made.
        on_cold: Called when a request waits for an adapter.
        telling: Sends to the other routers, if they get messages.
    """

    def __init__(
        self,
        policy: Policy,
        policy_name: str,
        settings: FleetSettings,
        *,
        router_id: str,
        rng: random.Random,
        agenda: Agenda,
        on_cold: Callable[[], None],
        telling: FleetTelling | None,
    ) -> None:
        presumed = settings.presumed_cpu_loras
        cached = settings.max_cpu_loras if presumed is None else presumed or None
        expiry_s, groups = settings.report_expiry_s, settings.server_flags
        queue = HoldQueue(
            getattr(policy, "queue", settings.queue),
            at=self._offer_at,
            on_change=None if telling is None else telling.waits,
        )
        catalog = Catalog(on_cold=on_cold)
        self.pool = Pool(
            PoolSettings(expiry_s, settings.max_loras, cached, groups=groups),
            queue=queue,
            catalog=catalog,
            observer=telling,
        )
        self._agenda, self.id = agenda, router_id
        self.policy = policy
        picker = Picker(
            policy,
            policy_name,
            rng=rng,
            next_id=pick_ids(router_id),
            admission=AdmissionSettings(settings.max_pending),
        )
        self.router = Router(self.pool, picker, queue, catalog, settings.max_hold_s)
        self.accounting = Accounting(self.pool, router_id)
        self.accounting.record_access_logs(1)
        self.pace = ScrapePace(
            settings.scrape_interval_s, expiry_s, models_interval_s=settings.models_interval_s
        )
        self.rest_rng = random.Random(f"rests/{router_id}")
        self.known: set[str] = set()
        self.seen_s: dict[str, float] = {}  # when the page of each pod that it saw last was made
        self.ended: list[LabFlight] = []
        self._offers_at_s = NEVER_S  # when room is offered next to those held

    def _offer_at(self, at_s: float) -> None:
        """Have an offer made then, and not when it was asked for before."""
        self._offers_at_s = at_s = max(at_s, self._agenda.now)
        self._agenda.at(at_s, partial(self._offer, at_s))

    def _offer(self, at_s: float) -> None:
        if self._offers_at_s == at_s:
            self.router.offer(now=at_s)

    def read_page(
        self, address: str, report: LoadReport, rest: Rest | None, *, taken_at_s: float
    ) -> None:
        """Record a scrape, end the picks that the pod no longer has, and see when to ask again."""
        self.pool.record_report(
            address,
            report,
            taken_at_s=taken_at_s,
            next_s=self.pace.interval_s,
            rest_s=0.0 if rest is None else rest.longest_s,
        )
        self.accounting.reconcile(address, now=taken_at_s)
        if rest is not None:
            is_expected = self.accounting.is_expected(address, now=taken_at_s)
            rest.reported(taken_at_s, is_expected=is_expected)

    def read_access_log(self, now: float) -> None:
        """Record the requests that ended since the last time."""
        ended, self.ended = self.ended, []
        for flight in ended:
            self.accounting.complete(_completion(flight, now), now=now)


def _completion(flight: LabFlight, now: float) -> Completion:
    """Return the entry of Envoy's access log about a request that was sent to a pod."""
    arrived_s, first_token_s, ended_s = flight.arrival.at_s, flight.first_token_s, flight.ended_s
    assert ended_s is not None
    outcome = _OUTCOMES[flight.state]
    first_byte_s = None if first_token_s is None else first_token_s - arrived_s
    return Completion(
        pick_id=flight.pick_id,
        request_id=flight.id,
        address=flight.pod,
        status=_STATUSES[outcome],
        outcome=outcome,
        is_from_endpoint=outcome is Outcome.COMPLETED,
        first_byte_s=first_byte_s,
        duration_s=ended_s - arrived_s,
        attempts=1,
        lag_s=now - ended_s,
        orca="",
        first_body_byte_s=first_byte_s,
        verdict=_verdict(flight),
        body_bytes=EVENT_BYTES * (NUM_OTHER_EVENTS + flight.arrival.output_tokens),
    )


def _verdict(flight: LabFlight) -> Evidence:
    """Return what Envoy's entry says of the pod: it resets what had no byte of a response yet."""
    if flight.state is FlightState.FINISHED:
        return Evidence.SERVED
    if flight.state is not FlightState.FAILED or flight.was_unknown:
        return Evidence.NONE
    return Evidence.UNREACHABLE if flight.first_token_s is None else Evidence.BROKEN


class FleetTelling:
    """The picks and waiting requests of one router, told to the other routers: the observer of its
    pool. Never at once, as in production.

    Args:
        router_id: Of the one.
        routers: All of them, once they are made.
        delay_s: Age of a message when it arrives.
        loss: Part of the messages that are lost, 0 to 1.
    """

    def __init__(
        self,
        router_id: str,
        routers: Iterable[FleetRouter],
        *,
        agenda: Agenda,
        delay_s: float,
        loss: float,
        rng: random.Random,
    ) -> None:
        self._id, self._routers, self._agenda = router_id, routers, agenda
        self._delay_s, self._loss, self._rng = delay_s, loss, rng
        self._sums = PickSums()
        self._waiting = self._said = NOBODY
        self._is_due = False

    def begin(self) -> None:
        """Tell what is in flight, now and once a second: at first nothing, to those that listen."""
        [own] = (each for each in self._routers if each.id == self._id)
        self._tell(self._sums.whole(own.pool.flights))
        self._agenda.after(WHOLE_S, self.begin)

    def started(self, flight: InFlight, *, is_new: bool) -> None:
        """Tell of a pick, or that it has moved."""
        self._sums.began(flight, tokens_of(flight.pick.request) if is_new else 0.0)
        self._schedule()

    def ended(self, flight: InFlight, *, has_run: bool) -> None:
        """Tell of a pick's end, or that it is elsewhere."""
        self._sums.ended(flight, has_run=has_run)
        self._schedule()

    def waits(self, waiting: Waiting) -> None:
        """Tell who waits."""
        self._waiting = waiting
        self._schedule()

    def _schedule(self) -> None:
        """Tell all that happens in this moment, once it has happened."""
        if not self._is_due:
            self._is_due = True
            self._agenda.after(0.0, self._flush)

    def _flush(self) -> None:
        self._is_due = False
        sums = self._sums.take(now=self._agenda.now)
        if sums is not None:
            self._tell(sums)
        waiting = self._waiting
        if waiting != self._said:
            self._said = waiting
            for each in self._peers():
                self._later(partial(each.router.hear, self._id, waiting))

    def _peers(self) -> Iterator[FleetRouter]:
        return (each for each in self._routers if each.id != self._id)

    def _tell(self, sums: Sums) -> None:
        for each in self._peers():
            if not self._loss or self._rng.random() >= self._loss:
                self._later(partial(each.pool.peer_picks.hear, self._id, sums))

    def _later(self, message: Callable[..., None]) -> None:
        agenda = self._agenda
        agenda.after(self._delay_s, lambda: message(now=agenda.now))


# --- what a router is told of a request: claims as a route and trusted headers would say them, and
# of a prompt's beginning hashes of as many bytes as in production


def claim_of(tenant: Tenant, declared: Slo | None, name: str = "") -> Claim:
    """Return the claim of a tenant's requests.

    Args:
        declared: The objectives to claim, if the tenant has any.
        name: Whose share they count for.
    """
    slo = declared if tenant.has_objectives else None
    return Claim(
        tenant=name,
        priority=tenant.priority,
        weight=tenant.weight,
        ttft_s=None if slo is None else slo.ttft_s,
        tpot_s=None if slo is None else slo.tpot_s,
    )


BODY_BYTES_PER_TOKEN = 4
"""English text in the tokenizers of current models (platform.openai.com/tokenizer)."""


def prefix_hashes(arrival: Arrival, request_id: str) -> tuple[int, ...]:
    """Return `RequestInfo.prefix_hashes` of a request.

    All but the shared prefix is the request's own.
    """
    shared_bytes = arrival.prefix_tokens * BODY_BYTES_PER_TOKEN
    prompt_bytes = arrival.prompt_tokens * BODY_BYTES_PER_TOKEN
    digest = (arrival.adapter or "").encode()
    hashes = []
    for mark in MARKS_BYTES[: bisect_right(MARKS_BYTES, prompt_bytes)]:
        content = arrival.prefix if mark <= shared_bytes else request_id
        digest = blake2b(digest + content.encode(), digest_size=8).digest()
        hashes.append(int.from_bytes(digest))
    return tuple(hashes)
