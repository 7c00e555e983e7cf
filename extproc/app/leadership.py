"""The router that leads: how it is found, asked and answers. Part of `app`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from extproc.app.observers import Observers
from extproc.core.following import (
    Answer,
    Following,
    FollowingSettings,
    Leaders,
    Question,
    Withdrawal,
)
from extproc.core.leading import Leading
from extproc.core.pickids import router_of
from extproc.core.router import Router
from extproc.shell.peers import PeersService
from extproc.shell.questions import Mail, encode
from extproc.shell.telemetry import Telemetry


class Leadership(Leaders):
    """Asks the router that leads, and answers the others while they believe it is this one.

    Args:
        router: Decides what others ask.
        peers: The links.
        next_id: Of a pick of this router.
        settings: Of asking.
        is_ready: Whether this router can decide.
        call_later: As an event loop's.
        clock: Monotonic seconds.
        observers: Calls what answers: an error there costs the asker a time-out.
    """

    def __init__(
        self,
        router: Router,
        peers: PeersService,
        *,
        next_id: Callable[[], str],
        settings: FollowingSettings,
        is_ready: Callable[[], bool],
        call_later: Callable[[float, Callable[[], None]], object],
        clock: Callable[[], float],
        observers: Observers,
    ) -> None:
        self._peers = peers
        self._call_later = call_later
        self._clock = clock
        self._observers = observers
        self._looks: set[str] = set()  # held questions that a timer is set for
        self.following = Following(self, next_id, router.max_hold_s, settings)
        self.leading = Leading(router, is_ready=is_ready)
        self.leading.on_settled = self._look_soon

    def begin(self) -> None:
        """Answer over all links that open from now on."""
        self._peers.answers, self._peers.on_mail = True, self._receive
        on_gone = self._peers.on_gone

        def forget(router_id: str) -> None:
            on_gone(router_id)
            self._observers.call("leading", self._forget, router_id)
            self._observers.call("leading", self.following.forget, router_id)

        self._peers.on_gone = forget

    # --- the way to the others --------------------------------------------------------------

    def leader(self) -> str | None:
        """Return the router that leads; None for this one."""
        least = min(self._peers.answerers(), default=None)
        return None if least is None or least > self._peers.router_id else least

    def ask(self, leader: str, question: Question) -> bool:
        """Send a question; return False if that cannot be done now."""
        return self._post(leader, question)

    def withdraw(self, leader: str, withdrawal: Withdrawal) -> None:
        """Send a withdrawal."""
        self._post(leader, withdrawal)

    def add_metrics(self, telemetry: Telemetry) -> None:
        """Register the metrics of questions."""
        following, leading = self.following, self.leading
        telemetry.add_gauge(
            "lead_is_leader", "This router leads", lambda: float(self.leader() is None)
        )
        telemetry.add_gauge(
            "lead_held", "Questions of other routers that are held", lambda: leading.num_held
        )
        telemetry.add_counters(
            "lead_asked",
            "Requests that were another router's to decide",
            "outcome",
            lambda: dict(following.num_asked),
        )
        telemetry.add_counters(
            "lead_answered",
            "Questions of other routers",
            "outcome",
            lambda: dict(leading.num_answered),
        )

    # --- inside -----------------------------------------------------------------------------

    def _post(self, router_id: str, mail: Mail) -> bool:
        message = encode(mail, now=self._clock())
        if message is None:
            return False
        return bool(self._observers.call("leading", self._peers.post, router_id, message))

    def _receive(self, router_id: str, mail: Mail) -> None:
        self._observers.call("leading", self._take, router_id, mail)

    def _take(self, router_id: str, mail: Mail) -> None:
        now = self._clock()
        if isinstance(mail, Question):
            self._answer(router_id, mail.pick_id, self.leading.ask(mail, now=now))
        elif isinstance(mail, Answer):
            self.following.hear(router_id, mail, now=now)
        else:
            self.leading.withdraw(mail.pick_id, now=now)

    def _answer(self, router_id: str, pick_id: str, answer: Answer | None) -> None:
        """Send an answer, if there is one, and look again at a question that is held."""
        if answer is not None:
            self._post(router_id, answer)
        due_s = self.leading.due_s(pick_id)
        if due_s is not None and pick_id not in self._looks:
            self._looks.add(pick_id)
            look = partial(self._observers.call, "leading", self._look, router_id, pick_id)
            self._call_later(max(0.0, due_s - self._clock()), look)

    def _look_soon(self, pick_id: str) -> None:
        look = partial(self._observers.call, "leading", self._look, router_of(pick_id), pick_id)
        self._call_later(0.0, look)

    def _forget(self, router_id: str) -> None:
        self.leading.forget(router_id, now=self._clock())

    def _look(self, router_id: str, pick_id: str) -> None:
        self._looks.discard(pick_id)
        self._answer(router_id, pick_id, self.leading.look(pick_id, now=self._clock()))
