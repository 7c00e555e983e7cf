"""`extproc.v1.Decisions`: the last routing decisions, remembered and followed live.

1. Without watchers, a decision costs one append: its own values are kept, and described only
   on request. If none are to be kept, and no policy is in shadow, it is only counted.
2. With watchers, it is encoded once for all of them, and once more for those that want the reason
   in words. That happens after the response, in passes of `MAX_PER_PASS` that use at most
   `MAX_SHARE` of the loop's time. Decisions that a watcher is too slow for are dropped and counted;
   it sees the gap in the sequence numbers.
3. A watcher that does not read must not fill the memory, and the transport does not report who
   reads. So a call is ended after a volume of bytes (the client calls again and resumes), and the
   number of watchers is bounded: together they can hold `max_watchers * max_watch_bytes`.

4. A decision that is kept learns how its pick ended, found by the pick's id. A watcher that wants
   outcomes gets them as news, after the decision; `MIN_BEHIND` of them wait for slow watchers.

A decision never contains a prompt, and of headers `x-request-id`, tenant and objective alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from itertools import count, islice
from typing import Any

from extproc.observe.decisionmessages import describe, encode, encode_end, time_text
from extproc.observe.watcher import Watcher, is_about
from extproc.phrases import short
from extproc.pods.columns import Candidates
from extproc.pods.completion import DecisionRecord, Ended
from extproc.types import Pick
from extproc.wire.rpc import Call, Code, Metadata, Method, Session

METHOD = "/extproc.v1.Decisions/Watch"

MAX_PER_PASS = 16
"""Decisions encoded in one pass; one with 100 candidates takes half a millisecond."""
MAX_FILTERED = 1024
"""Decisions filtered in one pass, for watchers that want few of them."""
MAX_SHARE = 0.2
"""Largest share of the event loop's time for watchers."""
MIN_BEHIND = 256
"""Decisions kept for slow watchers at least, and outcomes."""
MAX_SOUGHT = 100_000
"""The last decisions among which a single request is looked for, which takes 30 ms."""
MAX_REPLAYED = 10_000
"""Most decisions that can be replayed."""


