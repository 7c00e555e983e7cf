"""Endpoints that answered 404 for a model that they list: they get no requests for it for a while.

A 404 of its own says at once that an endpoint lacks the model, or that the request named something
else that does not exist.

Rules:
1. After one, the endpoint counts as one that does not list the model, if another can take requests
   for it. That ends with the next list that has the model, and was asked for after the 404. Each
   further 404 doubles the time before which no list counts, until the endpoint serves the model.
2. One endpoint at a time is disbelieved about a model. If another answers 404 for it meanwhile, it
   is the requests: both are believed, and so is each for `EXCUSED_S`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from msgspec import Struct

from extproc.pods.endpointstate import EndpointState
from extproc.pods.modelindex import Listing

EXCUSED_S = 30.0
FIRST_S, MAX_S = 1.0, 60.0
"""Time before which no list counts, from the second 404 in a row on, and at most."""
MAX_MODELS = 1024
"""About which somebody is disbelieved, or was lately; further 404s change nothing."""


class _Doubt(Struct):
    """Attributes:
    pod: That is disbelieved, or was last.
    until_s: No list that was asked for before counts; or all are believed until then.
    """

    pod: EndpointState
    until_s: float
    hold_s: float = 0.0
    is_excused: bool = False


class Disbelief:
    """Which endpoints are disbelieved about which models.

    Args:
        takers: Returns the endpoints that can take requests at some time.
    """

    def __init__(self, takers: Callable[[float], Iterable[EndpointState]]) -> None:
        self._takers = takers
        self._doubts: dict[str, _Doubt] = {}

    def not_found(self, pod: EndpointState, model: str, *, now: float) -> None:
        """Record a 404 to a request for a model that ended at `now`."""
        doubt = self._doubts.get(model)
        if doubt is not None and doubt.is_excused:
            if now < doubt.until_s:
                return
            del self._doubts[model]
            doubt = None
        if doubt is not None and doubt.pod is not pod:
            doubt.pod.listed.believe(model)
            self._doubts[model] = _Doubt(pod, now + EXCUSED_S, is_excused=True)
            return
        if not any(each is not pod and each.listed.card_of(model) for each in self._takers(now)):
            return
        if doubt is None:
            if len(self._doubts) >= MAX_MODELS:
                self._forget(now)
            if len(self._doubts) < MAX_MODELS:
                self._doubts[model] = _Doubt(pod, now)
                pod.listed.disbelieve(model)
        else:
            doubt.hold_s = min(MAX_S, 2 * doubt.hold_s or FIRST_S)
            doubt.until_s = now + doubt.hold_s
            pod.listed.disbelieve(model)

    def served(self, pod: EndpointState, model: str) -> None:
        """Record that an endpoint has served a model."""
        doubt = self._doubts.get(model)
        if doubt is not None and doubt.pod is pod and not doubt.is_excused:
            del self._doubts[model]
            pod.listed.believe(model)

    def listed(self, pod: EndpointState, models: Listing, *, asked_at_s: float) -> None:
        """Record an endpoint's list of models."""
        for model in [*pod.listed.disbelieved]:
            doubt = self._doubts.get(model)
            if doubt is None or model not in models or doubt.until_s < asked_at_s:
                pod.listed.believe(model)

    def drop(self, pod: EndpointState) -> None:
        """Forget an endpoint that has left."""
        self._doubts = {model: each for model, each in self._doubts.items() if each.pod is not pod}

    def _forget(self, now: float) -> None:
        """Forget those that say nothing any more."""
        self._doubts = {
            model: each
            for model, each in self._doubts.items()
            if model in each.pod.listed.disbelieved or now < each.until_s
        }
