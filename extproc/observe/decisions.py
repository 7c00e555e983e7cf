"""`extproc.v1.Decisions`: the last routing decisions, remembered and followed live.

1. Without watchers, a decision costs one append: the core's own values are kept, and described only
   on request.
2. With watchers, it is encoded once for all of them, and once more for those that want the reason
   in words. That happens after the response, in passes of `MAX_PER_PASS` that use at most
   `MAX_SHARE` of the loop's time. Decisions that a watcher is too slow for are dropped and counted;
   it sees the gap in the sequence numbers.
3. A watcher that does not read must not fill the memory, and the transport does not report who
   reads. So a call is ended after a volume of bytes (the client calls again and resumes), and the
   number of watchers is bounded: together they can hold `max_watchers * max_watch_bytes`.

4. A decision that is kept learns how its pick ended, found by the pick's id. A watcher that wants
   outcomes gets them as news, after the decision; `MIN_BEHIND` of them wait for slow watchers.

A decision never contains a prompt or a request header other than `x-request-id`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from datetime import UTC, datetime
from itertools import count, islice
from typing import Any

from google.protobuf.message import DecodeError

from extproc.fleet.accounting import DecisionRecord, End
from extproc.gen import decisions_pb2
from extproc.observe.explanation import describe_result, explain
from extproc.observe.outcomes import describe_outcome, tell_outcome
from extproc.phrases import short
from extproc.types import Pick, Rejection
from extproc.wire.rpc import Call, Code, Metadata, Method, Session

METHOD = "/extproc.v1.Decisions/Watch"

MAX_PER_PASS = 16
"""Decisions encoded in one pass; one with 100 candidates takes half a millisecond."""
MAX_LOOKS = 1024
"""Decisions filtered in one pass, for watchers that want few of them."""
MAX_SHARE = 0.2
"""Largest share of the event loop's time for watchers."""
MAX_FILTER_MODELS = 100
"""Models in one watcher's filter."""
MAX_REQUEST_BYTES = 32 * 1024
"""Length of a watch request: so many names of the longest length, and more."""
MAX_REPLAYED = 10_000
"""Most decisions that can be replayed."""
MIN_BEHIND = 256
"""Decisions kept for slow watchers at least, and outcomes."""
MAX_SOUGHT = 100_000
"""The last decisions among which a single request is looked for, which takes 30 ms."""


