"""`extproc.v1.Decisions`: follow routing decisions live, and remember the last ones.

1. With nobody watching, a decision costs one append: the core's own values are kept, and are
   described only when somebody asks.
2. With watchers it is encoded once, however many there are.
3. A watcher that does not read must not fill the memory, and the transport does not say who
   reads. So a call is ended after a volume of bytes (the client calls again and goes on where it
   was), and the number of watchers is bounded: together they can hold
   `max_watchers * max_watch_bytes`.

A decision never contains a prompt or a request header other than `x-request-id`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import count, islice
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError

from extproc.core.types import EndpointView, Pick, Rejection
from extproc.core.words import explain
from extproc.shell.gen import decisions_pb2
from extproc.shell.rpc import Call, Code, Metadata, Method, Session

METHOD = "/extproc.v1.Decisions/Watch"


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


class DecisionsService:
    """Remembers decisions and sends them to whoever watches.

    Args:
        num_kept: Decisions remembered. Each keeps its candidates' state alive: about 1 KB per
            endpoint and decision.
        max_watchers: Calls at one time; further ones end with RESOURCE_EXHAUSTED.
        max_watch_bytes: Volume after which a call is ended with OK.
    """

    def __init__(
        self, num_kept: int = 256, *, max_watchers: int = 8, max_watch_bytes: int = 8 * 2**20
    ) -> None:
        self.max_watch_bytes = max_watch_bytes
        self._max_watchers = max_watchers
        self._kept: deque[DecisionRecord] = deque(maxlen=num_kept)
        self._num_published = 0
        self._watchers: list[_Watcher] = []

    @property
    def num_published(self) -> int:
        """Decisions since the start: the last one's sequence number."""
        return self._num_published

    @property
    def num_watchers(self) -> int:
        """Calls that get decisions now."""
        return len(self._watchers)

    def publish(self, record: DecisionRecord) -> None:
        """Remember one decision and send it to the watchers that want it."""
        self._num_published += 1
        self._kept.append(record)
        if self._watchers:
            self._send(record)

    def recent(self, limit: int) -> list[dict[str, Any]]:
        """The last decisions, newest first, in the shape of `describe`."""
        return [describe(sequence, record) for sequence, record in self.last(limit)]

    def last(self, limit: int) -> list[tuple[int, DecisionRecord]]:
        """The last decisions with their sequence numbers, newest first."""
        newest_first = islice(reversed(self._kept), max(0, limit))
        return list(zip(count(self._num_published, -1), newest_first, strict=False))

    def methods(self) -> tuple[Method, ...]:
        """Watch."""
        return (Method(METHOD, self._open, is_long_lived=True),)

    def kept(self) -> Iterator[tuple[int, DecisionRecord]]:
        """The decisions remembered with their sequence numbers, oldest first."""
        return enumerate(self._kept, self._num_published - len(self._kept) + 1)

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

    def _send(self, record: DecisionRecord) -> None:
        message: bytes | None = None
        for watcher in tuple(self._watchers):
            if watcher.wants(record):
                if message is None:
                    message = encode(self._num_published, record)
                watcher.send(message)

    def _open(self, call: Call, metadata: Metadata) -> Session:
        return _Watcher(self, call)


class _Watcher:
    """One call of Watch."""

    def __init__(self, service: DecisionsService, call: Call) -> None:
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
        self._models = frozenset(self._request.models)
        if self._service.join(self):
            self._replay()
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
        if self._num_sent_bytes >= self._service.max_watch_bytes:
            return  # ended in the middle of a replay
        self._call.send(message)
        self._num_sent_bytes += len(message)
        if self._num_sent_bytes >= self._service.max_watch_bytes:
            self._end(Code.OK, "")

    def half_close(self) -> None:
        if self._request is None:
            self._end(Code.INVALID_ARGUMENT, "no request message")

    def closed(self) -> None:
        self._service.leave(self)

    def _replay(self) -> None:
        wanted = [
            (sequence, record)
            for sequence, record in self._service.kept()
            if sequence > self._request.after_sequence and self.wants(record)
        ]
        first = max(0, len(wanted) - self._request.replay_last)
        for sequence, record in wanted[first:]:
            self.send(encode(sequence, record))

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
        **_describe_result(record),
    }


def encode(sequence: int, record: DecisionRecord) -> bytes:
    """One decision as an encoded `extproc.v1.Decision`."""
    message = decisions_pb2.Decision(
        sequence=sequence, decision_seconds=record.seconds, **_describe_result(record)
    )
    message.time.FromNanoseconds(round(record.wall_s * 1e6) * 1000)
    return message.SerializeToString()


def _describe_result(record: DecisionRecord) -> dict[str, Any]:
    if isinstance(record.decision, Rejection):
        return {"rejection": _describe_rejection(record, record.decision)}
    return {"pick": _describe_pick(record.decision)}


def _describe_pick(pick: Pick) -> dict[str, Any]:
    request = pick.request
    return {
        "id": pick.id,
        "request_id": request.request_id,
        "model": request.model,
        "adapter": request.adapter,
        "path": request.path,
        "body_bytes": request.body_bytes,
        "endpoints": list(pick.endpoints),
        "policy": pick.policy,
        "reason": pick.reason,
        "candidates": [_describe_candidate(each, request.adapter) for each in pick.candidates],
    }


def _describe_candidate(view: EndpointView, adapter: str | None) -> dict[str, Any]:
    return {
        "address": view.address,
        "name": view.name,
        "num_pending": view.num_pending,
        "num_adapter_pending": 0 if adapter is None else view.pending(adapter),
        "num_active_adapters": view.num_active_adapters,
        "has_loaded": adapter is not None and view.has_loaded(adapter),
        "is_gpu_resident": adapter is not None and adapter in view.gpu_adapters,
        "is_known": view.is_known,
        "kv_usage_ratio": view.kv_usage_ratio,
    }


def _describe_rejection(record: DecisionRecord, rejection: Rejection) -> dict[str, Any]:
    return {
        "status": rejection.status,
        "reason": str(rejection.reason),
        "message": rejection.message,
        "model": rejection.model,
        "retry_after_seconds": rejection.retry_after_s,
        "request_id": record.request_id,
        "path": record.path,
    }
