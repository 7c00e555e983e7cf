"""The prompts that one endpoint has still to compute: those sent there without the ones that are
known to have had their first token.

An engine computes prompts in the order of their arrival, so all that were sent before one with a
first token are computed as well. How long the rest takes is an estimate, a clock that runs on from
one request to the next. Facts correct it:

1. A first token, by the access log, and the number of first tokens that a report counts: a prompt
   that had one is no longer ahead.
2. A report of so many requests that wait: they are ahead, whatever the clock says, but for those
   that wait for an adapter's slot. Of the prompts that it can show, no more are ahead than wait,
   and one that runs. An engine computes prompts one after the other, so only the last prompt of its
   batch may be unfinished.
3. The end of a request, which is ahead no longer.
"""

from __future__ import annotations

from collections import deque
from math import inf

from msgspec import Struct

from extproc.costs import Costs
from extproc.types import LoadReport

MAX_QUEUE_S = 60.0
"""Of prompts to be computed: what other routers tell of may be false, and passes by then."""
MAX_AGE_S = 1.0
"""Of a request that is new here. Routers report within milliseconds. Later reports mostly repeat
earlier ones, over a new link.
"""
NUM_SENT = 64
"""The latest prompts of which it is remembered when they were sent."""
UNSEEN_S = 1.0
"""Age from which a report shows a request: not before the step that runs when it arrives has ended,
and the longest computes 8,192 tokens."""


class _Prompt(Struct):
    """One request's, or those of as many routers as are assumed to send alike.

    Attributes:
        num_bytes: Of each, without a cached prefix.
    """

    sent_at_s: float
    num_bytes: int
    load_s: float
    num: int