@dataclass(eq=False)
class DecisionsService:
    """Remembers decisions and sends them to watchers.

    Attributes:
        num_kept: Decisions remembered. Each keeps its candidates' state alive: about 1 KB per
            endpoint and decision. At least `MIN_BEHIND` are, for watchers.
        max_watchers: Calls at one time; further ones end with RESOURCE_EXHAUSTED.
        max_watch_bytes: Volume after which a call is ended with OK.
        later: Runs a callable after so many seconds; the default runs it at once.
        clock: Monotonic seconds, for the watchers' share of the loop's time.
        num_published: Decisions since the start: the last one's sequence number.
        num_ended: Ends of picks since the start: the last one's number.
        num_dropped: Decisions that a watcher was too slow for, once per watcher.
    """

    num_kept: int = 256
    _: KW_ONLY
    max_watchers: int = 8
    max_watch_bytes: int = 2 * 2**20
    later: Callable[[float, Callable[[], None]], object] = lambda _, call: call()
    clock: Callable[[], float] = lambda: 0.0
    num_dropped: int = 0
    num_published: int = 0
    num_ended: int = 0
    _watchers: list[_Watcher] = field(default_factory=list)
    _is_due: bool = False

    def __post_init__(self) -> None:
        self._kept: deque[DecisionRecord] = deque(maxlen=max(self.num_kept, MIN_BEHIND))
        self._in_flight: dict[str, DecisionRecord] = {}  # those of them without an end, by pick id
        self._ends: deque[DecisionRecord] = deque(maxlen=MIN_BEHIND)

    def publish(self, record: DecisionRecord) -> None:
        """Remember one decision, and send it to watchers soon."""
        kept, decision = self._kept, record.decision
        if len(kept) == kept.maxlen:
            oldest = kept[0].decision
            if isinstance(oldest, Pick):
                self._in_flight.pop(oldest.id, None)
        if isinstance(decision, Pick):
            self._in_flight[decision.id] = record
        self.num_published += 1
        kept.append(record)
        if self._watchers:
            self.send_soon()

    def ended(self, pick: Pick, end: End) -> None:
        """Remember how a pick ended, and tell watchers soon."""
        record = self._in_flight.pop(pick.id, None)
        if record is None:  # decided too long ago: only a watcher may remember it
            record = DecisionRecord(pick, end.wall_s, 0.0)
        self.num_ended += 1
        record.finish(end, self.num_ended)
        self._ends.append(record)
        if self._watchers:
            self.send_soon()

    def send_soon(self) -> None:
        """Schedule a pass."""
        if not self._is_due:
            self._is_due = True
            self.later(0.0, self._run)

    def recent(self, limit: int) -> Iterator[dict[str, Any]]:
        """Yield the last decisions, newest first, each described on demand."""
        return (describe(sequence, record) for sequence, record in self.last(limit))

    def last(self, limit: int) -> list[tuple[int, DecisionRecord]]:
        """Return the last decisions with their sequence numbers, newest first."""
        newest_first = islice(reversed(self._kept), max(0, min(limit, self.num_kept)))
        return list(zip(count(self.num_published, -1), newest_first, strict=False))

    def find(self, request: str) -> list[tuple[int, DecisionRecord]]:
        """Return what is remembered of a request, newest first, by its id or that of its pick."""
        return [each for each in self.last(MAX_SOUGHT) if is_about(each[1], request)]

    def why_unknown(self, request: str) -> str:
        """Say why nothing is remembered of a request, for people."""
        kept = self.last(MAX_SOUGHT)
        since = f", now those since {_time(kept[-1][1].wall_s)}" if kept else ""
        return (
            f"no decision about {short(request)} is known here: this router keeps its last "
            f"{min(self.num_kept, MAX_SOUGHT)} decisions (admin.max_decisions){since}. It was "
            "decided earlier, or by another router, or has not been decided yet"
        )

    def methods(self) -> tuple[Method, ...]:
        """Return Watch."""
        return (Method(METHOD, self._open, is_long_lived=True),)

    def join(self, watcher: _Watcher) -> bool:
        """Add a watcher; False if there are too many."""
        if len(self._watchers) >= self.max_watchers:
            return False
        self._watchers.append(watcher)
        return True

    def leave(self, watcher: _Watcher) -> None:
        """Remove a watcher; no effect if it is not there."""
        if watcher in self._watchers:
            self._watchers.remove(watcher)

    def _run(self) -> None:
        """Run one pass, and schedule another after a rest if there may be more."""
        self._is_due, is_more = False, True
        began_s = self.clock()
        try:
            is_more = self._pass()
        finally:  # a decision that cannot be encoded must not block the others
            if is_more:
                self._is_due = True
                self.later((self.clock() - began_s) * (1 / MAX_SHARE - 1), self._run)

    def _pass(self) -> bool:
        """Send decisions to every watcher in turn; return whether there may be more."""
        messages: dict[tuple[int, bool, bool, int], bytes] = {}
        num_looks = 0
        while behind := [each for each in self._watchers if each.sequence < self.num_published]:
            if len(messages) >= MAX_PER_PASS or num_looks >= MAX_LOOKS:
                return True
            num_looks += len(behind)
            for watcher in behind:
                sequence, record = self._next(watcher)
                if watcher.wants(record):
                    ends, last = watcher.knows_end(record), watcher.last_outcome
                    key = sequence, watcher.explains, ends, last
                    if key not in messages:
                        messages[key] = encode(
                            sequence, record, explains=key[1], ends=ends, last_outcome=last
                        )
                    watcher.send(messages[key])
                    watcher.follow(record, ends=ends)
        return self._pass_ends(num_looks)

    def _pass_ends(self, num_looks: int) -> bool:
        """Send outcomes to every watcher who has got the decisions before them."""
        messages: dict[tuple[int, bool], bytes] = {}
        while behind := [
            each
            for each in self._watchers
            if each.wants_outcomes and each.num_ends < self.num_ended
        ]:
            if len(messages) >= MAX_PER_PASS or num_looks >= MAX_LOOKS:
                return True
            num_looks += len(behind)
            for watcher in behind:
                num_gone = self.num_ended - len(self._ends)
                watcher.num_ends = max(watcher.num_ends, num_gone)
                record = self._ends[watcher.num_ends - num_gone]
                watcher.num_ends += 1
                if watcher.wants(record):
                    key = watcher.num_ends, watcher.explains
                    if key not in messages:
                        messages[key] = encode_end(record, explains=watcher.explains)
                    watcher.send(messages[key])
                    watcher.follow(record, ends=True)
        for watcher in tuple(self._watchers):
            watcher.end_if_told()
        return False

    def _next(self, watcher: _Watcher) -> tuple[int, DecisionRecord]:
        """Advance a watcher by one decision, and return that."""
        num_gone = self.num_published - len(self._kept)
        if watcher.sequence < num_gone:
            self.num_dropped += num_gone - watcher.sequence
            watcher.sequence = num_gone
        record = self._kept[watcher.sequence - num_gone]
        watcher.sequence += 1
        return watcher.sequence, record

    def _open(self, call: Call, metadata: Metadata) -> Session:
        return _Watcher(self, call)


