"""`extproc.v1.Decisions`: follow routing decisions live, and remember the last ones.

1. With nobody watching, a decision costs one append: the core's own values are kept, and are
   described only when somebody asks.
2. With watchers it is encoded once, however many there are, after the answer, in passes of
   `MAX_PER_PASS` that have `MAX_SHARE` of the loop's time at most. What they are too slow for is
   dropped and counted; missing numbers say so to the watcher.
3. A watcher that does not read must not fill the memory, and the transport does not say who
   reads. So a call is ended after a volume of bytes (the client calls again and goes on where it
   was), and the number of watchers is bounded: together they can hold
   `max_watchers * max_watch_bytes`.

A decision never contains a prompt or a request header other than `x-request-id`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from itertools import count, islice
from typing import Any

from google.protobuf.message import DecodeError

from extproc.core.accounting import DecisionRecord
from extproc.core.decided import describe_result
from extproc.core.explanation import explain
from extproc.core.types import Rejection
from extproc.shell.gen import decisions_pb2
from extproc.shell.rpc import Call, Code, Metadata, Method, Session

METHOD = "/extproc.v1.Decisions/Watch"

MAX_PER_PASS = 16
"""Decisions encoded in one go; one with 100 candidates takes half a millisecond."""
MAX_LOOKS = 1024
"""Decisions looked at in one go, for a watcher that wants few of them."""
MAX_SHARE = 0.2
"""Part of the event loop's time that watchers may cost."""
MAX_FILTER_MODELS = 100
"""Models that one watcher may ask for."""
MAX_REQUEST_BYTES = 32 * 1024
"""Of what one asks for: so many names of the longest length, and more."""
MAX_REPLAYED = 10_000
"""Of the decisions remembered, how many of the newest a watcher can have again."""
MIN_BEHIND = 256
"""Decisions that a watcher may be behind, however few are kept for people."""


