"""Questions of other routers, answered here by this router's own counts and policy.

1. A question is answered at once, or held as long as the policy wants, this router holds requests,
   and the asker does; the asker gets a sign now and then. What is rejected here is left to the
   asker; so is what goes beyond a bound, and what is chosen without a fresh report of any pod.
2. A pick is named only if it is counted, as one that the asker has told of (`core.told`). When the
   asker tells of it, or of its end, it is that same pick.
3. A question that is withdrawn, or whose asker has gone, is no longer held, and its pick is ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from msgspec import Struct
from msgspec.structs import replace

from extproc.core.following import Answer, Question
from extproc.core.pickids import router_of
from extproc.core.router import Router
from extproc.core.types import Pick, Wait

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
    sign_s: float = 0.2
    max_signs_per_s: int = 2_000


class _Held(Struct, eq=False):
    """A question that is held: `look_s` is when the policy is to be asked again."""

    question: Question
    look_s: float
    sign_s: float = 0.0


class Leading:
    """The questions that others have asked.

    Args:
        is_ready: Whether this router can decide.

    Attributes:
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
        self._is_ready = is_ready
        self._settings = settings or LeadingSettings()
        self._held: dict[str, _Held] = {}
        self._num_held: Counter[str] = Counter()
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
        if held is None or now < self._due_s(held):
            return None
        if now >= held.look_s:
            return self._decide(held.question, now)
        return self._sign(held, now)

    def due_s(self, pick_id: str) -> float | None:
        """Return when to `look` at a question; None if it is not held."""
        held = self._held.get(pick_id)
        return None if held is None else self._due_s(held)

    def withdraw(self, pick_id: str, *, now: float) -> None:
        """Forget a question, and end its pick."""
        if self._release(pick_id):
            self.num_answered[HELD_UNTIL_GONE] += 1
        else:
            self._router.pool.told.finish(pick_id, now=now, has_run=False)

    def forget(self, router_id: str) -> None:
        """Forget the questions of a router that is gone; its picks are `core.told`'s."""
        for pick_id in [each for each in self._held if router_of(each) == router_id]:
            self._release(pick_id)
            self.num_answered[HELD_UNTIL_GONE] += 1

    def _decide(self, question: Question, now: float) -> Answer:
        pick_id, result = question.pick_id, None
        self._release(pick_id)  # first: a policy may raise
        if self._is_ready():
            result = self._router.choose(question.request, now=now)
        if isinstance(result, Wait) and self._may_hold(question, now):
            return self._hold(question, result, now)
        if isinstance(result, Pick) and _is_sighted(result):
            pick = replace(result, id=pick_id)
            if self._router.pool.flights.start_told(pick, now=now):
                self.num_answered[PICKED] += 1
                return Answer(pick_id, pick.address)
        self.num_answered[DECLINED] += 1
        return Answer(pick_id)

    def _may_hold(self, question: Question, now: float) -> bool:
        settings, asker = self._settings, router_of(question.pick_id)
        is_full = len(self._held) >= settings.max_held
        is_full = is_full or self._num_held[asker] >= settings.max_held_per_router
        return now < question.give_up_s and not is_full

    def _hold(self, question: Question, wait: Wait, now: float) -> Answer:
        held = _Held(question, min(wait.until_s, question.give_up_s))
        self._held[question.pick_id] = held
        self._num_held[router_of(question.pick_id)] += 1
        return self._sign(held, now)

    def _sign(self, held: _Held, now: float) -> Answer:
        settings = self._settings
        pause_s = max(settings.sign_s, len(self._held) / settings.max_signs_per_s)
        held.sign_s = now + pause_s
        return Answer(held.question.pick_id, held_s=2 * pause_s)

    def _due_s(self, held: _Held) -> float:
        return min(held.look_s, held.sign_s)

    def _release(self, pick_id: str) -> bool:
        held = self._held.pop(pick_id, None)
        if held is not None:
            asker = router_of(pick_id)
            self._num_held[asker] -= 1
            if not self._num_held[asker]:
                del self._num_held[asker]
        return held is not None


def _is_sighted(pick: Pick) -> bool:
    """Return whether any candidate is known and can be reached."""
    return any(view.is_known and not view.is_unreachable for view in pick.candidates)