@dataclass(eq=False)
class _Watcher:
    """One call of Watch.

    Attributes:
        sequence: The last decision sent or filtered out.
        num_ends: The last outcome sent or filtered out.
    """

    service: DecisionsService
    call: Call
    sequence: int = 0
    num_ends: int = 0
    _request: Any = None
    _followed: set[str] = field(default_factory=set)  # picks of the one request, to be ended
    _models: frozenset[str] = frozenset()
    _num_sent_bytes: int = 0

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
        return not self._models or decision.request._client_model in self._models

    def send(self, message: bytes) -> None:
        """Send one decision; end the call after `max_watch_bytes`."""
        self.call.send(message)
        self._num_sent_bytes += len(message)
        if self._num_sent_bytes >= self.service.max_watch_bytes:
            self._end(Code.OK, "")

    def half_close(self) -> None:
        if self._request is None:
            self._end(Code.INVALID_ARGUMENT, "no request message")

    def closed(self) -> None:
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


def describe(sequence: int, record: DecisionRecord) -> dict[str, Any]:
    """Return one decision as plain values, in the shape of `extproc.v1.Decision`.

    `{"sequence", "time" (RFC 3339), "decision_seconds", "explanation", "pick": {...} or
    "rejection": {...}, "outcome": {...}}`, with the fields of protos/extproc/v1/decisions.proto by
    their names there; absent ones are None, as the outcome is of what has not ended.
    """
    return {
        "sequence": sequence,
        "time": _time(record.wall_s),
        "decision_seconds": record.seconds,
        "explanation": _explanation(record, ends=True),
        **describe_result(record),
        "outcome": _outcome(record),
    }


def encode(
    sequence: int,
    record: DecisionRecord,
    *,
    explains: bool = False,
    ends: bool = True,
    last_outcome: int = 0,
) -> bytes:
    """Return one decision as an encoded `extproc.v1.Decision`, in words where it `explains`.

    With `ends` it has its outcome, if that is known.
    """
    message = decisions_pb2.Decision(
        sequence=sequence,
        last_outcome=last_outcome,
        decision_seconds=record.seconds,
        outcome=_outcome(record) if ends else None,
        **describe_result(record),
    )
    if explains:
        message.explanation = _explanation(record, ends=ends)
    message.time.FromNanoseconds(_nanoseconds(record.wall_s))
    return message.SerializeToString()


def encode_end(record: DecisionRecord, *, explains: bool = False) -> bytes:
    """Return the news of how a pick ended as an encoded `extproc.v1.Decision`."""
    message = decisions_pb2.Decision(outcome=_outcome(record), last_outcome=record.end_number)
    if explains:
        message.explanation = tell_outcome(record)
    if record.end is not None:
        message.time.FromNanoseconds(_nanoseconds(record.end.wall_s))
    return message.SerializeToString()


def _outcome(record: DecisionRecord) -> dict[str, Any] | None:
    if record.end is None or not isinstance(record.decision, Pick):
        return None
    return describe_outcome(record.decision, record.end, record.end_number)


def _explanation(record: DecisionRecord, *, ends: bool) -> str:
    how = tell_outcome(record) if ends else ""
    return f"{explain(record.decision)} {how}" if how else explain(record.decision)


def _time(wall_s: float) -> str:
    time = datetime.fromtimestamp(wall_s, UTC).isoformat(timespec="milliseconds")
    return time.replace("+00:00", "Z")


def _nanoseconds(wall_s: float) -> int:
    return round(wall_s * 1e6) * 1000
