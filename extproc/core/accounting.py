"""How picks end: by whose word, and what follows from it.

Rules:
1. A pick ends once, by whoever tells of it first: the access log, its own stream, the endpoint's
   own counts, or its age.
2. An access log is there while one is open to us, or another router passes its own on. Where none
   is, the endpoints' counts are all that there is, and end a pick after a short grace. Beside
   another source they end only what that has lost.
3. Only the access log tells times, so nothing else is judged by them.
4. A 404 is not believed but looked into: the request may have named something else that does not
   exist. And only an endpoint's own, to a request that named a model, says anything of its models.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from extproc.core.orca import parse_orca
from extproc.core.outliers import Verdict
from extproc.core.pickids import router_of
from extproc.core.pool import InFlight, Pool
from extproc.core.relay import Relay
from extproc.core.types import Outcome, Pick, Rejection

_NOT_FOUND = 404


class DecisionRecord(NamedTuple):
    """One decision and when it fell.

    Attributes:
        decision: What was decided.
        wall_s: When, wall seconds.
        seconds: What deciding took; 0 for an error that needed no choice.
        request_id: `x-request-id`; only read for a rejection, as a pick has its own.
        path: The request's path; only read for a rejection, as a pick has its own.
    """

    decision: Pick | Rejection
    wall_s: float
    seconds: float
    request_id: str = ""
    path: str = ""


class Completion(NamedTuple):
    """How one request ended, by Envoy's account; its numbers within the bounds of `core.bounds`.

    Attributes:
        pick_id: The id that the pick put into the metadata; "" for a request without a pick, or
            one whose metadata was lost.
        request_id: `x-request-id`, or "".
        address: `ip:port` (`[v6]:port`) of the endpoint that served it last; "" if none did.
        status: HTTP status for the client; 0 if it left before there was one.
        outcome: Never EXPIRED.
        is_from_endpoint: The response is the endpoint's own, not one that Envoy made. With
            status 404 the endpoint may not have the model.
        first_byte_s: From the request's arrival to the first byte of the endpoint's answer.
        duration_s: From the request's arrival to the last byte of the response.
        attempts: Upstream attempts, retries included.
        lag_s: From the end of the request to the arrival of this entry; 0 where the clocks of
            Envoy and this host disagree by more than that, `MAX_LAG_S` at most.
        orca: The load report in the response's header, unread; "" where there is none.
        first_body_byte_s: As `first_byte_s`, to the first byte of the answer's body; None if none
            came. Where Envoy is not configured to tell, the same as `first_byte_s`.
        verdict: What it says of the endpoint of the last attempt.
    """

    pick_id: str
    request_id: str
    address: str
    status: int
    outcome: Outcome
    is_from_endpoint: bool
    first_byte_s: float | None
    duration_s: float | None
    attempts: int
    lag_s: float
    orca: str
    first_body_byte_s: float | None
    verdict: Verdict = Verdict.NONE


class Ending(NamedTuple):
    """What a completion has ended, and what is to be looked into.

    Attributes:
        flight: The pick that it ended; None if that had ended before, or is another router's.
        is_ours: Whether it is about a pick of this router.
        doubtful: Address of the endpoint that may have lost a model: ask it for its list; or "".
    """

    flight: InFlight | None
    is_ours: bool
    doubtful: str = ""


class Source(StrEnum):
    """Who tells that a request has ended."""

    AUTO = "auto"  # the access log as long as there is one, else the endpoints' counts
    ACCESS_LOG = "access_log"
    RESPONSE_PHASES = "response_phases"  # the request's own stream
    SCRAPE = "scrape"  # the endpoints' counts


_WITH_TIMES = (Source.AUTO, Source.ACCESS_LOG)


@dataclass(frozen=True, slots=True)
class AccountingSettings:
    """What accounting is configured with.

    Attributes:
        source: Who tells that a request has ended.
        scrape_grace_s: A pick younger than this may not have reached its endpoint, so that the
            endpoint's counts do not end it where they are the only source.
        lost_after_s: The same beside another source: by then that has lost it.
        max_age_s: Age from which a pick is given up.
    """

    source: Source = Source.AUTO
    scrape_grace_s: float = 0.5
    lost_after_s: float = 10.0
    max_age_s: float = 3600.0


class Accounting:
    """Ends the picks of one router.

    Args:
        pool: Where they are counted.
        router_id: This router's, which its picks' ids begin with.
        settings: As above.
        relay: What other routers pass on; None for a router that is alone.
    """

    def __init__(
        self,
        pool: Pool,
        router_id: str,
        settings: AccountingSettings | None = None,
        relay: Relay | None = None,
    ) -> None:
        self._pool = pool
        self._router_id = router_id
        self._settings = settings or AccountingSettings()
        self._relay = relay
        self._num_access_logs = 0

    # --- whom to believe --------------------------------------------------------------------

    def record_access_logs(self, count: int) -> None:
        """Record how many access logs are open to us."""
        self._num_access_logs = count

    @property
    def has_access_log(self) -> bool:
        """Whether an access log tells us of requests, by way of another router or not."""
        return self._num_access_logs > 0 or (self._relay is not None and self._relay.is_fed)

    def knows_times(self) -> bool:
        """Whether completions say how long answers took."""
        return self._settings.source in _WITH_TIMES and self.has_access_log

    @property
    def grace_s(self) -> float:
        """Age from which an endpoint's own counts may end a pick."""
        settings = self._settings
        is_auto = settings.source is Source.AUTO
        if settings.source is Source.SCRAPE or (is_auto and not self.has_access_log):
            return settings.scrape_grace_s
        return settings.lost_after_s

    # --- ends -------------------------------------------------------------------------------

    def complete(self, completion: Completion, *, now: float) -> Ending:
        """Record what the access log says, heard at `now`."""
        pool = self._pool
        pick_id = completion.pick_id or pool.pick_id_of(completion.request_id) or ""
        flight = pool.finish(
            pick_id,
            now=now - completion.lag_s,
            told_at_s=now,
            has_run=_has_run(completion),
            verdict=completion.verdict,
            address=completion.address,
            num_attempts=completion.attempts,
        )
        if flight is None:
            return Ending(None, router_of(pick_id) == self._router_id)
        address = completion.address or flight.pick.address
        load = parse_orca(completion.orca) if completion.orca else None
        if load is not None:
            pool.record_orca(address, load)
        is_not_found = completion.status == _NOT_FOUND and completion.is_from_endpoint
        is_doubtful = is_not_found and flight.pick.request.model
        return Ending(flight, True, address if is_doubtful else "")

    def finish(self, pick: Pick, outcome: Outcome, *, now: float) -> bool:
        """End a pick whose stream saw the end. False if it had ended before."""
        has_run = outcome is not Outcome.FAILED
        return self._pool.finish(pick.id, now=now, has_run=has_run) is not None

    def reconcile(self, address: str, *, now: float) -> list[InFlight]:
        """End the picks that the endpoint's last report has no room for; return them."""
        return self._pool.reconcile(address, now=now, grace_s=self.grace_s)

    def expire(self, *, now: float) -> list[InFlight]:
        """End the picks that nobody has told of for too long; return them."""
        return self._pool.expire(now=now, max_age_s=self._settings.max_age_s)


def _has_run(completion: Completion) -> bool:
    """Whether the engine can have worked on the request: not refused, not unreachable."""
    if completion.status == _NOT_FOUND:
        return False
    return completion.first_byte_s is not None or completion.outcome is Outcome.CANCELLED
