"""The ends of picks by their streams, access logs and age, recorded, and what follows from them."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from extproc.learned.ejections import Readmission
from extproc.learned.evidence import FAILURES, Evidence, StreamEnd
from extproc.learned.outliers import Outliers
from extproc.phrases import listed
from extproc.pods.accesslogs import STILL_S
from extproc.pods.accounting import Accounting
from extproc.pods.completion import Completion, Ended
from extproc.types import Outcome, Pick

log = logging.getLogger(__name__)

_OK, _NOT_FOUND = 200, 404
_SERVED = Evidence.SERVED  # to look up a member takes 0.1 us
_MIN_DOUBTED = 500  # a client can provoke other statuses as often as it likes
UNSURE_S = 3.0
"""Longest wait for a pod's answer to a call of ours that shows whether it has broken off."""


class _Unsure(NamedTuple):
    """A response that broke off, by its pod or by its client."""

    pick: Pick
    address: str
    ended_s: float


class EndRecorder(Protocol):
    """Records the ends."""

    def ended(self, pick: Pick, outcome: Outcome) -> None:
        """Its own stream reported it, or nobody did."""

    def completed(self, ended: Ended, completion: Completion, *, now: float) -> None:
        """The access log reported it, by an entry."""

    def unmatched(self) -> None:
        """The access log reported that of a pick of ours that had ended."""

    def refused(self) -> None:
        """An endpoint refused a request as it is full."""

    def given_up(self, picks: Sequence[Pick]) -> None:
        """Nobody reported them in time."""


class Doubts(Protocol):
    """Asks pods what they have, and how they are."""

    def recheck_models(self, address: str) -> None:
        """The endpoint may have lost a model."""

    def doubt(self, address: str) -> None:
        """The endpoint has failed a request."""


@dataclass(slots=True)
class Endings:
    """Ends picks by their streams, access logs and age, and handles the consequences.

    Attributes:
        pods: Asked where an end raises doubt.
        clock: Monotonic seconds.
    """

    accounting: Accounting
    outliers: Outliers
    recorder: EndRecorder
    pods: Doubts
    clock: Callable[[], float]
    _unsure: deque[_Unsure] = field(default_factory=deque)

    # --- by their own streams ----------------------------------------------------------------

    def finish(self, pick: Pick, end: StreamEnd, *, now: float) -> bool:
        """End a pick as `Accounting.finish`, and ask its pod what an end like that may mean.

        Return False where it had ended before, and for an unknown outcome: whether the pod still
        answers tells more of that, and it is recorded then.
        """
        flight = self.accounting.finish(pick, end, now=now)
        if flight is None:
            return False
        address, is_unknown = flight.pod.address, end.outcome is Outcome.UNKNOWN
        if end.verdict is Evidence.NOT_FOUND and pick.request.model:
            self.pods.recheck_models(address)
        elif is_unknown or (end.verdict in FAILURES and end.outcome is not Outcome.COMPLETED):
            self.pods.doubt(address)
        if not is_unknown:
            return True
        self._unsure.append(_Unsure(pick, address, now))
        return False

    def served(self, pick: Pick, address: str, *, now: float) -> None:
        """Record which endpoint serves the request: the pick's first one, or another."""
        self.accounting.served(pick, address, now=now)

    def _settle(self, now: float) -> None:
        """Record those that broke off: as failures where the pod cannot be reached since."""
        while self._unsure:
            pick, address, ended_s = self._unsure[0]
            answers = self.outliers.has_answered(address, since_s=ended_s)
            is_lost = not answers and self.accounting.is_unreachable(address)
            if not (answers or is_lost) and now - ended_s < UNSURE_S:
                return
            self._unsure.popleft()
            self.recorder.ended(pick, Outcome.FAILED if is_lost else Outcome.UNKNOWN)

    # --- by access logs and age --------------------------------------------------------------

    def complete(self, completion: Completion, log: Hashable = "") -> bool:
        """Record an entry that a log brought; return False if it is of another router's pick."""
        now = self.clock()
        ended = self.accounting.complete(completion, log, now=now)
        if ended is None:
            is_ours = self.accounting.is_ours(completion.pick_id)
            if is_ours:
                self.recorder.unmatched()
            return is_ours
        self.recorder.completed(ended, completion, now=now)
        if completion.status != _OK or completion.verdict is not _SERVED:
            self._doubt(completion, ended.pick)
        if completion.attempts > 1:
            self.pods.doubt(ended.pick.address)
        if self.outliers.ejections.changes:
            self._log_changes()
        return True

    def _doubt(self, completion: Completion, pick: Pick) -> None:
        """Ask an endpoint what the end of a request that it has not served may mean."""
        verdict, status, address = completion.verdict, completion.status, completion.address
        if status == _NOT_FOUND and completion.is_from_endpoint and pick.request.model:
            self.pods.recheck_models(address or pick.address)  # it may have lost the model
        if verdict in FAILURES and (verdict is not Evidence.FAILED or status >= _MIN_DOUBTED):
            self.pods.doubt(address or pick.address)

    def refused(self, pick_id: str, request_id: str, address: str) -> bool:
        """Record an attempt that an endpoint refused; return False if it is another router's."""
        is_ours = self.accounting.refused(pick_id, request_id, address, now=self.clock())
        if is_ours:
            self.recorder.refused()
        return is_ours

    def lost_log(self, log: Hashable) -> None:
        """Record that Envoy's own log has closed."""
        self.accounting.logs.lost(log, now=self.clock())

    def lost_link(self, link: Hashable) -> None:
        """Record that a link has closed, or that entries may be missing from what it brings."""
        self.accounting.logs.lost(link, now=self.clock(), is_direct=False)

    def delayed(self, delay_s: float) -> None:
        """Record that this process stood still for so long."""
        if delay_s >= STILL_S:
            self.accounting.logs.stood_still(now=self.clock())

    def tick(self, *, now: float) -> None:
        """End the picks whose end was not reported in time, and say which source is in force."""
        self._settle(now)
        self.accounting.servers.tick(now=now)
        self.recorder.given_up([each.pick for each in self.accounting.expire(now=now)])
        self._log_changes()
        self._log_sources(now)

    def _log_sources(self, now: float) -> None:
        accounting = self.accounting
        found, lost = accounting.check_logs(now=now)
        if lost:
            log.warning(
                "no access log of Envoy at %s tells how its requests end: the pods' own counts do",
                _hosts(lost),
            )
        if found:
            log.info("the access log of Envoy at %s tells how its requests end", _hosts(found))

    def _log_changes(self) -> None:
        changes = self.outliers.ejections.changes
        while changes:
            change = changes.popleft()
            if isinstance(change, Readmission):
                why = (
                    "" if change.is_recovered else ": the limit of ejections leaves no room for it"
                )
                log.info("pod %s may serve again%s", change.address, why)
            else:
                address, cause = change.address, change.cause
                log.warning("pod %s ejected for %g s: %s", address, change.for_s, cause)


def _hosts(hosts: list[str]) -> str:
    return listed([each or "a socket of this machine" for each in hosts])
