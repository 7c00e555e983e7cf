"""Responses to clients: an endpoint's on its way, or ours instead."""

from __future__ import annotations

from extproc.core import messages as m
from extproc.core import rejections
from extproc.core.body import pieces
from extproc.core.messages import IN_CHUNKS, BodyMode
from extproc.core.openai import MAX_MODEL_BYTES, error_body, model_body
from extproc.core.ports import Dispatcher, StreamSettings
from extproc.core.restoring import Restorer, restorer_of
from extproc.core.routes import Route, RouteKind
from extproc.core.types import Outcome, Pick, Rejection, RequestInfo
from extproc.core.words import shortened


def body_mode(stated: BodyMode | None, settings: StreamSettings) -> BodyMode:
    """Return how a response's body will come; full duplex is assumed to be both ways."""
    if stated is not None:
        return stated
    assumed = settings.assumed_body_mode
    return assumed if assumed is BodyMode.FULL_DUPLEX_STREAMED else BodyMode.NONE


def restorer(
    event: m.ResponseHeaders, pick: Pick | None, mode: BodyMode, settings: StreamSettings
) -> Restorer | None:
    """Return what puts the client's model back into a response that begins; None for nothing."""
    if pick is None or not may_restore(pick.request, mode, settings) or event.end_of_stream:
        return None
    request = pick.request
    return restorer_of(
        event.content_type, event.content_encoding, served=request.model, written=request.written
    )


def may_restore(request: RequestInfo, mode: BodyMode, settings: StreamSettings) -> bool:
    """Return whether the response may have to name another model than the pod's."""
    is_wanted = settings.restore_model if request.restores is None else request.restores
    return bool(request.written) and is_wanted and mode is not BodyMode.NONE


def release_body(
    event: m.ResponseBody, mode: BodyMode, restorer: Restorer | None
) -> list[m.Command]:
    """Let a part of a response's body go on, changed by a restorer if there is one."""
    is_duplex, data = mode is BodyMode.FULL_DUPLEX_STREAMED, event.data
    if restorer is not None:
        data = restorer.feed(data)
        if event.end_of_stream or mode not in IN_CHUNKS:
            data += restorer.end()
        if is_duplex and not data and not event.end_of_stream:
            return []  # all of it is kept for now
    if not is_duplex:
        return [m.ContinueResponseBody(None if restorer is None else data)]
    return [m.EchoResponseBody(part, last and event.end_of_stream) for part, last in pieces(data)]


def release_trailers(mode: BodyMode, restorer: Restorer | None) -> list[m.Command]:
    """Let a response's trailers go on, behind what was kept of its body."""
    kept = b"" if restorer is None else restorer.end()
    if kept and mode is BodyMode.FULL_DUPLEX_STREAMED:
        return [m.EchoResponseBody(kept), m.ContinueResponseTrailers()]
    return [m.ContinueResponseTrailers()]


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
    route: Route,
    subset: frozenset[str] | None,
    dispatcher: Dispatcher,
    *,
    tenant: str = "",
    now: float,
) -> m.Reply | Rejection:
    """Return the list of models that a tenant may use, or the one that the path names."""
    if route.kind is RouteKind.LIST_MODELS:
        body = dispatcher.models_body(subset, tenant, now=now)
    else:
        name = shortened(route.resource, MAX_MODEL_BYTES)
        card = dispatcher.model(name, subset, tenant, now=now)
        body = card if isinstance(card, Rejection) else model_body(card)
    return body if isinstance(body, Rejection) else m.Reply(200, body)