@dataclass(eq=False)
class DecisionsService:
    """Remembers decisions and sends them to watchers.

    Attributes:
        num_kept: Decisions remembered. Each keeps what has changed of its candidates until the next
            one: some hundred bytes for a row. At least `MIN_BEHIND` are, for watchers.
        max_watchers: Calls at one time; further ones end with RESOURCE_EXHAUSTED.
        max_watch_bytes: Volume after which a call is ended with OK.
        later: Runs a callable after so many seconds; the default runs it at once.
        clock: Monotonic seconds, for the watchers' share of the loop's time.
        num_published: Decisions since the start: the last one's sequence number.
        num_ended: Ends of picks since the start: the last one's number.
        num_dropped: Decisions that a watcher was too slow for, once per watcher.
        is_read: Somebody may read what is remembered. If not, nothing is.
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
    _watchers: list[Watcher] = field(default_factory=list)
    _is_due: bool = False
    _num_readers: int = 0
    _read_until: int = 0  # the last decision for a watcher that has left, and may come again

    def __post_init__(self) -> None:
        self.is_read = self.num_kept > 0
        self._kept: deque[DecisionRecord] = deque(maxlen=max(self.num_kept, MIN_BEHIND))
        self._in_flight: dict[str, DecisionRecord] = {}  # those of them without an end, by pick id
        self._ends: deque[DecisionRecord] = deque(maxlen=MIN_BEHIND)

    def publish(self, record: DecisionRecord) -> None:
        """Remember one decision, and send it to watchers soon."""
        if not self.is_read:
            self.skip()
            return
        kept, decision = self._kept, record.decision
        if len(kept) == kept.maxlen:
            oldest = kept[0].decision
            if isinstance(oldest, Pick) and self._in_flight.pop(oldest.id, None) is not None:
                candidates = oldest.candidates
                if isinstance(candidates, Candidates):  # the pick itself may last long
                    candidates.forget()
        if isinstance(decision, Pick):
            self._in_flight[decision.id] = record
        self.num_published += 1
        kept.append(record)
        if self._watchers:
            self.send_soon()
        elif self.num_published > self._read_until and not (self.num_kept or self._num_readers):
            self.is_read = False
            for each in (self._kept, self._in_flight, self._ends):
                each.clear()

    def skip(self) -> None:
        """Count a decision that nobody reads."""
        self.num_published += 1

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Remember decisions for somebody who asks for the newest ones."""
        self._num_readers, self.is_read = self._num_readers + 1, True
        try:
            yield
        finally:
            self._num_readers -= 1

    def ended(self, ended: Ended, wall_s: float) -> None:
        """Remember how a pick ended, heard of at a time, and tell watchers soon."""
        if not self.is_read:
            self.num_ended += 1
            return
        record = self._in_flight.pop(ended.pick.id, None)
        if record is None:  # decided too long ago: only a watcher may remember it
            record = DecisionRecord(ended.pick, wall_s, 0.0)
        self.num_ended += 1
        record.finish(ended, wall_s, self.num_ended)
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

    def newest(self, most: int) -> list[DecisionRecord]:
        """Return the last decisions, oldest first: up to `most` of those that are there."""
        return list(islice(reversed(self._kept), most))[::-1]

    def _why_unknown(self, request: str) -> str:
        """Say why nothing is remembered of a request, for people."""
        kept = self.last(MAX_SOUGHT)
        since = f", now those since {time_text(kept[-1][1].wall_s)}" if kept else ""
        return (
            f"no decision about {short(request)} is known here: this router keeps its last "
            f"{min(self.num_kept, MAX_SOUGHT)} decisions (admin.max_decisions){since}. It was "
            "decided earlier, or by another router, or has not been decided yet"
        )

    def methods(self) -> tuple[Method, ...]:
        """Return Watch."""
        return (Method(METHOD, self._open, is_long_lived=True),)

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
        """Send every watcher in turn what it has not got; return whether there may be more."""
        messages: dict[tuple[bool, int, bool, bool, int, bool], bytes] = {}
        num_filtered = 0
        while behind := [each for each in self._watchers if self._is_behind(each)]:
            if len(messages) >= MAX_PER_PASS or num_filtered >= MAX_FILTERED:
                return True
            num_filtered += len(behind)
            for watcher in behind:
                record, is_news = self._next(watcher)
                if watcher.wants(record):
                    ends, last = is_news or watcher.knows_end(record), watcher.last_outcome
                    has_all = is_news or watcher.takes_candidates(record.wall_s)
                    key = is_news, watcher.sequence, watcher.explains, ends, last, has_all
                    if key not in messages:
                        messages[key] = (
                            encode_end(record, explains=watcher.explains)
                            if is_news
                            else encode(
                                watcher.sequence,
                                record,
                                explains=watcher.explains,
                                ends=ends,
                                last_outcome=last,
                                all_candidates=has_all,
                            )
                        )
                    watcher.send(messages[key])
                    watcher.follow(record, ends=ends)
        for watcher in tuple(self._watchers):
            watcher.end_if_answered()
        return False

    def _is_behind(self, watcher: Watcher) -> bool:
        return watcher.sequence < self.num_published or (
            watcher.wants_outcomes and watcher.num_ends < self.num_ended
        )

    def _next(self, watcher: Watcher) -> tuple[DecisionRecord, bool]:
        """Advance a watcher by one decision or, where it has all, by one end; return which."""
        if watcher.sequence < self.num_published:
            num_gone = self.num_published - len(self._kept)
            self.num_dropped += watcher.take_decision(num_gone)
            return self._kept[watcher.sequence - 1 - num_gone], False
        num_gone = self.num_ended - len(self._ends)
        watcher.take_outcome(num_gone)
        return self._ends[watcher.num_ends - 1 - num_gone], True

    def _open(self, call: Call, metadata: Metadata) -> Session:
        return Watcher(call, self._begin, self._leave, self.max_watch_bytes)

    def _begin(self, watcher: Watcher) -> None:
        """Have a watcher start after the last decision, or before those that it wants replayed."""
        asked, about = watcher.request, watcher.request.request
        if len(self._watchers) >= self.max_watchers:
            watcher.end(Code.RESOURCE_EXHAUSTED, "too many watchers")
            return
        wanted = [
            sequence
            for sequence, record in reversed(self.last(MAX_SOUGHT if about else MAX_REPLAYED))
            if (
                is_about(record, about)
                if about
                else sequence > asked.after_sequence and watcher.wants(record)
            )
        ]
        if about and not wanted:
            watcher.end(Code.NOT_FOUND, self._why_unknown(about))
            return
        first = 0 if about else max(0, len(wanted) - asked.replay_last)
        sequence = wanted[first] - 1 if first < len(wanted) else self.num_published
        self._watchers.append(watcher)
        self.is_read = True
        watcher.start(sequence, self.num_ended, self.num_ended - len(self._ends))
        self.send_soon()

    def _leave(self, watcher: Watcher) -> None:
        if watcher in self._watchers:
            self._watchers.remove(watcher)
            self._read_until = self.num_published + MIN_BEHIND
