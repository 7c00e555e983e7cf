"""One call of `extproc.v1.Decisions/Watch`: which decisions it wants, and what it has got."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from google.protobuf.message import DecodeError

from extproc.gen import decisions_pb2
from extproc.pods.completion import DecisionRecord
from extproc.types import Pick, Rejection
from extproc.wire.rpc import Call, Code

MAX_FILTER_MODELS = 100
"""Models in one watcher's filter."""
MAX_REQUEST_BYTES = 32 * 1024
"""Length of a watch request: so many names of the longest length, and more."""
MAX_REPLAYED = 10_000
"""Most decisions that can be replayed."""


class Watched(Protocol):
    """The keeper of decisions, which sends them to its watchers."""

    num_published: int
    num_ended: int
    max_watch_bytes: int

    def join(self, watcher: Watcher) -> bool:
        """Add a watcher; False if there are too many."""

    def leave(self, watcher: Watcher) -> None:
        """Remove a watcher; no effect if it is not there."""

    def send_soon(self) -> None:
        """Schedule a pass."""

    def last(self, limit: int) -> list[tuple[int, DecisionRecord]]:
        """Return the last decisions with their sequence numbers, newest first."""

    def find(self, request: str) -> list[tuple[int, DecisionRecord]]:
        """Return what is remembered of a request, newest first."""

    def why_unknown(self, request: str) -> str:
        """Say why nothing is remembered of a request, for people."""


@dataclass(eq=False)
class Watcher:
    """One call of Watch.

    Attributes:
        sequence: The last decision sent or filtered out.
        num_ends: The last outcome sent or filtered out.
    """

    service: Watched
    call: Call
    sequence: int = 0
    num_ends: int = 0
    _request: Any = None
    _followed: set[str] = field(default_factory=set)  # picks of the one request, to be ended
    _models: frozenset[str] = frozenset()
    _num_sent_bytes: int = 0

    def receive(self, message: bytes) -> None:
        """Begin, as the one request message says."""
        if self._request is not None:
            self._end(Code.INVALID_ARGUMENT, "a second request message")
            return
        try:
            self._request = decisions_pb2.WatchRequest.FromString(message)
        except DecodeError:
            self._end(Code.INVALID_ARGUMENT, "not a watch request")
            return
        if len(message) > MAX_REQUEST_BYTES or len(self._request.models) > MAX_FILTER_MODELS:
            self._end(Code.INVALID_ARGUMENT, f"more than {MAX_FILTER_MODELS} models, or too long")
            return
        self._models = frozenset(self._request.models)
        if not self.service.join(self):
            self._end(Code.RESOURCE_EXHAUSTED, "too many watchers")
            return
        begin = self._begin()
        if begin is None:
            self._end(Code.NOT_FOUND, self.service.why_unknown(self._request.request))
            return
        self.sequence = begin
        self.service.send_soon()

    @property
    def explains(self) -> bool:
        """Whether it wants decisions in words, too."""
        return bool(self._request.explain)

    @property
    def wants_outcomes(self) -> bool:
        """Whether it wants to know how picks end."""
        return bool(self._request.outcomes or self._request.request)

    @property
    def last_outcome(self) -> int:
        """The last outcome sent or filtered out, 0 where it wants none."""
        return self.num_ends if self.wants_outcomes else 0

    def knows_end(self, record: DecisionRecord) -> bool:
        """Return whether the end of `record` is to be sent with it: it will not come as news."""
        is_news = self.wants_outcomes and record.end_number > self.num_ends
        return record.end is not None and not is_news

    def follow(self, record: DecisionRecord, *, ends: bool) -> None:
        """Remember whether the one request has been sent with its end."""
        if self._request.request and isinstance(record.decision, Pick):
            (self._followed.discard if ends else self._followed.add)(record.decision.id)

    def end_if_told(self) -> None:
        """End a call about one request that has been sent with its end."""
        if self._request.request and not self._followed:
            self._end(Code.OK, "")

    def wants(self, record: DecisionRecord) -> bool:
        """Return whether `record` passes the filters."""
        decision = record.decision
        if self._request.request and not is_about(record, self._request.request):
            return False
        if isinstance(decision, Rejection):
            return not self._request.endpoint and (
                not self._models or decision.model in self._models
            )
        if self._request.only_rejections:
            return False
        if self._request.endpoint and self._request.endpoint not in decision.endpoints:
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
        """Send one decision; end the call after `max_watch_bytes`."""
        self.call.send(message)
        self._num_sent_bytes += len(message)
        if self._num_sent_bytes >= self.service.max_watch_bytes:
            self._end(Code.OK, "")

    def half_close(self) -> None:
        """End a call that said nothing."""
        if self._request is None:
            self._end(Code.INVALID_ARGUMENT, "no request message")

    def closed(self) -> None:
        """Watch no more."""
        self.service.leave(self)

    def _begin(self) -> int | None:
        """Return the sequence number to start after: the last, or that before the replayed ones.

        None where the one request that is asked for is not known.
        """
        self.num_ends = self.service.num_ended
        if self._request.HasField("after_outcome"):
            self.num_ends = min(self._request.after_outcome, self.num_ends)
        if self._request.request:
            found = self.service.find(self._request.request)
            return found[-1][0] - 1 if found else None
        wanted = [
            sequence
            for sequence, record in reversed(self.service.last(MAX_REPLAYED))
            if sequence > self._request.after_sequence and self.wants(record)
        ]
        first = max(0, len(wanted) - self._request.replay_last)
        return wanted[first] - 1 if first < len(wanted) else self.service.num_published

    def _end(self, code: Code, details: str) -> None:
        self.service.leave(self)
        self.call.end(code, details)


def is_about(record: DecisionRecord, request: str) -> bool:
    """Return whether a decision is about the request with this id, or this id of its pick."""
    decision = record.decision
    if isinstance(decision, Pick):
        return request in (decision.request.request_id, decision.id)
    return record.request_id == request