class Prompts:
    """A queue that drains at the endpoint's speed.

    Attributes:
        costs: The endpoint's.
        done_s: When all are computed; -inf for long ago.
        sent_bytes: Of all that were ever sent.
    """

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.done_s = -inf
        self.sent_bytes = 0
        self._sent: deque[tuple[float, int]] = deque(maxlen=NUM_SENT)
        self._ahead: dict[str | int, _Prompt] = {}  # by the pick's id, in the order of arrival
        self._ahead_bytes, self._ahead_s = 0, 0.0  # of all those: of prompts, and of loads
        self._first_tokens: int | None = None  # by the last report
        self._num_counted = 0  # of those since, that are known already

    def price(self, costs: Costs) -> None:
        """Replace the costs: what is to be computed from now on takes as long."""
        self.costs = costs

    def picked(
        self,
        pick_id: str | int,
        num_bytes: int,
        num: int,
        load_s: float,
        at_s: float,
        now: float,
    ) -> None:
        """Add the prompts of `num` requests that were sent at `at_s`, unless they are old, and one
        load."""
        if now - at_s > MAX_AGE_S:
            return
        self._ahead[pick_id] = _Prompt(at_s, num_bytes, load_s, num)
        num_bytes *= num
        self._ahead_bytes += num_bytes
        self._ahead_s += load_s
        self.sent_bytes += num_bytes
        self._sent.append((at_s, self.sent_bytes))
        begun_s = at_s if at_s > self.done_s else self.done_s
        done_s = begun_s + (num_bytes * self.costs.prompt_s_per_byte + load_s)
        latest_s = now + MAX_QUEUE_S
        self.done_s = done_s if done_s < latest_s else latest_s

    def sent_by(self, at_s: float) -> int:
        """Return all bytes that were sent by then, as far as that is remembered."""
        for sent_at_s, num_bytes in reversed(self._sent):
            if sent_at_s <= at_s:
                return num_bytes
        return 0

    def had_first_token(self, sent_at_s: float, *, now: float) -> None:
        """Record that a request that was sent then had its first token at `now`, and so those that
        were sent before."""
        num = 0
        for prompt in self._ahead.values():
            if prompt.sent_at_s >= sent_at_s:
                break
            num += prompt.num
        if num:
            self._num_counted += num
            self._take(num)
        if self.done_s > now:
            self.done_s = min(self.done_s, self._run(now))

    def ended(self, pick_id: str, has_run: bool, now: float) -> None:
        """Forget a request that has ended, with a first token if it has run, or is elsewhere, as is
        known at `now`."""
        prompt = self._ahead.pop(pick_id, None)
        if prompt is not None:
            self._ahead_bytes -= prompt.num * prompt.num_bytes
            self._ahead_s = self._ahead_s - prompt.load_s if self._ahead else 0.0
            if has_run:
                self._num_counted += prompt.num
        if self.done_s > now:
            self.bound(now)

    def ended_between(
        self, num: int, has_run: bool, from_s: float, until_s: float, now: float
    ) -> None:
        """Forget so many requests of other routers, that were sent between two times."""
        found, num_left = [], num
        for number, prompt in self._ahead.items():
            sent_at_s = prompt.sent_at_s
            if sent_at_s < from_s:
                continue
            if sent_at_s > until_s:
                break
            if number.__class__ is int:
                found.append((number, prompt))
                num_left -= prompt.num
                if num_left <= 0:
                    break
        for number, prompt in found:
            taken = num if num < prompt.num else prompt.num
            num -= taken
            self._drop(number, prompt, taken)
            if has_run:
                self._num_counted += taken
        if self.done_s > now:
            self.bound(now)

    def bound(self, now: float) -> None:
        """Take all prompts but those that are known to be ahead for computed by now."""
        done_s = now + self._ahead_bytes * self.costs.prompt_s_per_byte + self._ahead_s
        if done_s < self.done_s:
            self.done_s = done_s

    def reported(self, report: LoadReport, *, asked_at_s: float, now: float) -> None:
        """Correct what is ahead by a report, true at some moment from `asked_at_s` to `now`."""
        first_tokens, before = report.num_first_tokens, self._first_tokens
        if first_tokens is not None and before is not None:
            self._take(first_tokens - before - self._num_counted)
        self._first_tokens, self._num_counted = first_tokens, 0
        most = report.num_waiting + min(1, report.num_running)
        seen_by_s, num_seen = asked_at_s - UNSEEN_S, 0
        for prompt in self._ahead.values():
            if prompt.sent_at_s <= seen_by_s:
                num_seen += prompt.num
        if num_seen > most:
            self._take(num_seen - most)
        if self.done_s > now:
            self.bound(now)
        num_waiting = report.num_waiting - (report.num_deferred or 0)
        if num_waiting > 0:
            waits_s = asked_at_s + self._newest_s(num_waiting, asked_at_s)
            self.done_s = max(self.done_s, min(waits_s, now + MAX_QUEUE_S))

    def restarted(self) -> None:
        """Take all prompts for gone."""
        self.done_s = -inf
        self._ahead.clear()
        self._ahead_bytes, self._ahead_s = 0, 0.0
        self._first_tokens, self._num_counted = None, 0

    def _run(self, now: float) -> float:
        """Return when all that may be ahead is computed, if none of it has been begun by now, which
        may be before some of it was sent."""
        done_s, s_per_byte = now, self.costs.prompt_s_per_byte
        for prompt in self._ahead.values():
            # Written out: a call for each prompt is what this loop would cost.
            if prompt.sent_at_s > done_s:
                done_s = prompt.sent_at_s
            done_s += prompt.num * prompt.num_bytes * s_per_byte + prompt.load_s
        return done_s

    def _newest_s(self, num_waiting: int, asked_at_s: float) -> float:
        """Return the work of the newest that wait by a report, and of what was sent since."""
        work_s, s_per_byte = 0.0, self.costs.prompt_s_per_byte
        for prompt in reversed(self._ahead.values()):
            if prompt.sent_at_s <= asked_at_s:
                if num_waiting <= 0:
                    break
                num_waiting -= prompt.num
            work_s += prompt.num * prompt.num_bytes * s_per_byte + prompt.load_s
        return work_s

    def _take(self, num: int) -> None:
        """Take so many of the oldest for computed."""
        while num > 0 and self._ahead:
            pick_id, oldest = next(iter(self._ahead.items()))
            taken = min(num, oldest.num)
            num -= taken
            self._drop(pick_id, oldest, taken)

    def _drop(self, pick_id: str | int, prompt: _Prompt, num: int) -> None:
        """Take so many of one pick for computed."""
        self._ahead_bytes -= num * prompt.num_bytes
        if num < prompt.num:
            prompt.num -= num
            return
        del self._ahead[pick_id]
        self._ahead_s = self._ahead_s - prompt.load_s if self._ahead else 0.0
