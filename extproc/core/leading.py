"""Questions of other routers, answered here by this router's own counts and policy.

1. A question is answered at once, or held in this router's own queue, no longer than the asker
   holds its request; the asker gets a sign now and then. What is rejected here is left to the
   asker; so is what goes beyond a bound, and what is chosen without a fresh report of any pod.
2. A pick is named only if it is counted, as one that the asker has told of (`core.told`). When the
   asker tells of it, or of its end, it is that same pick.
3. A question that is withdrawn, or whose asker has gone, is no longer held, and its pick is ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from math import inf

from msgspec import Struct
from msgspec.structs import replace

from extproc.core.following import Answer, Question
from extproc.core.pickids import router_of
from extproc.core.queue import Ticket
from extproc.core.rejections import no_endpoints
from extproc.core.router import Router
from extproc.core.types import Pick, Rejection, Wait
from extproc.core.words import FOR_POD

PICKED = "picked"
DECLINED = "declined"
HELD_UNTIL_GONE = "withdrawn"  # while it was held


class LeadingSettings(Struct, frozen=True):
    """Bounds of answering.

    Attributes:
        sign_s: An asker whose question is held hears of it after this, and takes twice as long for
            silence; longer where there would be more than `max_signs_per_s`. A sign takes both ends
            40 us, and of a silent leader the next questions tell.
    """

    max_held: int = 16_384  # questions of all routers
    max_held_per_router: int = 4_096
    max_addresses: int = 65_536  # in the subsets of held questions, some 140 bytes each
    max_addresses_per_router: int = 16_384
    sign_s: float = 0.2
    max_signs_per_s: int = 2_000


class _Held(Struct, eq=False):
    """A question that is held; its asker is to hear of it at `sign_s`."""

    question: Question
    ticket: Ticket
    sign_s: float = 0.0


class Leading:
    """The questions that others have asked.

    Args:
        is_ready: Whether this router can decide.

    Attributes:
        on_settled: Called with the id of a held question's pick once `look` has the answer; not to
            be looked at from within the call.
        num_answered: Questions by how they ended here.
    """

    def __init__(
        self,
        router: Router,
        *,
        is_ready: Callable[[], bool] = lambda: True,
        settings: LeadingSettings | None = None,
    ) -> None:
        self._router = router
        router.told_wait_s = 0.0
        self._is_ready = is_ready
        self._settings = settings or LeadingSettings()
        self.on_settled: Callable[[str], None] = lambda _pick_id: None
        self._held: dict[str, _Held] = {}
        self._num_held: Counter[str] = Counter()
        self._num_addresses: Counter[str] = Counter()
        outcomes = (PICKED, DECLINED, HELD_UNTIL_GONE)
        self.num_answered: Counter[str] = Counter(dict.fromkeys(outcomes, 0))

    @property
    def num_held(self) -> int:
        """Questions held now."""
        return len(self._held)

    def ask(self, question: Question, *, now: float) -> Answer | None:
        """Return the first answer to a question; None to one that is held already."""
        if question.pick_id in self._held:
            return None
        return self._decide(question, now)

    def look(self, pick_id: str, *, now: float) -> Answer | None:
        """Return the next answer to a held question; None if it is not held, or not yet due."""
        held = self._held.get(pick_id)
        if held is None or now < held.sign_s:
            return None
        try:
            result = self._router.resume(held.ticket, now=now)
        finally:  # a policy may raise
            if held.ticket.result is not None:
                self._release(pick_id, now)
        return (
            self._sign(held, now) if result is held.ticket else self._answer(held.question, result)
        )

    def due_s(self, pick_id: str) -> float | None:
        """Return when to `look` at a question; None if it is not held."""
        held = self._held.get(pick_id)
        return None if held is None else held.sign_s

    def withdraw(self, pick_id: str, *, now: float) -> None:
        """Forget a question, and end its pick."""
        if self._release(pick_id, now):
            self.num_answered[HELD_UNTIL_GONE] += 1
        self._router.pool.told.finish(pick_id, now=now, has_run=False)

    def forget(self, router_id: str, *, now: float) -> None:
        """Forget the questions of a router that is gone; its picks are `core.told`'s."""
        for pick_id in [each for each in self._held if router_of(each) == router_id]:
            self._release(pick_id, now)
            self.num_answered[HELD_UNTIL_GONE] += 1

    def _decide(self, question: Question, now: float) -> Answer:
        router, result = self._router, None
        if self._is_ready():
            known, result = router.choose_in_turn(question.request, now=now)
            if isinstance(result, Pick):
                result = self._count(question.pick_id, result, now)
                if isinstance(result, Pick):
                    router.queue.charge(known)
            elif isinstance(result, Wait) and self._may_hold(question, result, now):
                return self._hold(question._replace(request=known), result, now)
        return self._answer(question, result)

    def _answer(self, question: Question, result: object) -> Answer:
        """Return the answer that a question ends with; the asker gets a pick or nothing."""
        if isinstance(result, Pick):
            self.num_answered[PICKED] += 1
            return Answer(question.pick_id, result.address)
        self.num_answered[DECLINED] += 1
        return Answer(question.pick_id)

    def _count(self, pick_id: str, pick: Pick, now: float) -> Pick | Rejection:
        """Count a pick under the asker's id; leave the choice to it where that cannot be."""
        pick = replace(pick, id=pick_id)
        if _is_sighted(pick) and self._router.pool.flights.start_told(pick, now=now):
            return pick
        return no_endpoints(pick.request.client_model)

    def _may_hold(self, question: Question, wait: Wait, now: float) -> bool:
        if wait.reason == FOR_POD:
            return False
        settings, asker = self._settings, router_of(question.pick_id)
        is_full = len(self._held) >= settings.max_held
        is_full = is_full or self._num_held[asker] >= settings.max_held_per_router
        num_addresses = len(question.request.subset or ())
        num_of_asker = num_addresses + self._num_addresses[asker]
        is_long = num_addresses + self._num_addresses.total() > settings.max_addresses
        is_long = is_long or num_of_asker > settings.max_addresses_per_router
        return now < question.give_up_s and not is_full and not (num_addresses and is_long)

    def _hold(self, question: Question, wait: Wait, now: float) -> Answer:
        pick_id = question.pick_id
        ticket = self._router.hold(
            question.request,
            wait,
            now=now,
            wake=partial(self._settled, pick_id),
            count=partial(self._count, pick_id),
            give_up_s=question.give_up_s,
        )
        if isinstance(ticket, Rejection):
            return self._answer(question, ticket)
        held = self._held[pick_id] = _Held(question, ticket)
        self._num_held[router_of(pick_id)] += 1
        self._num_addresses[router_of(pick_id)] += len(question.request.subset or ())
        return self._sign(held, now)

    def _settled(self, pick_id: str) -> None:
        self._held[pick_id].sign_s = -inf
        self.on_settled(pick_id)

    def _sign(self, held: _Held, now: float) -> Answer:
        settings = self._settings
        pause_s = max(settings.sign_s, len(self._held) / settings.max_signs_per_s)
        held.sign_s = now + pause_s
        return Answer(held.question.pick_id, held_s=2 * pause_s)

    def _release(self, pick_id: str, now: float) -> bool:
        held = self._held.pop(pick_id, None)
        if held is not None:
            self._router.queue.remove(held.ticket, now=now)
            asker = router_of(pick_id)
            self._num_held[asker] -= 1
            self._num_addresses[asker] -= len(held.question.request.subset or ())
            if not self._num_held[asker]:
                del self._num_held[asker], self._num_addresses[asker]
        return held is not None


def _is_sighted(pick: Pick) -> bool:
    """Return whether any candidate is known and can be reached."""
    return any(view.is_known and not view.is_unreachable for view in pick.candidates)
