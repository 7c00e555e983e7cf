"""Responses to clients: an endpoint's on its way, or ours instead."""

from __future__ import annotations

from extproc.core import messages as m
from extproc.core import rejections
from extproc.core.body import pieces
from extproc.core.messages import BodyMode
from extproc.core.openai import MAX_MODEL_BYTES, error_body, model_body
from extproc.core.ports import Dispatcher, StreamSettings
from extproc.core.routes import Route, RouteKind
from extproc.core.types import Outcome, Rejection
from extproc.core.words import shortened


def body_mode(stated: BodyMode | None, settings: StreamSettings) -> BodyMode:
    """Return how a response's body will come; full duplex is assumed to be both ways."""
    if stated is not None:
        return stated
    assumed = settings.assumed_body_mode
    return assumed if assumed is BodyMode.FULL_DUPLEX_STREAMED else BodyMode.NONE


def release_body(event: m.ResponseBody, mode: BodyMode) -> list[m.Command]:
    """Let a part of a response's body go on unchanged."""
    if mode is not BodyMode.FULL_DUPLEX_STREAMED:
        return [m.ContinueResponseBody()]
    return [
        m.EchoResponseBody(data, last and event.end_of_stream) for data, last in pieces(event.data)
    ]


def outcome_of(status: int) -> Outcome:
    """Return how a request ended whose response began with `status`; 0 where none began."""
    if status == 0:
        return Outcome.CANCELLED
    return Outcome.FAILED if status >= 500 else Outcome.COMPLETED


def refusal(rejection: Rejection) -> m.Reply:
    """Return the error response for a client."""
    headers = rejections.dropped(rejection)
    if rejection.retry_after_s is not None:
        headers["retry-after"] = str(rejection.retry_after_s)
    if rejection.allowed_methods:
        headers["allow"] = ", ".join(rejection.allowed_methods)
    return m.Reply(rejection.status, error_body(rejection), headers, rejection.reason.value)


def models(
    route: Route, subset: frozenset[str] | None, dispatcher: Dispatcher, *, now: float
) -> m.Reply | Rejection:
    """Return the list of models, or the one that the path names."""
    if route.kind is RouteKind.LIST_MODELS:
        body = dispatcher.models_body(subset, now=now)
    else:
        name = shortened(route.resource, MAX_MODEL_BYTES)
        card = dispatcher.model(name, subset, now=now)
        body = card if isinstance(card, Rejection) else model_body(card)
    return body if isinstance(body, Rejection) else m.Reply(200, body)
