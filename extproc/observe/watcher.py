"""One call of `extproc.v1.Decisions/Watch`: which decisions it wants, and what it has got."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Any

from google.protobuf.message import DecodeError

from extproc.gen import decisions_pb2
from extproc.pods.completion import DecisionRecord
from extproc.types import Pick, Rejection
from extproc.wire.rpc import Call, Code

MAX_FILTER_MODELS = 100
"""Models in one watcher's filter."""
MAX_REQUEST_BYTES = 32 * 1024
"""Length of a watch request: so many names of the longest length, and more."""


@dataclass(eq=False)
class Watcher:
    """One call of Watch.

    Attributes:
        begin: Has it watch, as its request says.
        leave: Ends that; no effect if it does not watch.
        max_bytes: Volume after which the call is ended with OK.
        request: The request message; None before it has come.
        sequence: The last decision sent or filtered out.
        num_ends: The last outcome sent or filtered out.
    """

    call: Call
    begin: Callable[[Watcher], None]
    leave: Callable[[Watcher], None]
    max_bytes: int
    request: Any = None
    sequence: int = 0
    num_ends: int = 0
    _followed: set[str] = field(default_factory=set)  # picks of the one request, to be ended
    _models: frozenset[str] = frozenset()
    _candidates_wall_s: float = -inf  # of the last decision that was sent with all candidates
    _num_sent_bytes: int = 0

    def receive(self, message: bytes) -> None:
        """Begin, as the one request message says."""
        if self.request is not None:
            self.end(Code.INVALID_ARGUMENT, "a second request message")
            return
        try:
            self.request = decisions_pb2.WatchRequest.FromString(message)
        except DecodeError:
            self.end(Code.INVALID_ARGUMENT, "not a watch request")
            return
        if len(message) > MAX_REQUEST_BYTES or len(self.request.models) > MAX_FILTER_MODELS:
            self.end(Code.INVALID_ARGUMENT, f"more than {MAX_FILTER_MODELS} models, or too long")
            return
        self._models = frozenset(self.request.models)
        self.begin(self)

    def start(self, sequence: int, num_ended: int, num_gone: int) -> None:
        """Start after a decision, and after the last outcome or an earlier one that is not gone, as
        asked for."""
        self.sequence, self.num_ends = sequence, num_ended
        if self.request.HasField("after_outcome"):
            self.num_ends = max(num_gone, min(self.request.after_outcome, num_ended))

    @property
    def explains(self) -> bool:
        """Whether it wants decisions in words, too."""
        return bool(self.request.explain)

    @property
    def wants_outcomes(self) -> bool:
        """Whether it wants to know how picks end."""
        return bool(self.request.outcomes or self.request.request)

    @property
    def last_outcome(self) -> int:
        """The last outcome sent or filtered out, 0 where it wants none."""
        return self.num_ends if self.wants_outcomes else 0

    def knows_end(self, record: DecisionRecord) -> bool:
        """Return whether the end of `record` is to be sent with it: it will not come as news."""
        is_news = self.wants_outcomes and record.end_number > self.num_ends
        return record.end is not None and not is_news

    def takes_candidates(self, wall_s: float) -> bool:
        """Return whether a decision of this wall time, which is sent next, has all candidates."""
        interval_s: int = self.request.candidates_interval_seconds
        is_due = abs(wall_s - self._candidates_wall_s) >= interval_s
        if is_due:
            self._candidates_wall_s = wall_s
        return is_due

    def follow(self, record: DecisionRecord, *, ends: bool) -> None:
        """Remember whether the one request has been sent with its end."""
        if self.request.request and isinstance(record.decision, Pick):
            (self._followed.discard if ends else self._followed.add)(record.decision.id)

    def end_if_answered(self) -> None:
        """End a call about one request that has been sent with its end."""
        if self.request.request and not self._followed:
            self.end(Code.OK, "")

    def wants(self, record: DecisionRecord) -> bool:
        """Return whether `record` passes the filters."""
        decision = record.decision
        if self.request.request and not is_about(record, self.request.request):
            return False
        if isinstance(decision, Rejection):
            return not self.request.endpoint and (
                not self._models or decision.model in self._models
            )
        if self.request.only_rejections:
            return False
        if self.request.endpoint and self.request.endpoint not in decision.endpoints:
            return False
        return not self._models or decision.request.client_model in self._models

    def take_decision(self, num_gone: int) -> int:
        """Go on to the next decision after `num_gone`; return how many were missed."""
        num_missed = max(0, num_gone - self.sequence)
        self.sequence += num_missed + 1
        return num_missed

    def take_outcome(self, num_gone: int) -> None:
        """Go on to the next outcome after `num_gone`."""
        self.num_ends = max(self.num_ends, num_gone) + 1

    def send(self, message: bytes) -> None:
        """Send one decision; end the call after `max_bytes`."""
        self.call.send(message)
        self._num_sent_bytes += len(message)
        if self._num_sent_bytes >= self.max_bytes:
            self.end(Code.OK, "")

    def half_close(self) -> None:
        """End a call that said nothing."""
        if self.request is None:
            self.end(Code.INVALID_ARGUMENT, "no request message")

    def closed(self) -> None:
        """Watch no more."""
        self.leave(self)

    def end(self, code: Code, details: str) -> None:
        """End the call."""
        self.leave(self)
        self.call.end(code, details)


def is_about(record: DecisionRecord, request: str) -> bool:
    """Return whether a decision is about the request with this id, or this id of its pick."""
    decision = record.decision
    if isinstance(decision, Pick):
        return request in (decision.request.request_id, decision.id)
    return record.request_id == request
