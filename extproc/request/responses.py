"""Responses to clients: an endpoint's on its way, or ours instead."""

from __future__ import annotations

from collections.abc import Callable

from extproc import rejections
from extproc.fleet.evidence import Evidence
from extproc.openai import MAX_MODEL_BYTES, error_body, model_body, version_body
from extproc.phrases import shortened
from extproc.request import messages as m
from extproc.request.body import pieces
from extproc.request.interfaces import Listing, StreamSettings
from extproc.request.listbudget import Lists
from extproc.request.lostrewrites import NOT_FOUND
from extproc.request.messages import IN_CHUNKS, BodyMode
from extproc.request.restoring import Restorer, restorer_of
from extproc.types import Outcome, Pick, Rejection, RequestInfo

_FULL, _GATEWAY_ERRORS = (429, 503), (502, 504)


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
        event.content_type, event.content_encoding, served=request.model, written=request._written
    )


def may_restore(request: RequestInfo, mode: BodyMode, settings: StreamSettings) -> bool:
    """Return whether the response may have to name another model than the pod's."""
    is_wanted = settings.restore_model if request._restores is None else request._restores
    return bool(request._written) and is_wanted and mode is not BodyMode.NONE


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


def is_undone(
    request: RequestInfo, status: int, data: bytes | None, restorer: Restorer | None
) -> bool:
    """Return whether a part of a response tells that its pod has read the client's model.

    The message of an error names it. Where no body comes (None), the status has to do.
    """
    if status != NOT_FOUND:
        return restorer is not None and restorer.is_undone
    return data is None or request._written.encode() in data


def outcome_of(status: int, *, is_whole: bool) -> Outcome:
    """Return how a request ended whose response began with `status`; 0 where none began.

    Where the end of a response did not pass by, the data plane does not tell whether the endpoint
    has broken off or the client has left: either resets the RPC.
    """
    if status == 0:
        return Outcome.CANCELLED
    if status >= 500:
        return Outcome.FAILED
    return Outcome.COMPLETED if is_whole else Outcome.UNKNOWN


def verdict_of(status: int, *, is_whole: bool, content_type: str) -> Evidence:
    """Return what a response says of its endpoint; a local reply of Envoy's is plain text."""
    if status == 0:
        return Evidence.UNANSWERED
    if status in _GATEWAY_ERRORS or (status >= 500 and content_type.startswith("text/plain")):
        return Evidence.BROKEN
    if status in _FULL:
        return Evidence.FULL
    if status >= 400:
        return Evidence.NOT_FOUND if status == 404 else Evidence.FAILED
    return Evidence.SERVED if is_whole else Evidence.NONE


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
    name: str, subset: frozenset[str] | None, models: Listing, *, tenant: str, now: float
) -> m.Reply | Rejection:
    """Return the model of that name, if a tenant may use it."""
    card = models.find(shortened(name, MAX_MODEL_BYTES), subset, tenant, now=now)
    return card if isinstance(card, Rejection) else m.Reply(200, model_body(card))


class ListRequest:
    """A request for the list of models that a tenant may use, on its way through the line."""

    __slots__ = ("_clock", "_lists", "_models", "_place", "_subset", "_tenant")

    def __init__(
        self,
        models: Listing,
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

    def answer(self, *, now: float) -> m.Reply | m.WakeAt | Rejection:
        """Return the list, or when to ask again."""
        lists, place = self._lists, self._place
        if not lists.is_next(place, now=now):
            is_over = now >= place.give_up_s
            return rejections.TOO_MANY_LISTS if is_over else m.WakeAt(lists.look_s(place, now=now))
        began_s = self._clock()
        body = self._models.body(self._subset, self._tenant, now=now)
        if isinstance(body, Rejection):
            return body
        lists.send(place, len(body), seconds=self._clock() - began_s)
        return m.Reply(200, body)

    def leave(self) -> None:
        """Take it out of the line, or its list out of those that are not sent yet."""
        self._lists.leave(self._place)
