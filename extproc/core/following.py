"""Questions to the router that leads: where should this request go?

Among the routers that answer questions and are linked, the one with the smallest id leads. It
decides by its own counts; the others ask it, and count its choice as a pick of their own.

1. A request is asked about once at most, and each question has one outcome.
2. Whoever gets no answer in time, or none that can be used, decides alone. A leader that holds the
   request says so again and again: its silence counts as none.
3. The leader counts the pick that it has named. A question whose answer is not used is withdrawn.
4. A leader that was silent `max_timeouts` times in a row is asked once in `pause_s`, until it
   answers.
5. Whatever the leader says, the request goes only to an endpoint that this router would admit it
   to itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple, Protocol

from msgspec import Struct

from extproc.core.types import Choice, RequestInfo, Snapshot, Wait

ANSWERED = "answered"
DECLINED = "declined"  # the leader leaves the decision to us
TIMEOUT = "timeout"
LOST = "lost"  # the leader has gone
WITHDRAWN = "withdrawn"  # the client has left, or its session decided meanwhile
FULL = "full"  # not asked: too many questions are open, or the leader does not read
SILENT = "silent"  # not asked: the leader was silent several times in a row

ASKED = "asked"
"""The reason of a pick that the leader chose."""


class Elsewhere(Wait, frozen=True):
    """The leader decides: it holds the request."""


class Asked(Elsewhere, frozen=True):
    """A question is under way: it is no hold, and the end is near."""


class Led(Choice, frozen=True, kw_only=True, gc=False):
    """The leader's choice.

    Attributes:
        pick_id: That the leader counts it by.
        leader: The router's id.
    """

    pick_id: str
    leader: str


class Answer(NamedTuple):
    """The leader's word on a question: an address, or a hold, or neither: decide alone.

    Attributes:
        held_s: Within this comes the next sign.
    """

    pick_id: str
    address: str = ""
    held_s: float = 0.0


class Question(NamedTuple):
    """A question as it is asked; `pick_id` is the id of the pick that its answer makes."""

    pick_id: str
    request: RequestInfo
    give_up_s: float  # when the asker stops holding the request


class Withdrawal(NamedTuple):
    """A question whose answer is not wanted, or was not used."""

    pick_id: str


class Leaders(Protocol):
    """The way to the others."""

    def leader(self) -> str | None:
        """Return the router that leads; None for this one."""

    def ask(self, leader: str, question: Question) -> bool:
        """Send a question; return False if that cannot be done now. Must not call back."""

    def withdraw(self, leader: str, withdrawal: Withdrawal) -> None:
        """Send a withdrawal."""


class FollowingSettings(Struct, frozen=True):
    """Bounds of asking.

    Attributes:
        timeout_s: For the first sign about a question, and for the next one of a hold beyond the
            time that the leader gave.
    """

    timeout_s: float = 0.02
    max_asked: int = 4_096  # questions open at a time
    max_timeouts: int = 3  # in a row
    pause_s: float = 1.0


class _Open(Struct, eq=False):
    """A question that has been asked; `outcome` is "" while it is open."""

    question: Question
    leader: str
    until_s: float
    wake: Callable[[], None]
    outcome: str = ""
    is_held: bool = False
    address: str = ""


class Following:
    """The questions of one router.

    Args:
        next_id: Of a pick of this router.
        max_hold_s: Longest time that a request is held, from its headers on.

    Attributes:
        num_asked: Requests of others' to decide, by outcome.
    """

    def __init__(
        self,
        leaders: Leaders,
        next_id: Callable[[], str],
        max_hold_s: float,
        settings: FollowingSettings | None = None,
    ) -> None:
        self._leaders = leaders
        self._next_id = next_id
        self._max_hold_s = max_hold_s
        self._settings = settings or FollowingSettings()
        self._open: dict[str, _Open] = {}
        self._watched = ""  # the leader that the next two are about
        self._num_timeouts = 0
        self._paused_until_s = 0.0
        outcomes = (ANSWERED, DECLINED, TIMEOUT, LOST, WITHDRAWN, FULL, SILENT)
        self.num_asked: Counter[str] = Counter(dict.fromkeys(outcomes, 0))

    @property
    def num_open(self) -> int:
        """Questions without an outcome."""
        return len(self._open)

    def ask(self, request: RequestInfo, wake: Callable[[], None], *, now: float) -> _Open | None:
        """Ask the leader, if there is one; None to decide alone. `wake` is called at the end."""
        leader, settings = self._leaders.leader(), self._settings
        if leader is None:
            return None
        if not self._may_ask(leader, now):
            self.num_asked[SILENT] += 1
            return None
        give_up_s = request.arrived_at_s + self._max_hold_s
        question = Question(self._next_id(), request, give_up_s)
        if len(self._open) >= settings.max_asked or not self._leaders.ask(leader, question):
            self.num_asked[FULL] += 1
            return None
        until_s = now + settings.timeout_s
        asked = self._open[question.pick_id] = _Open(question, leader, until_s, wake)
        return asked

    def hear(self, leader: str, answer: Answer, *, now: float) -> None:
        """Take an answer; to a question that is not open, it is not wanted."""
        asked = self._open.get(answer.pick_id)
        if asked is None or asked.leader != leader:
            if answer.address:
                self._leaders.withdraw(leader, Withdrawal(answer.pick_id))
            return
        if leader == self._watched:
            self._num_timeouts = 0
        if answer.held_s and not answer.address:
            until_s = now + answer.held_s + self._settings.timeout_s
            asked.is_held, asked.until_s = True, min(until_s, asked.question.give_up_s)
            return
        asked.address = answer.address
        self._end(asked, ANSWERED if answer.address else DECLINED)
        asked.wake()

    def forget(self, leader: str) -> None:
        """Decide alone what a router that has gone was asked."""
        for asked in self._asked_of(leader):
            self._end(asked, LOST)
            asked.wake()

    def time_out(self, asked: _Open, *, now: float) -> None:
        """End an open question whose time is over."""
        self.withdraw(asked, TIMEOUT)
        leader, settings = asked.leader, self._settings
        stood_still = now - asked.until_s >= settings.timeout_s  # this process did
        if stood_still or (asked.is_held and asked.until_s == asked.question.give_up_s):
            return
        if leader != self._watched:
            self._watched, self._num_timeouts = leader, 0
        self._num_timeouts += 1
        self._paused_until_s = now + settings.pause_s
        if self._num_timeouts == settings.max_timeouts:  # no other is answered either
            for each in self._asked_of(leader):
                self.withdraw(each, TIMEOUT)
                each.wake()

    def withdraw(self, asked: _Open, outcome: str = WITHDRAWN) -> None:
        """End a question if it is open, and let the leader forget it if it may count it."""
        if not asked.outcome:
            self._end(asked, outcome)
        elif asked.outcome != ANSWERED:
            return
        self._leaders.withdraw(asked.leader, Withdrawal(asked.question.pick_id))

    def _asked_of(self, leader: str) -> list[_Open]:
        return [each for each in self._open.values() if each.leader == leader]

    def _may_ask(self, leader: str, now: float) -> bool:
        if leader != self._watched or self._num_timeouts < self._settings.max_timeouts:
            return True
        if now < self._paused_until_s:
            return False
        self._paused_until_s = now + self._settings.pause_s  # this one asks, no other meanwhile
        return True

    def _end(self, asked: _Open, outcome: str) -> None:
        del self._open[asked.question.pick_id]
        asked.outcome = outcome
        self.num_asked[outcome] += 1


class Asking:
    """One request, as far as the leader is asked about it.

    Args:
        wake: Has the request's stream ask again, but not from within this call.
    """

    __slots__ = ("_asked", "_following", "_has_asked", "_wake")

    def __init__(self, following: Following, wake: Callable[[], None]) -> None:
        self._following = following
        self._wake = wake
        self._asked: _Open | None = None
        self._has_asked = False

    def choose(self, snapshot: Snapshot, request: RequestInfo) -> Led | Elsewhere | None:
        """Return the leader's choice, or a wait for it; None to decide alone."""
        now = snapshot.now
        if not self._has_asked:
            self._has_asked = True
            self._asked = self._following.ask(request, self._wake, now=now)
        asked = self._asked
        if asked is None:
            return None
        if not asked.outcome:
            if now < asked.until_s:
                return (Elsewhere if asked.is_held else Asked)(asked.until_s, "leader")
            self._following.time_out(asked, now=now)
        pick_id = asked.question.pick_id
        for view in snapshot.endpoints:
            if view.address == asked.address:
                return Led([view], ASKED, pick_id=pick_id, leader=asked.leader)
        self.settle()
        return None

    def settle(self, pick_id: str = "") -> None:
        """Let the leader forget the question: the request is decided, or gone.

        Args:
            pick_id: Of the request's pick; if it is the leader's, that stands.
        """
        asked, self._asked = self._asked, None
        if asked is not None and asked.question.pick_id != pick_id:
            self._following.withdraw(asked)
