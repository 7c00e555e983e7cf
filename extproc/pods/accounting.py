"""How picks end, by the source that is believed of each.

Rules:
1. A pick ends once, by the first source that reports it: the access log, its own stream, the
   endpoint's own counts, or its age.
2. The access log of a pick's Envoy is believed while it is whole (`accesslogs`): what it has not
   told of runs. Otherwise the endpoints' counts end a pick after a short grace. While its own
   stream reports the end, that is believed.
3. Only the access log has times. A pick's own stream tells how its response ended, as far as that
   passed by: one that broke off and one whose client left look alike.
4. A 404 is not believed but checked: the request may have named something else that does not
   exist. Only an endpoint's own 404, to a request that named a model, is evidence on its models.
"""

from __future__ import annotations

from collections.abc import Hashable
from enum import StrEnum
from math import inf
from typing import Protocol

from msgspec import Struct

from extproc.costs import BYTES_PER_TOKEN
from extproc.learned.comparison import HOLLOW_BYTES
from extproc.learned.evidence import Evidence, StreamEnd, likeness
from extproc.learned.tpot import Tpots
from extproc.paths import GENERATING_PATHS, NO_PATH, RESPONSES_PATH
from extproc.pods.accesslogs import AccessLogs
from extproc.pods.completion import (
    Completion,
    Ended,
    came_at_once,
    first_token_s,
    has_run,
    is_at_once,
    was_given_up,
)
from extproc.pods.flights import Trust
from extproc.pods.peerpicks import router_of
from extproc.pods.podrequests import Flight
from extproc.pods.pool import InFlight, Pool
from extproc.pods.servers import Servers
from extproc.reports.orca import parse_orca
from extproc.types import Outcome, Pick

UNANSWERED_S = 5.0
"""Wait for the first byte of a response after which it tells of the endpoint that its client
leaves."""
_OK = 200
_SERVED, _FAILED = Evidence.SERVED, Evidence.FAILED


class EndSource(StrEnum):
    """The source that reports the end of requests."""

    AUTO = "auto"  # the access log while there is one, else the endpoints' counts
    ACCESS_LOG = "access_log"
    RESPONSE_PHASES = "response_phases"  # the request's own stream
    SCRAPE = "scrape"  # the endpoints' counts


_TEXT_PATHS = GENERATING_PATHS - {NO_PATH}  # whose answers have a generated text
_WITH_TIMES = (EndSource.AUTO, EndSource.ACCESS_LOG)
_FIXED = {EndSource.RESPONSE_PHASES: -inf, EndSource.SCRAPE: inf}  # `Trust.whole_from_s`
ACCESS_LOG, PAGES, RESPONSE = "access_log", "pages", "response"
"""What people read of the source that is in force."""


class AccountingSettings(Struct, frozen=True):
    """Settings of accounting.

    Attributes:
        scrape_grace_s: Age up to which the endpoint's counts do not end a pick, as it may not have
            reached the endpoint.
        lost_after_s: Where another source reports ends, they end a pick only once the endpoint has
            served one that came so much later.
    """

    source: EndSource = EndSource.AUTO
    scrape_grace_s: float = 0.5
    lost_after_s: float = 300.0
    max_age_s: float = 3600.0  # age from which a pick is given up


class Relaying(Protocol):
    """Brings entries of an access log that reaches another router."""

    @property
    def is_fed(self) -> bool:
        """Whether it does."""


