"""Our own answers to clients, in place of an endpoint's."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from extproc import rejections
from extproc.openai import MAX_MODEL_BYTES, error_body, model_body, version_body
from extproc.phrases import shortened
from extproc.request import messages as m
from extproc.request.interfaces import ModelLister
from extproc.request.listbudget import Lists
from extproc.types import Rejection


def refusal(rejection: Rejection) -> m.Reply:
    """Return the error response for a client."""
    headers = rejections.dropped(rejection)
    if rejection.retry_after_s is not None:
        headers["retry-after"] = str(rejection.retry_after_s)
    if rejection.allowed_methods:
        headers["allow"] = ", ".join(rejection.allowed_methods)
    return m.Reply(rejection.status, error_body(rejection), headers, rejection.reason.value)


def health(outage: Rejection | None) -> m.Reply:
    """Return the answer to a probe: nothing to say, or what every request would get.

    Such an answer is no rejection of a request, and not counted as one.
    """
    return m.Reply(200, b"{}") if outage is None else refusal(outage)


def version(ours: str) -> m.Reply:
    """Return the router's version in the shape of an engine's, marked as ours: clients parse it
    (PEP 440), and an engine's old version would mean something to them.
    """
    return m.Reply(200, version_body(f"{ours}+extproc"))


def model(
    name: str, subset: frozenset[str] | None, models: ModelLister, *, tenant: str, now: float
) -> m.Reply | Rejection:
    """Return the model of that name, if a tenant may use it."""
    card = models.find(shortened(name, MAX_MODEL_BYTES), subset, tenant, now=now)
    return card if isinstance(card, Rejection) else m.Reply(200, model_body(card))


class ListRequest:
    """A request for the list of models that a tenant may use, on its way through the line."""

    __slots__ = (
        *("_clock", "_lists", "_making", "_models", "_place", "_seconds", "_subset", "_tenant"),
    )

    def __init__(
        self,
        models: ModelLister,
        lists: Lists,
        subset: frozenset[str] | None,
        tenant: str,
        wake: Callable[[], None],
        clock: Callable[[], float],
        *,
        now: float,
    ) -> None:
        self._models, self._lists, self._clock = models, lists, clock
        self._subset, self._tenant = subset, tenant
        self._place = lists.enter(wake, now=now)
        self._making: Iterator[bytes | Rejection] | None = None
        self._seconds = 0.0

    def answer(self, *, now: float) -> m.Reply | m.WakeAt | Rejection:
        """Return the list, or when to ask again."""
        lists, place = self._lists, self._place
        if not lists.is_next(place, now=now):
            is_over = now >= place.give_up_s
            return (
                rejections.TOO_MANY_LISTS if is_over else m.WakeAt(lists.recheck_s(place, now=now))
            )
        began_s = self._clock()
        if self._making is None:
            self._making = self._models.make_body(self._subset, self._tenant, now=now)
        body = next(self._making)
        took_s = self._clock() - began_s
        self._seconds += took_s
        if isinstance(body, Rejection):
            return body
        if not body:  # what others wait for comes in between
            return m.WakeAt(now + 2 * took_s)
        lists.send(place, len(body), seconds=self._seconds)
        self._seconds = 0.0
        return m.Reply(200, body)

    def leave(self) -> None:
        """Take it out of the line, or its list out of those that are not sent yet."""
        self._lists.leave(self._place, seconds=self._seconds)
        self._making, self._seconds = None, 0.0