class DecisionsService:
    """Remembers decisions and sends them to whoever watches.

    Args:
        num_kept: Decisions remembered. Each keeps its candidates' state alive: about 1 KB per
            endpoint and decision. At least `MIN_BEHIND` are, for watchers.
        max_watchers: Calls at one time; further ones end with RESOURCE_EXHAUSTED.
        max_watch_bytes: Volume after which a call is ended with OK.
        later: Runs a callable after so many seconds; without it watchers are told at once.
        clock: Monotonic seconds, for the watchers' share of the loop's time.

    Attributes:
        num_dropped: Decisions that a watcher was too late for, once for each watcher.
    """

    def __init__(
        self,
        num_kept: int = 256,
        *,
        max_watchers: int = 8,
        max_watch_bytes: int = 8 * 2**20,
        later: Callable[[float, Callable[[], None]], object] = lambda _, call: call(),
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.max_watch_bytes = max_watch_bytes
        self.num_dropped = 0
        self._max_watchers = max_watchers
        self._later = later
        self._clock = clock
        self._num_kept = num_kept
        self._kept: deque[DecisionRecord] = deque(maxlen=max(num_kept, MIN_BEHIND))
        self._num_published = 0
        self._watchers: list[_Watcher] = []
        self._is_due = False

    @property
    def num_published(self) -> int:
        """Decisions since the start: the last one's sequence number."""
        return self._num_published

    @property
    def num_watchers(self) -> int:
        """Calls that get decisions now."""
        return len(self._watchers)

    def publish(self, record: DecisionRecord) -> None:
        """Remember one decision; the watchers that want it get it soon."""
        self._num_published += 1
        self._kept.append(record)
        if self._watchers:
            self.tell()

    def tell(self) -> None:
        """See to it that watchers get what there is for them."""
        if not self._is_due:
            self._is_due = True
            self._later(0.0, self._tell)

    def recent(self, limit: int) -> Iterator[dict[str, Any]]:
        """The last decisions, newest first, in the shape of `describe`, made as they are taken."""
        return (describe(sequence, record) for sequence, record in self.last(limit))

    def last(self, limit: int) -> list[tuple[int, DecisionRecord]]:
        """The last decisions with their sequence numbers, newest first."""
        newest_first = islice(reversed(self._kept), max(0, min(limit, self._num_kept)))
        return list(zip(count(self._num_published, -1), newest_first, strict=False))

    def methods(self) -> tuple[Method, ...]:
        """Watch."""
        return (Method(METHOD, self._open, is_long_lived=True),)

    def kept(self) -> Iterator[tuple[int, DecisionRecord]]:
        """The decisions that can be replayed with their sequence numbers, oldest first."""
        return reversed(self.last(MAX_REPLAYED))

    def join(self, watcher: _Watcher) -> bool:
        """Add a watcher; False if there are too many."""
        if len(self._watchers) >= self._max_watchers:
            return False
        self._watchers.append(watcher)
        return True

    def leave(self, watcher: _Watcher) -> None:
        """Remove a watcher; without effect if it is not there."""
        if watcher in self._watchers:
            self._watchers.remove(watcher)

    def _tell(self) -> None:
        """One pass; the next one after a rest, if there is more to tell."""
        self._is_due, is_more = False, True
        began_s = self._clock()
        try:
            is_more = self._pass()
        finally:  # a decision that cannot be told does not keep back the others
            if is_more:
                self._is_due = True
                self._later((self._clock() - began_s) * (1 / MAX_SHARE - 1), self._tell)

    def _pass(self) -> bool:
        """Give every watcher one decision after the other; True if there may be more."""
        messages: dict[int, bytes] = {}
        num_looks = 0
        while behind := [each for each in self._watchers if each.sequence < self._num_published]:
            if len(messages) >= MAX_PER_PASS or num_looks >= MAX_LOOKS:
                return True
            num_looks += len(behind)
            for watcher in behind:
                sequence, record = self._next(watcher)
                if watcher.wants(record):
                    if sequence not in messages:
                        messages[sequence] = encode(sequence, record)
                    watcher.send(messages[sequence])
        return False

    def _next(self, watcher: _Watcher) -> tuple[int, DecisionRecord]:
        """The watcher's next decision, which counts as told from here on."""
        num_gone = self._num_published - len(self._kept)
        if watcher.sequence < num_gone:
            self.num_dropped += num_gone - watcher.sequence
            watcher.sequence = num_gone
        record = self._kept[watcher.sequence - num_gone]
        watcher.sequence += 1
        return watcher.sequence, record

    def _open(self, call: Call, metadata: Metadata) -> Session:
        return _Watcher(self, call)


class _Watcher:
    """One call of Watch.

    Attributes:
        sequence: The last decision that it was told, or that it does not want.
    """

    def __init__(self, service: DecisionsService, call: Call) -> None:
        self.sequence = 0
        self._service = service
        self._call = call
        self._request: Any = None
        self._models: frozenset[str] = frozenset()
        self._num_sent_bytes = 0

    def receive(self, message: bytes) -> None:
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
        if self._service.join(self):
            self.sequence = self._begin()
            self._service.tell()
        else:
            self._end(Code.RESOURCE_EXHAUSTED, "too many watchers")

    def wants(self, record: DecisionRecord) -> bool:
        """Whether the filters let `record` through."""
        decision = record.decision
        if isinstance(decision, Rejection):
            return not self._request.endpoint and (
                not self._models or decision.model in self._models
            )
        if self._request.only_rejections:
            return False
        if self._request.endpoint and self._request.endpoint not in decision.endpoints:
            return False
        return not self._models or decision.request.model in self._models

    def send(self, message: bytes) -> None:
        """Send one decision; end the call when it has had its volume."""
        self._call.send(message)
        self._num_sent_bytes += len(message)
        if self._num_sent_bytes >= self._service.max_watch_bytes:
            self._end(Code.OK, "")

    def half_close(self) -> None:
        if self._request is None:
            self._end(Code.INVALID_ARGUMENT, "no request message")

    def closed(self) -> None:
        self._service.leave(self)

    def _begin(self) -> int:
        """The number after which it is told: now, or what it wants to have replayed."""
        wanted = [
            sequence
            for sequence, record in self._service.kept()
            if sequence > self._request.after_sequence and self.wants(record)
        ]
        first = max(0, len(wanted) - self._request.replay_last)
        return wanted[first] - 1 if first < len(wanted) else self._service.num_published

    def _end(self, code: Code, details: str) -> None:
        self._service.leave(self)
        self._call.end(code, details)


def describe(sequence: int, record: DecisionRecord) -> dict[str, Any]:
    """One decision as plain values, in the shape of `extproc.v1.Decision`.

    `{"sequence", "time" (RFC 3339), "decision_seconds", "explanation", "pick": {...} or
    "rejection": {...}}`, with the fields of protos/extproc/v1/decisions.proto by their names there;
    what is absent is None. `explanation` is a sentence for people and no part of the message.
    """
    time = datetime.fromtimestamp(record.wall_s, UTC).isoformat(timespec="milliseconds")
    return {
        "sequence": sequence,
        "time": time.replace("+00:00", "Z"),
        "decision_seconds": record.seconds,
        "explanation": explain(record.decision),
        **describe_result(record),
    }


def encode(sequence: int, record: DecisionRecord) -> bytes:
    """One decision as an encoded `extproc.v1.Decision`."""
    message = decisions_pb2.Decision(
        sequence=sequence, decision_seconds=record.seconds, **describe_result(record)
    )
    message.time.FromNanoseconds(round(record.wall_s * 1e6) * 1000)
    return message.SerializeToString()