class Accounting:
    """Ends the picks of one router.

    Args:
        pool: Counts them.
        router_id: The prefix of this router's pick ids.
        settings: See the class.
        relay: Receives other routers' access logs; None for a single router.

    Attributes:
        logs: Which Envoys report ends by an access log.
        tpots: Time per output token.
        servers: The endpoints that served, as gateways report them.
    """

    def __init__(
        self,
        pool: Pool,
        router_id: str,
        settings: AccountingSettings | None = None,
        relay: Relaying | None = None,
    ) -> None:
        self._pool = pool
        self._router_id = router_id
        self._settings = settings or AccountingSettings()
        self._has_times = self._settings.source in _WITH_TIMES
        self._relay = relay
        self._num_access_logs = 0
        self._silent: list[str] = []
        self.logs = AccessLogs(needs_proof=self._settings.source is not EndSource.ACCESS_LOG)
        self._trust = self._make_trust()
        self.tpots = Tpots()
        self.servers = Servers()

    # --- sources ----------------------------------------------------------------------------

    def record_access_logs(self, count: int) -> None:
        """Record how many access logs are open to us."""
        self._num_access_logs = count

    def knows_times(self) -> bool:
        """Return whether completions have times, as an access log reaches us: directly or through
        another router."""
        if not self._has_times or self._num_access_logs > 0:
            return self._has_times
        return self._relay is not None and self._relay.is_fed

    def in_force(self, *, now: float) -> dict[str, int]:
        """Return how many Envoys' requests end by which source."""
        counted = {ACCESS_LOG: 0, PAGES: 0, RESPONSE: 0}
        if self._has_times:
            counted[ACCESS_LOG], silent = self.logs.by_source(now=now)
            counted[PAGES] = len(silent)
        else:
            counted[PAGES if self._settings.source is EndSource.SCRAPE else RESPONSE] = 1
        return counted

    def check_logs(self, *, now: float) -> tuple[list[str], list[str]]:
        """Return the Envoys whose logs tell again, and those whose logs have ceased to.

        Call it about once a second.
        """
        if not self._has_times:
            return [], []
        hosts = {each.pick.request.envoy for each in self._pool.flights}
        self.logs.keep(hosts, now=now)
        before, self._silent = self._silent, self.logs.by_source(now=now)[1]
        found = [host for host in before if host not in self._silent]
        return found, [host for host in self._silent if host not in before]

    def _make_trust(self) -> Trust:
        settings, logs = self._settings, self.logs

        def whole_from_s(flight: Flight, now: float) -> float:
            return logs.whole_from_s(flight.pick.request.envoy, flight.started_at_s, now=now)

        fixed_s = _FIXED.get(settings.source)
        return Trust(
            settings.scrape_grace_s,
            settings.lost_after_s,
            whole_from_s if fixed_s is None else lambda *_: fixed_s,
        )

    # --- ends -------------------------------------------------------------------------------

    def complete(self, completion: Completion, log: Hashable = "", *, now: float) -> Ended | None:
        """Record an entry of the access log that arrives at `now`; `log` is what brought it.

        Return the end of its pick; None if that had ended before, or is another router's.
        """
        pool, ended_s = self._pool, now - completion.lag_s
        pick_id = completion.pick_id or pool.flights.pick_id_of(completion.request_id) or ""
        verdict, address = completion.verdict, completion.address
        is_short = completion.body_bytes < HOLLOW_BYTES
        if verdict is not _SERVED or (is_short and is_at_once(completion)):
            verdict = self._verdict(completion, pick_id, ended_s)
        flight = pool.flights.finish(
            pick_id,
            now=ended_s,
            reported_at_s=now,
            has_run=has_run(completion),
            verdict=verdict,
            address=address,
            num_attempts=completion.attempts,
            num_bytes=completion.body_bytes,
        )
        if flight is None:
            return None
        pod, request = flight.pod, flight.pick.request
        self.logs.heard(request.envoy, log, now=now)
        first_s, streamed_s = first_token_s(completion, request.path), None
        is_here = completion.attempts <= 1 and address == pod.address
        if first_s is not None and verdict is not _FAILED and is_here:
            assert completion.duration_s is not None  # it was streamed
            streamed_s = completion.duration_s - first_s
            # A request may be longer than what was seen of it.
            if request.is_whole and flight.group == pod.group:
                self._learn(flight, first_s - (flight.started_at_s - request.arrived_at_s))
        load = parse_orca(completion.orca) if completion.orca else None
        if load is not None:
            pool.record_orca(address or flight.pick.address, load)
        num_tokens = self._output_tokens(completion, flight, streamed_s, ended_s)
        if num_tokens is not None:
            pool.queue.settle(request, num_tokens)
        return Ended(flight.pick, completion.outcome, completion, first_s, num_tokens)

    def _learn(self, flight: InFlight, ttft_s: float) -> None:
        """Learn from the time that an endpoint took from a pick to its first token."""
        pool, pod, sent_at_s = self._pool, flight.pod, flight.started_at_s
        pod.ours.had_first_token(flight, sent_at_s + ttft_s)
        if flight.probe is not None:
            pool.speeds.had_first_token(pod, flight.probe, sent_at_s, ttft_s)

    def is_ours(self, pick_id: str) -> bool:
        """Return whether a pick is one of this router's."""
        return router_of(pick_id) == self._router_id

    def _verdict(self, completion: Completion, pick_id: str, ended_s: float) -> Evidence:
        """Judge the endpoint by an entry and the pick that it ends."""
        flight, verdict = self._pool.flights.find(pick_id), completion.verdict
        if flight is None:
            return verdict
        if verdict is Evidence.UNANSWERED:
            return _if_long(verdict, flight, ended_s)
        if verdict is _SERVED:
            request = flight.pick.request
            address = completion.address or flight.pick.address
            is_text = request.path in _TEXT_PATHS
            if self._pool.outliers.is_hollow(
                address, likeness(request).kind, completion.body_bytes, is_text=is_text
            ):
                return Evidence.FAILED
        return verdict

    def _output_tokens(
        self, completion: Completion, flight: InFlight, streamed_s: float | None, ended_s: float
    ) -> float | None:
        """Return the tokens of a response, None where unknown; judge and learn their time."""
        num_bytes, request = completion.body_bytes, flight.pick.request
        since_s = flight.started_at_s
        if streamed_s is not None:
            since_s = ended_s - streamed_s
        elif not was_given_up(completion):
            if completion.status != _OK:
                return 0.0
            if came_at_once(completion, request.path):
                return num_bytes / BYTES_PER_TOKEN
            if request.path != RESPONSES_PATH:  # whose bytes say nothing of tokens
                return None
        tokens = flight.pod.reports.decoding.tokens_between(since_s, ended_s)
        if streamed_s is None:
            return _bounded(flight, tokens, ended_s - since_s)
        num_tokens = None if tokens is None else (1 + tokens) * request.num_sequences
        if request.num_sequences == 1:
            learned_tokens = self.tpots.ended(request.claim, num_bytes, streamed_s, num_tokens)
        else:  # nobody knows whose tokens took how long
            learned_tokens = self.tpots.tokens_of(request.claim, num_bytes)
        if learned_tokens is None and num_tokens is None:  # it began before all that is remembered
            return _bounded(flight, None, ended_s - since_s)
        return num_tokens if learned_tokens is None else learned_tokens

    def refused(self, pick_id: str, request_id: str, address: str, *, now: float) -> bool:
        """Record that an endpoint refused a pick as it is full; the data plane tries another.

        Return False if the pick may be another router's.
        """
        flights = self._pool.flights
        pick_id = pick_id or flights.pick_id_of(request_id) or ""
        return flights.refused(pick_id, address, now=now) or self.is_ours(pick_id)

    def finish(self, pick: Pick, end: StreamEnd, *, now: float) -> InFlight | None:
        """End a pick whose stream saw the end. Return None if it had ended before."""
        flights, verdict = self._pool.flights, end.verdict
        if verdict is Evidence.UNANSWERED and (flight := flights.find(pick.id)) is not None:
            verdict = _if_long(verdict, flight, now)
        flight = flights.finish(
            pick.id,
            now=now,
            has_run=end.outcome is not Outcome.FAILED,
            verdict=verdict,
            num_bytes=end.num_bytes,
        )
        if flight is not None and end.outcome is Outcome.COMPLETED:
            flight.pod.ours.served(flight.started_at_s)
        return flight

    def is_unreachable(self, address: str) -> bool:
        """Return whether the last call of ours could not connect to an endpoint of the pool."""
        return (pod := self._pool.find(address)) is not None and pod.health.is_unreachable

    def served(self, pick: Pick, address: str, *, now: float) -> None:
        """Record which endpoint served a pick according to the data plane; move the pick there."""
        pool = self._pool
        if address != pick.address:
            pool.flights.move(pick.id, address, now=now)
        self.servers.record(pick, address, is_known=pool.find(address) is not None)

    def reconcile(self, address: str, *, now: float) -> list[InFlight]:
        """End the picks that the endpoint's last report does not account for; return them."""
        return self._pool.flights.reconcile(address, self._trust, now=now)

    def is_expected(self, address: str, *, now: float) -> bool:
        """Return whether an endpoint's reports say what is expected, and the ends of requests there
        are told by others."""
        pod = self._pool.find(address)
        if pod is None or not pod.is_as_expected(len(self._pool.queue)):
            return False
        oldest_s = dict[str, float]()  # by Envoy
        for each in pod.ours.flights.values():
            oldest_s.setdefault(each.pick.request.envoy, each.started_at_s)
        if self._has_times:
            may_tell = self.logs.may_tell
            return all(may_tell(envoy, at_s, now=now) for envoy, at_s in oldest_s.items())
        return self._settings.source is not EndSource.SCRAPE or not oldest_s

    def expire(self, *, now: float) -> list[InFlight]:
        """End the picks in flight for longer than `max_age_s`; return them."""
        return self._pool.flights.expire(now=now, max_age_s=self._settings.max_age_s)


def _if_long(verdict: Evidence, flight: InFlight, ended_s: float) -> Evidence:
    """Return a verdict if the request was under way for long, else none."""
    return verdict if ended_s - flight.started_at_s >= UNANSWERED_S else Evidence.NONE


def _bounded(flight: InFlight, num_tokens: float | None, seconds: float) -> float | None:
    """Return the tokens that a request got at most in so many seconds, where so many came to others
    that ran there meanwhile; None where that is not known either."""
    request, decode = flight.pick.request, flight.pod.reports.decoding.decode
    if num_tokens is None:
        if decode is None:
            return None
        num_tokens = max(0.0, seconds) / decode.token_s
    if request.max_tokens is not None:
        num_tokens = min(num_tokens, max(1, request.max_tokens))
    return num_tokens * request.num_sequences
